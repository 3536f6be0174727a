# SPDX-License-Identifier: Apache-2.0
"""The emulated runtime: asynchronous streams, events, memory, delays, injected faults and counters."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import cann_on_host

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

SLOW_US = 50_000


@pytest.fixture(autouse=True)
def counters() -> None:
    torch.npu.synchronize()
    cann_on_host.reset_counters()


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, for what ends the process or is read from the environment at start."""
    command = [sys.executable, "-c", "import torch, cann_on_host\n" + code]
    result = subprocess.run(command, env=dict(os.environ, **env), capture_output=True, text=True, timeout=60)
    lines = result.stdout.splitlines(keepends=True)
    result.stdout = "".join(line for line in lines if "ASCEND_HOME_PATH" not in line)  # torch_npu misses CANN's
    return result


class TestStreams:
    def test_work_is_queued_not_done(self) -> None:
        x = torch.zeros(8, device="npu")
        torch.npu.synchronize()
        with cann_on_host.delays(SLOW_US):
            started = time.monotonic()
            x.add_(1)
            queued = time.monotonic() - started
            assert not torch.npu.current_stream().query()
            torch.npu.synchronize()
            done = time.monotonic() - started
        assert queued < SLOW_US / 1e6 <= done
        assert x.cpu().eq(1).all()

    def test_streams_run_side_by_side(self) -> None:
        side = torch.npu.Stream()
        x, y = torch.zeros(2, device="npu"), torch.zeros(2, device="npu")
        torch.npu.synchronize()
        with cann_on_host.delays(SLOW_US):
            started = time.monotonic()
            for _ in range(4):
                x.add_(1)
                with torch.npu.stream(side):
                    y.add_(1)
            torch.npu.synchronize()
            assert time.monotonic() - started < 7 * SLOW_US / 1e6

    def test_a_missing_wait_gives_a_wrong_result(self) -> None:
        source, out = torch.zeros(64, device="npu"), torch.zeros(64, device="npu")
        side = torch.npu.Stream()
        torch.npu.synchronize()
        with cann_on_host.delays(SLOW_US, side_streams_us=0):
            source.fill_(7)
            with torch.npu.stream(side):
                out.copy_(source)
            torch.npu.synchronize()
        assert out.cpu().eq(0).all()

    @pytest.mark.parametrize("delays", [(SLOW_US, 0), (0, SLOW_US), (SLOW_US, SLOW_US)])
    def test_an_event_orders_streams(self, delays: tuple[int, int]) -> None:
        source, out = torch.zeros(64, device="npu"), torch.zeros(64, device="npu")
        side = torch.npu.Stream()
        torch.npu.synchronize()
        with cann_on_host.delays(*delays):
            source.fill_(7)
            written = torch.npu.current_stream().record_event()
            with torch.npu.stream(side):
                side.wait_event(written)
                out.copy_(source)
                copied = side.record_event()
            torch.npu.current_stream().wait_event(copied)
            source.fill_(9)
            torch.npu.synchronize()
        assert out.cpu().eq(7).all()

    def test_an_event_is_reached_when_its_stream_is(self) -> None:
        with cann_on_host.delays(SLOW_US):
            event = torch.npu.Event()
            torch.zeros(2, device="npu").add_(1)
            event.record()
            assert not event.query()
            event.synchronize()
            assert event.query()

    def test_a_wait_is_for_the_record_before_it(self) -> None:
        side = torch.npu.Stream()
        event = torch.npu.Event()
        event.record()
        side.wait_event(event)
        with cann_on_host.delays(SLOW_US, 0):
            torch.zeros(2, device="npu").add_(1)
            event.record()
            side.synchronize()
            assert not torch.npu.current_stream().query()
            torch.npu.synchronize()

    def test_elapsed_time(self) -> None:
        start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
        with cann_on_host.delays(SLOW_US):
            start.record()
            torch.zeros(2, device="npu").add_(1)
            end.record()
            end.synchronize()
        assert start.elapsed_time(end) >= SLOW_US / 1e3

    @pytest.mark.parametrize(("name", "first", "side"), [("DELAY_US", True, True), ("DELAY_SIDE_US", False, True)])
    def test_delays_from_the_environment(self, name: str, first: bool, side: bool) -> None:
        code = """
import time
def seconds(stream):
    with torch.npu.stream(stream):
        torch.npu.synchronize(); started = time.monotonic()
        x.add_(1)
        stream.synchronize(); return time.monotonic() - started
side = torch.npu.Stream(); x = torch.zeros(2, device="npu")
print(seconds(torch.npu.default_stream()) >= 0.1, seconds(side) >= 0.1)
"""
        result = run_python(code, **{f"CANN_ON_HOST_{name}": "100000"})
        assert result.stdout.split() == [str(first), str(side)], result.stderr


