# SPDX-License-Identifier: Apache-2.0
"""A regroup group that has failed once runs no collective any more, and says why. What else would break one."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.device.event import DeviceError
from vllm_ascend_pd.prefill.regroup import ExchangeGroup, warn_of_slot_waits
from vllm_ascend_pd.transport.batches import TransferLimits

NEEDS_RESTART = "tensor-parallel ranks (0, 1) exchange no KV heads until this prefill engine is restarted"


class Connections:
    """Stands for a process group, which closes its connections when nobody refers to it any more."""


def lost(_: Any) -> None:
    raise RuntimeError("closed by peer [10.0.0.1]:123")


def must_not_run(_: Any) -> None:
    pytest.fail("a collective runs in a broken group")


@pytest.fixture
def connections() -> Connections:
    return Connections()


@pytest.fixture
def group(connections: Connections) -> ExchangeGroup:
    return ExchangeGroup((0, 1), connections)  # type: ignore[arg-type]


def test_a_collective_that_fails_breaks_the_group_for_good(
    group: ExchangeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients learn no addresses, and the log has them."""
    with pytest.raises(DeviceError, match=r"an all-to-all failed") as failed:
        group.run(lost)
    assert isinstance(failed.value.__cause__, RuntimeError)
    assert "10.0.0.1" not in str(failed.value)
    assert "10.0.0.1" in caplog.text
    for _ in range(2):
        with pytest.raises(DeviceError) as error:
            group.run(must_not_run)
        assert str(error.value).startswith(NEEDS_RESTART)
        assert "an all-to-all failed" in str(error.value)


def test_an_interrupted_collective_breaks_the_group_and_stays_an_interrupt(group: ExchangeGroup) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.run(interrupted)
    with pytest.raises(DeviceError):
        group.run(must_not_run)


@pytest.mark.parametrize("how", ["fails", "closes"])
def test_connections_close_with_the_group(how: str) -> None:
    connections = Connections()
    closed = weakref.ref(connections)
    group = ExchangeGroup((0, 1), connections)  # type: ignore[arg-type]
    del connections
    if how == "fails":
        with pytest.raises(DeviceError):
            group.run(lost)
    else:
        group.close()
    gc.collect()
    assert closed() is None


def test_connections_stay_until_a_running_collective_has_ended() -> None:
    """Another thread may break the group meanwhile."""
    connections = Connections()
    closed = weakref.ref(connections)
    group = ExchangeGroup((0, 1), connections)  # type: ignore[arg-type]
    del connections

    def collective(_: Any) -> None:
        group.fail("missed a later one")
        assert closed() is not None

    group.run(collective)
    assert closed() is None
    with pytest.raises(DeviceError):
        group.run(must_not_run)


@pytest.mark.parametrize(("write_timeout_s", "warned"), [(10.0, False), (14.0, True)])
def test_waits_for_slots_that_outlast_a_collective_are_warned_of(
    write_timeout_s: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    limits = TransferLimits.over("tcp", write_timeout_s)
    rank: Any = SimpleNamespace(
        config=ConnectorConfig(write_timeout_s=write_timeout_s), engine=SimpleNamespace(limits=limits)
    )
    warn_of_slot_waits(rank)
    assert ("collective_timeout_s is 60" in caplog.text) is warned
