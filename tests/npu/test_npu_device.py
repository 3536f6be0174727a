# SPDX-License-Identifier: Apache-2.0
"""`device/npu.py` on torch_npu: alignment, order of the side stream, timeouts, errors, collectives."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import cann_on_host
from harness.rank_hosts import run_ranks
from vllm_ascend_pd.device.event import DeviceError
from vllm_ascend_pd.device.npu import REGISTRATION_BYTES, NpuDevice

pytestmark = pytest.mark.npu

emulated = pytest.mark.emulated
SLOW_US = 50_000


@pytest.fixture
def device() -> Iterator[NpuDevice]:
    torch.npu.set_device(0)
    device = NpuDevice()
    yield device
    device.close()
    torch.npu.synchronize()


@pytest.mark.parametrize("nbytes", [1, 4096, REGISTRATION_BYTES, REGISTRATION_BYTES + 1])
def test_buffers_can_be_registered(device: NpuDevice, nbytes: int) -> None:
    buffers = [device.allocate(nbytes) for _ in range(3)]
    for buffer in buffers:
        assert buffer.dtype == torch.uint8
        assert buffer.is_contiguous()
        assert buffer.numel() >= nbytes
        assert buffer.data_ptr() % REGISTRATION_BYTES == 0
        assert buffer.numel() % REGISTRATION_BYTES == 0


@emulated
def test_what_was_submitted_holds_its_tensors_until_it_has_run(device: NpuDevice) -> None:
    """It does so even if its end event is dropped. Otherwise the allocator would reuse their memory at once."""
    staging = torch.zeros(4096, device="npu")
    torch.npu.synchronize()
    with cann_on_host.delays(0, SLOW_US):
        offsets = device.upload(torch.full((4096,), 7.0))
        address = offsets.data_ptr()
        device.submit(lambda tensor=offsets: staging.copy_(tensor), after=device.record_event())
        del offsets
        others = [torch.full((4096,), 9.0, device="npu") for _ in range(4)]
        assert address not in [other.data_ptr() for other in others]
        done = device.submit(lambda: None, after=device.record_event())
        done.wait(5)
    assert staging.cpu().eq(7).all().item()
    device.submit(lambda: None, after=device.record_event())
    more = [torch.full((4096,), 9.0, device="npu") for _ in range(4)]
    assert address in [tensor.data_ptr() for tensor in more]


@pytest.mark.parametrize("refuses", ["wait_event", "record_event"])
def test_a_side_stream_that_takes_nothing_more_is_an_error_of_the_device(
    device: NpuDevice, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("an error of an earlier task")

    after = device.record_event()
    monkeypatch.setattr(device, "_side", type("Side", (torch.npu.Stream,), {refuses: fails})(device=0))
    with pytest.raises(DeviceError, match="restart this engine"):
        device.submit(lambda: None, after=after)
    assert device.failure is not None
    assert torch.npu.current_stream() == torch.npu.default_stream()


@emulated
@pytest.mark.parametrize("delays", [(SLOW_US, 0), (0, SLOW_US), (SLOW_US, SLOW_US)])
def test_submitted_work_runs_after_its_event(device: NpuDevice, delays: tuple[int, int]) -> None:
    cache, staging = torch.zeros(64, device="npu"), torch.zeros(64, device="npu")
    torch.npu.synchronize()
    with cann_on_host.delays(*delays):
        cache.fill_(7)
        done = device.submit(lambda: staging.copy_(cache), after=device.record_event())
        done.wait(5)
        assert staging.cpu().eq(7).all()


@emulated
def test_events_and_the_side_stream_follow_whichever_stream_is_current(device: NpuDevice) -> None:
    cache, staging = torch.zeros(64, device="npu"), torch.zeros(64, device="npu")
    default, other = torch.npu.current_stream(), torch.npu.Stream()
    torch.npu.synchronize()
    with cann_on_host.delays(SLOW_US):
        for value, stream in enumerate((default, other, default), start=1):
            with torch.npu.stream(stream):
                for filled in (0, 0, value):
                    cache.fill_(filled)
                done = device.submit(lambda: staging.copy_(cache), after=device.record_event())
                assert torch.npu.current_stream() == stream
            done.wait(5)
            assert staging.cpu().eq(value).all()


@emulated
def test_submit_does_not_wait(device: NpuDevice) -> None:
    x = torch.zeros(64, device="npu")
    with cann_on_host.delays(SLOW_US):
        started = time.monotonic()
        for _ in range(4):
            event = device.submit(lambda: x.add_(1), after=device.record_event())
        assert time.monotonic() - started < SLOW_US / 1e6
        event.wait(5)
    assert x.cpu().eq(4).all()


@emulated
def test_who_waits_for_long_looks_rarely(device: NpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting thread polls at most a thousand times a second, after some polls at first."""
    x = torch.zeros(64, device="npu")
    torch.npu.synchronize()
    with cann_on_host.delays(4 * SLOW_US):
        x.add_(1)
        event = device.record_event()
        looks: list[float] = []
        reached = event._reached
        monkeypatch.setattr(event, "_reached", lambda: looks.append(time.monotonic()) or reached())
        event.wait(5)
    assert 2 <= len(looks) <= 40 + 1000 * (looks[-1] - looks[0])


