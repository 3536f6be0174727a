# SPDX-License-Identifier: Apache-2.0
"""How long the model may wait for a staging slot, and what is counted."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.clock import Clock
from vllm_ascend_pd.core.observer import Observed, Observer, PushDelayed
from vllm_ascend_pd.core.running_time import RunningTime
from vllm_ascend_pd.device import ops
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.regroup import Regrouper, StagingRing
from vllm_ascend_pd.prefill.step_send import LayerPush

GRANT_WAIT_S, SLOT_TIMEOUT_S = 0.2, 0.3
SLOT_BYTES = 64


class Waits(Observer):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on(self, event: Observed) -> None:
        if isinstance(event, PushDelayed):
            self.seconds.append(event.seconds)


class OnTheModelsThread:
    """Runs submitted work at once, as an NPU does."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def submit(self, work: Callable[[], None], after: object) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - an event delivers it
            self.error = error


class Regrouping:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "split_heads", lambda *args: None)
        self.waits = Waits()
        self.device: Any = OnTheModelsThread()
        self.ring = StagingRing(self.device.allocate(SLOT_BYTES), SLOT_BYTES, 1, RunningTime())
        unused: Any = None
        config: Any = SimpleNamespace(control_timeout_s=GRANT_WAIT_S, write_timeout_s=SLOT_TIMEOUT_S)
        engine: Any = SimpleNamespace(limits=SimpleNamespace(rest_s=0.0))
        rank = PrefillRank(unused, config, self.device, engine, unused, observer=self.waits)
        self.regrouper = Regrouper(rank, self.ring, {})

    def submit(self, **state: bool) -> float:
        """Returns for how long the model waited."""
        began = time.monotonic()
        event: Any = object()
        self.regrouper.submit(LayerPush("layer", layer(**state), [], event, event), [])
        return time.monotonic() - began


def layer(has_failed: bool = False, waits_for_grant: bool = False) -> Any:
    mapping = SimpleNamespace(planes=1, entries=1, plane_row=SLOT_BYTES, ranks=(), packs=False)
    return SimpleNamespace(
        mapping=mapping,
        ticket_ids=(),
        share=1,
        tensor_bytes=SLOT_BYTES,
        slots_lock=threading.Lock(),
        plane_bytes=SLOT_BYTES,
        unit_offsets=torch.zeros(1, dtype=torch.int64),
        has_failed=has_failed,
        waits_for_grant=waits_for_grant,
        decode_engine="decode",
        give_up_ungranted=lambda reason: None,
    )


@pytest.fixture
def regrouping(monkeypatch: pytest.MonkeyPatch) -> Regrouping:
    return Regrouping(monkeypatch)


def test_taking_a_free_slot_counts_no_wait(regrouping: Regrouping) -> None:
    assert regrouping.submit() < SLOT_TIMEOUT_S
    assert (regrouping.device.error, regrouping.waits.seconds) == (None, [])


@pytest.mark.parametrize("holder_waits", [False, True])
def test_a_wait_for_a_slot_is_bounded_and_counted(regrouping: Regrouping, holder_waits: bool) -> None:
    holder, reasons = layer(waits_for_grant=holder_waits), []
    holder.give_up_ungranted = reasons.append
    regrouping.ring.take(holder)
    waited = regrouping.submit()
    assert isinstance(regrouping.device.error, TimeoutError)
    [counted] = regrouping.waits.seconds
    least = SLOT_TIMEOUT_S + GRANT_WAIT_S * holder_waits
    assert least <= counted <= waited < least + 5
    assert len(reasons) == holder_waits, "it gives its slot up if it waits for a grant"


def test_a_layer_whose_requests_have_failed_does_not_wait(regrouping: Regrouping) -> None:
    """So a step with many layers waits once, not for each of them."""
    regrouping.ring.take(layer())
    assert regrouping.submit(has_failed=True) < SLOT_TIMEOUT_S
    assert isinstance(regrouping.device.error, TimeoutError)
    assert regrouping.waits.seconds == []


# --- slots at rest after a failed write --------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ring(clock: Clock) -> StagingRing:
    return StagingRing(torch.zeros(2 * 64, dtype=torch.uint8), 64, 2, clock.monotonic)  # type: ignore[arg-type]


def test_a_slot_at_rest_is_nobodys_until_its_time(ring: StagingRing, clock: Clock) -> None:
    a, b = ring.take("a"), ring.take("b")
    assert a is not None
    assert b is not None
    ring.release(a, settled_at=108.0)
    assert ring.holders == ["b"]
    assert ring.free_rested()
    assert ring.take("c") is None
    clock.now = 107.9
    assert ring.take("c") is None
    clock.now = 108.0
    assert ring.take("c") == a
    assert not ring.free_rested()