class TestMemory:
    def test_round_trip(self) -> None:
        host = torch.randn(1000)
        assert torch.equal(host.to("npu").cpu(), host)

    def test_asynchronous_round_trip(self) -> None:
        host, back = torch.randn(1000).pin_memory(), torch.empty(1000, pin_memory=True)
        with cann_on_host.delays(SLOW_US):
            back.copy_(host.to("npu", non_blocking=True), non_blocking=True)
            assert not torch.npu.current_stream().query()
            torch.npu.synchronize()
        assert torch.equal(back, host)

    def test_places(self) -> None:
        npu, pinned = torch.zeros(4, device="npu"), torch.zeros(4, pin_memory=True)
        assert cann_on_host.place(npu.data_ptr(), 16) == "device"
        assert cann_on_host.place(pinned.data_ptr(), 16) == "pinned host"
        assert cann_on_host.place(torch.zeros(4).data_ptr(), 16) == "host"
        assert cann_on_host.place(npu.data_ptr(), 1 << 40) == "out of bounds"

    def test_device_memory_is_not_zeroed(self) -> None:
        code = "print(torch.empty(1000, dtype=torch.uint8, device='npu').cpu().unique().tolist())"
        assert run_python(code, PYTORCH_NO_NPU_MEMORY_CACHING="1").stdout.split() == ["[203]"]

    def test_a_copy_out_of_bounds_is_an_error(self) -> None:
        block = torch.empty(1024, dtype=torch.uint8, device="npu")
        host = torch.zeros(64 << 20, dtype=torch.uint8, pin_memory=True)
        with pytest.raises(RuntimeError, match="out of bounds"):
            acl_copy(block.data_ptr(), host.data_ptr(), host.numel(), kind=1)

    def test_an_operator_out_of_bounds_names_itself(self) -> None:
        code = """
index = torch.tensor([5]).npu()
torch.zeros(2, 4, device="npu").index_select(0, index)
torch.npu.synchronize()
"""
        result = run_python(code)
        assert result.returncode != 0
        assert "aclnnIndexSelect" in result.stderr
        assert "out of range" in result.stderr

    @pytest.mark.parametrize(
        ("kind", "message"), [(1, "from device to device"), (2, "from device to device"), (0, "from device to device")]
    )
    def test_a_copy_of_the_wrong_kind_is_an_error(self, kind: int, message: str) -> None:
        x, y = torch.zeros(64, device="npu"), torch.zeros(64, device="npu")
        with pytest.raises(RuntimeError, match=message):
            acl_copy(x.data_ptr(), y.data_ptr(), 256, kind)

    def test_asynchronous_copies_need_pinned_memory(self) -> None:
        with pytest.raises(RuntimeError, match="not pinned"):
            torch.zeros(64).to("npu", non_blocking=True)

    def test_other_memory_is_copied_at_once_on_request(self) -> None:
        code = """
host = torch.arange(64)
device = host.to("npu", non_blocking=True)
host.zero_()
print(device.cpu().sum().item())
"""
        result = run_python(code, CANN_ON_HOST_PINNED_ONLY="0", CANN_ON_HOST_DELAY_US="1000")
        assert result.stdout.split() == ["2016"], result.stderr

    def test_unaligned_copies_are_counted(self) -> None:
        x, y = torch.zeros(64, device="npu"), torch.zeros(64, device="npu")
        acl_copy(x.data_ptr(), y.data_ptr(), 128, kind=3)
        assert cann_on_host.counters()["unaligned_copies"] == 0
        acl_copy(x.data_ptr() + 4, y.data_ptr(), 128, kind=3)
        assert cann_on_host.counters()["unaligned_copies"] == 1

    def test_unaligned_copies_are_errors_on_request(self) -> None:
        code = """
import test_emulation
x = torch.zeros(64, device="npu")
try:
    test_emulation.acl_copy(x.data_ptr() + 4, x.data_ptr() + 128, 64, kind=3)
except RuntimeError as error:
    print(error)
"""
        result = run_python(code, CANN_ON_HOST_ALIGN="1", PYTHONPATH=str(Path(__file__).parent))
        assert "not multiples of 64" in result.stdout, result.stderr


def acl_copy(to: int, source: int, nbytes: int, kind: int) -> None:
    """aclrtMemcpyAsync on the current stream, as a compiled extension calls it."""
    import ctypes

    runtime = ctypes.CDLL("libascendcl.so")
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    size = ctypes.c_size_t(nbytes)
    if runtime.aclrtMemcpyAsync(ctypes.c_void_p(to), size, ctypes.c_void_p(source), size, kind, stream) != 0:
        raise RuntimeError(runtime.aclGetRecentErrMsg().decode())
    torch.npu.synchronize()


