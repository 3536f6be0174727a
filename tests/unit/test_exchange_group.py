# SPDX-License-Identifier: Apache-2.0
"""A regroup group that has failed once runs no collective any more, and says why."""

import gc
import logging
import weakref
from typing import Any

import pytest

from vllm_ascend_pd.device.base import DeviceError
from vllm_ascend_pd.prefill.regroup import ExchangeGroup

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


def test_a_group_that_works(group: ExchangeGroup, connections: Connections) -> None:
    seen: list[Any] = []
    group.run(seen.append)
    group.run(seen.append)
    assert seen == [connections, connections]
    assert group.failure is None


def test_a_collective_that_fails_breaks_the_group_for_good(group: ExchangeGroup) -> None:
    with pytest.raises(DeviceError, match=r"an all-to-all failed") as failed:
        group.run(lost)
    assert isinstance(failed.value.__cause__, RuntimeError)
    for _ in range(2):
        with pytest.raises(DeviceError) as error:
            group.run(must_not_run)
        assert str(error.value).startswith(NEEDS_RESTART)
        assert "an all-to-all failed" in str(error.value)


def test_a_collective_that_is_missed_breaks_the_group(group: ExchangeGroup) -> None:
    group.fail("an all-to-all was missed: no more work")
    assert group.failure == "an all-to-all was missed: no more work"
    with pytest.raises(DeviceError, match=r"missed: no more work"):
        group.run(must_not_run)


def test_an_interrupted_collective_breaks_the_group_and_stays_an_interrupt(group: ExchangeGroup) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.run(interrupted)
    with pytest.raises(DeviceError):
        group.run(must_not_run)


def test_clients_learn_no_addresses_and_the_log_has_them(
    group: ExchangeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DeviceError) as error:
        group.run(lost)
    assert "10.0.0.1" not in str(error.value)
    assert "10.0.0.1" in caplog.text


def test_the_log_says_once_that_the_engine_must_be_restarted_and_why(
    group: ExchangeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group.fail("the first reason")
    group.fail("the second reason")
    with pytest.raises(DeviceError, match="the first reason"):
        group.run(must_not_run)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "Restart this prefill engine" in record.getMessage()
    assert "the first reason" in record.getMessage()


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


def test_closing_is_no_failure_to_log(group: ExchangeGroup, caplog: pytest.LogCaptureFixture) -> None:
    group.close()
    group.fail("late")
    with pytest.raises(DeviceError, match="shuts down"):
        group.run(must_not_run)
    assert caplog.records == []