@emulated
def test_the_compute_stream_does_not_wait_for_the_side_stream(device: NpuDevice) -> None:
    x, y = torch.zeros(64, device="npu"), torch.zeros(64, device="npu")
    torch.npu.synchronize()
    with cann_on_host.delays(0, 4 * SLOW_US):
        event = device.submit(lambda: x.add_(1), after=device.record_event())
        y.add_(1)
        started = time.monotonic()
        device.record_event().wait(5)
        assert time.monotonic() - started < SLOW_US / 1e6
        event.wait(5)


@emulated
def test_waiting_has_a_timeout(device: NpuDevice) -> None:
    x = torch.zeros(64, device="npu")
    torch.npu.synchronize()
    with cann_on_host.injected("side-task:hang"):
        event = device.submit(lambda: x.add_(1), after=device.record_event())
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            event.wait(0.2)
        assert 0.2 <= time.monotonic() - started < 1
    event.wait(5)
    assert x.cpu().eq(1).all()


def test_any_thread_may_wait(device: NpuDevice) -> None:
    from concurrent.futures import ThreadPoolExecutor

    x = torch.zeros(64, device="npu")
    event = device.submit(lambda: x.add_(1), after=device.record_event())
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(event.wait, 5) for _ in range(8)]:
            future.result()


def test_what_work_raises_is_delivered_by_its_event_alone(device: NpuDevice) -> None:
    x = torch.zeros(64, device="npu")

    def fail() -> None:
        raise ValueError("no")

    failed = device.submit(fail, after=device.record_event())
    later = device.submit(lambda: x.add_(1), after=failed)
    with pytest.raises(DeviceError) as raised:
        failed.wait(5)
    assert isinstance(raised.value.__cause__, ValueError)
    later.wait(5)
    assert x.cpu().eq(1).all()


def test_a_closed_device_takes_no_work(device: NpuDevice) -> None:
    after = device.record_event()
    device.close()
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.submit(lambda: None, after=after)


@emulated
def test_a_task_that_fails_on_the_npu_is_delivered() -> None:
    """In a process of its own: a failed stream stays failed."""
    code = """
import torch, cann_on_host
from vllm_ascend_pd.device.npu import NpuDevice
from vllm_ascend_pd.device.event import DeviceError
torch.npu.set_device(0)
device = NpuDevice(); x = torch.zeros(4, device="npu"); torch.npu.synchronize()
cann_on_host.inject("side-task:fail")
event = device.submit(lambda: x.add_(1), after=device.record_event())
try:
    event.wait(5)
except DeviceError as error:
    print("delivered", "507015" in str(error))
device.record_event().wait(5)
print("compute goes on")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "delivered True\ncompute goes on\n" in result.stdout, result.stderr


def test_an_engine_with_mooncakes_ascend_protocol() -> None:
    """In a process of its own: the settings stay in the environment."""
    code = """
import os, torch
from vllm_ascend_pd.device.npu import NpuDevice
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.batches import TransferLimits
torch.npu.set_device(0)
device = NpuDevice()
engine = TransferEngine("127.0.0.1", device.transfer_protocol, TransferLimits(timeout_s=20))
buffer = device.allocate(100)
engine.register([(buffer.data_ptr(), buffer.numel())])
engine.close()
names = ("ASCEND_CONNECT_TIMEOUT", "ASCEND_TRANSFER_TIMEOUT", "MC_TRANSFER_TIMEOUT")
print("RESULT", *(os.environ[name] for name in names), engine.limits.settle_s)
"""
    preset = {"ASCEND_TRANSFER_TIMEOUT": "60000"}
    env = {name: value for name, value in os.environ.items() if "TIMEOUT" not in name} | preset
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert "RESULT 20000 60000 3600 " in result.stdout, result.stderr
    settle_s = float(result.stdout.partition("RESULT")[2].split()[3])
    assert settle_s >= 2 * (20 + 60 + 1), "two attempts"


def exchange(rank: int, size: int, emulated_delays: bool) -> list[int]:
    """`all_to_all` in submitted work, in every group that this rank belongs to."""
    device = NpuDevice()
    lists = [tuple(range(size)), *(tuple(range(i, i + 2)) for i in range(0, size, 2))]
    groups = device.new_groups(list(dict.fromkeys(lists)), timeout_s=20)
    assert set(groups) == {ranks for ranks in lists if rank in ranks}
    inp, out = device.allocate(size * 1024), device.allocate(size * 1024)
    got = []
    for ranks, group in groups.items():
        device.submit(lambda g=group: device.all_to_all(out, inp, g), after=device.record_event()).wait(20)  # connects
        delays = cann_on_host.delays(20_000, 0) if emulated_delays else torch.no_grad()
        with delays:
            inp.view(len(ranks), -1).copy_((torch.arange(len(ranks)) + 10 * rank).view(-1, 1).to(torch.uint8).npu())
            event = device.submit(lambda g=group: device.all_to_all(out, inp, g), after=device.record_event())
            event.wait(20)
        got += out.view(len(ranks), -1)[:, -1].cpu().tolist()
    dist.barrier()
    return got


@pytest.mark.parametrize("size", [2, 4])
def test_all_to_all(size: int) -> None:
    for rank, got in enumerate(run_ranks(exchange, size, size, cann_on_host.is_active())):
        expected = [10 * i + rank for i in range(size)]
        if size > 2:
            first = rank // 2 * 2
            expected += [10 * i + rank - first for i in (first, first + 1)]
        assert got == expected