def acl_copy_batch(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[int, int]:
    """aclrtMemcpyBatch of (destination, source): its result, and the copy that failed."""
    import ctypes

    runtime = ctypes.CDLL("libascendcl.so")
    n = len(copies)
    to, source = ((ctypes.c_void_p * n)(*(pair[i].data_ptr() for pair in copies)) for i in range(2))
    sizes = (ctypes.c_size_t * n)(*(pair[0].nbytes for pair in copies))
    failed = ctypes.c_size_t(n)
    return runtime.aclrtMemcpyBatch(to, sizes, source, sizes, n, None, None, 0, ctypes.byref(failed)), failed.value


def test_a_batch_of_copies_has_one_direction() -> None:
    host, device = [torch.zeros(64).pin_memory() for _ in range(2)], [torch.ones(64, device="npu") for _ in range(2)]
    torch.npu.synchronize()
    assert acl_copy_batch(list(zip(host, device, strict=True))) == (0, 2)
    assert all(part.eq(1).all() for part in host)
    assert acl_copy_batch([(host[0], device[0]), (device[1], host[1])])[1] == 1
    assert acl_copy_batch([(device[0], device[1])])[1] == 0
    assert acl_copy_batch([(host[0], host[1])])[1] == 0


class TestMissingOperators:
    def test_an_operator_that_is_not_emulated_raises_with_its_name(self) -> None:
        x = torch.zeros(4, 8, device="npu")
        with pytest.raises(RuntimeError, match="GeGlu"):
            torch.ops.npu.npu_geglu(x)

    def test_an_older_operator_ends_the_process_with_its_name(self) -> None:
        result = run_python("x = torch.zeros(4, 8, device='npu'); torch.ops.npu.npu_slice(x, [0, 0], [2, 2])")
        assert result.returncode != 0
        assert "Slice" in result.stderr


class TestFaults:
    """Each in a process of its own: as on hardware, a failed stream stays failed."""

    def test_a_failed_task_fails_its_stream(self) -> None:
        code = """
side = torch.npu.Stream(); x = torch.zeros(4, device="npu"); torch.npu.synchronize()
cann_on_host.inject("side-task:fail@2")
with torch.npu.stream(side):
    x.add_(1); x.add_(1); x.add_(1)
    event = side.record_event()
for what, wait in (("stream", side.synchronize), ("event", event.synchronize), ("query", event.query)):
    try:
        wait(); print(what, "ok")
    except RuntimeError as error:
        print(what, "507015" in str(error))
print(x.data_ptr() and torch.npu.default_stream().query())
"""
        result = run_python(code)
        assert result.stdout.split("\n")[:4] == ["stream True", "event True", "query True", "True"], result.stderr
        assert "add_" in result.stderr  # which operator failed
        assert "injected fault" in result.stderr

    def test_a_stream_that_waits_for_a_failed_one_fails(self) -> None:
        code = """
side = torch.npu.Stream(); x = torch.zeros(4, device="npu"); torch.npu.synchronize()
with torch.npu.stream(side):
    x.add_(1)
    event = side.record_event()
torch.npu.default_stream().wait_event(event)
try:
    torch.npu.default_stream().synchronize()
except RuntimeError as error:
    print("507015" in str(error))
"""
        result = run_python(code, CANN_ON_HOST_FAULTS="side-task:fail")
        assert result.stdout.split() == ["True"], result.stderr

    def test_a_task_that_hangs(self) -> None:
        with cann_on_host.injected("task:hang"):
            x = torch.zeros(4, device="npu")
            event = torch.npu.current_stream().record_event()
            time.sleep(0.2)
            assert not event.query()
        event.synchronize()
        assert x.cpu().eq(0).all()

    def test_what_hangs_fails_in_the_end(self) -> None:
        code = """
torch.zeros(4, device="npu")
try:
    torch.npu.synchronize()
except RuntimeError as error:
    print("507014" in str(error))
"""
        result = run_python(code, CANN_ON_HOST_FAULTS="task:hang", CANN_ON_HOST_OP_TIMEOUT_S="1")
        assert result.stdout.split() == ["True"], result.stderr

    @pytest.mark.parametrize("text", ["task", "task:explode", "nowhere:fail", "task:fail@0", "task:fail@x"])
    def test_a_fault_that_makes_no_sense_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="not a list of faults"):
            cann_on_host.inject(text)


class TestCounters:
    def test_launches_copies_and_waits(self) -> None:
        host = torch.arange(4.0).pin_memory()
        x = host.to("npu")
        index = torch.tensor([1, 0]).npu()
        torch.npu.synchronize()
        cann_on_host.reset_counters()
        x.index_select(0, index)
        torch.npu.current_stream().record_event()
        torch.npu.synchronize()
        counted = cann_on_host.counters()
        assert cann_on_host.launches() == {"aclnnIndexSelect": 1}
        assert counted["launches"] == 1
        assert counted["kernel_bytes"] == 8
        assert counted["event_records"] == 1
        assert counted["copies_to_device"] == counted["copies_to_host"] == 0
        host.to("npu")
        assert cann_on_host.counters()["copy_bytes_to_device"] == 16

    def test_fallbacks_count_as_launches(self) -> None:
        x = torch.zeros(4, 4, device="npu")
        cann_on_host.reset_counters()
        torch.matmul(x, x)
        assert cann_on_host.counters()["launches"] == 1
