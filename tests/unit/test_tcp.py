# SPDX-License-Identifier: Apache-2.0
"""Writing over TCP: what Mooncake's queue to a peer holds."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.core.config import parse_config
from vllm_ascend_pd.transport.batches import SettingError, TransferLimits
from vllm_ascend_pd.transport.engine import export_settings
from vllm_ascend_pd.transport.tcp import PeerQueue, TcpWriter
from vllm_ascend_pd.transport.tcp_settings import most_descriptors
from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT, LEASE_EXPIRED, TransferError


@given(capacity=st.integers(1, 1 << 17))
def test_batches_that_run_and_as_many_that_failed_fit(capacity: int) -> None:
    size = most_descriptors(capacity)
    assert size == 1 or 2 * BATCHES_IN_FLIGHT * size <= capacity


@given(
    capacity=st.integers(4, 40),
    steps=st.lists(st.tuples(st.integers(1, 10), st.sampled_from(["enter", "arrives", "fails"])), max_size=30),
)
def test_never_more_than_the_capacity(capacity: int, steps: list[tuple[int, str]]) -> None:
    queue = PeerQueue(capacity, settle_s=3600)
    running: list[int] = []
    left = 0
    for size, step in steps:
        if step == "enter":
            fits = len(running) < BATCHES_IN_FLIGHT and sum(running) + left + size <= capacity
            assert queue.enter(size, timeout_s=0) == fits
            running += [size] * fits
        elif running:
            size = running.pop()
            queue.leave(size, failed=step == "fails")
            left += size * (step == "fails")


def test_a_batch_that_mooncake_has_not_taken_begins_only_within_the_lease() -> None:
    """It is given to Mooncake by another call, which begins later."""
    leases, calls = [True, False], []

    def takes_nothing(*_: Any) -> int:
        calls.append("async")
        return 0

    mooncake = SimpleNamespace(
        batch_transfer_async_write=takes_nothing, batch_transfer_sync_write=lambda *_: calls.append("sync") or 0
    )
    reach: Any = SimpleNamespace(await_answer=lambda session: None)
    writer = TcpWriter(mooncake, reach, TransferLimits(), capacity=1)
    with pytest.raises(TransferError, match=LEASE_EXPIRED) as raised:
        writer.begin("peer", ([1], [2], [3]), lambda: leases.pop(0))
    assert not raised.value.may_arrive
    assert calls == ["async"]
    leases = [True, True]
    assert writer.begin("peer", ([1], [2], [3]), lambda: leases.pop(0)) is None  # and its descriptor takes no room
    assert calls == ["async", "async", "sync"]


@pytest.mark.parametrize("name", ["MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"])
def test_timeouts_longer_than_decode_waits_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A decode rank would refuse each request for a grant."""
    longest = TransferLimits.over("tcp", parse_config({"write_timeout_s": 600}).write_timeout_s)
    for seconds, refused in (("1199", None), ("1200", f"{name}.* for 3602 s"), ("inf", "is not a positive number")):
        monkeypatch.setattr(os, "environ", {name: seconds})
        if refused is None:
            assert export_settings(longest, "tcp", "127.0.0.1").settle_s == 3 * 1199 + 2
            continue
        with pytest.raises(SettingError, match=refused):
            export_settings(longest, "tcp", "127.0.0.1")
