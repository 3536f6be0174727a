# SPDX-License-Identifier: Apache-2.0
"""The CPU device: its side stream and its buffers. Ranks' collectives are in test_push.py and test_broken_group.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from vllm_ascend_pd.device.cpu import PAGE_BYTES, CpuDevice
from vllm_ascend_pd.device.event import DeviceError
from vllm_ascend_pd.device.make import make_device


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(queue_depth=2, timeout_s=0.3)
    yield device
    device.close()


def test_work_runs_in_order_on_one_other_thread() -> None:
    device = CpuDevice()
    seen: list[tuple[int, int]] = []
    for i in range(200):
        last = device.submit(lambda i=i: seen.append((i, threading.get_ident())), device.record_event())
    last.wait(5)
    assert [i for i, _ in seen] == list(range(200))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1
    device.close()


def test_recorded_event_is_complete(device: CpuDevice) -> None:
    device.record_event().wait(0)


def test_error_is_delivered_by_its_own_event_only(device: CpuDevice) -> None:
    def fail() -> None:
        raise ZeroDivisionError("of a block")

    failed = device.submit(fail, device.record_event())
    after = device.submit(lambda: None, failed)
    for _ in range(2):
        with pytest.raises(DeviceError, match="of a block") as raised:
            failed.wait(5)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
    after.wait(5)


def test_wait_times_out_and_can_be_repeated(device: CpuDevice) -> None:
    gate = threading.Event()
    event = device.submit(lambda: gate.wait(5) and None, device.record_event())
    with pytest.raises(TimeoutError):
        event.wait(0.05)
    gate.set()
    event.wait(5)


def test_queue_is_bounded(device: CpuDevice) -> None:
    gate, begun = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        gate.wait(5)

    running = device.submit(block, device.record_event())
    begun.wait(5)
    waiting = [device.submit(lambda: None, running) for _ in range(2)]
    started = time.monotonic()
    with pytest.raises(DeviceError, match="2 pieces of work wait"):
        device.submit(lambda: None, running)
    assert 0.25 < time.monotonic() - started < 2
    gate.set()
    for event in waiting:
        event.wait(5)
    device.submit(lambda: None, running).wait(5)


def test_close_fails_waiting_work_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    device = CpuDevice(timeout_s=2)
    begun = threading.Event()

    def slow() -> None:
        begun.set()
        time.sleep(0.2)

    running = device.submit(slow, device.record_event())
    waiting = device.submit(lambda: None, running)
    begun.wait(5)
    device.close()
    device.close()
    running.wait(0)
    with pytest.raises(DeviceError, match="closed before"):
        waiting.wait(0)
    with pytest.raises(DeviceError, match="closed"):
        device.submit(lambda: None, running)
    assert set(threading.enumerate()) <= before


def test_close_is_bounded_when_work_hangs() -> None:
    device = CpuDevice(timeout_s=0.1)
    gate, begun = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        gate.wait(5)

    device.submit(hang, device.record_event())
    begun.wait(5)
    with pytest.raises(DeviceError, match="did not end"):
        device.close()
    gate.set()
    device.close()


def test_the_device_is_what_vllm_runs_on() -> None:
    environment = pytest.importorskip("vllm_ascend_pd.connector.setup")
    if environment.device_type() != "cpu":
        pytest.skip("vLLM does not run on the CPU here")
    device = make_device("cpu")
    assert isinstance(device, CpuDevice)
    device.close()


def test_other_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="vLLM runs on 'xpu'"):
        make_device("xpu")


def test_buffers_are_page_aligned(device: CpuDevice) -> None:
    for nbytes in (1, 5000, 1 << 20):
        buffer = device.allocate(nbytes)
        assert buffer.numel() >= nbytes
        assert buffer.data_ptr() % PAGE_BYTES == 0
