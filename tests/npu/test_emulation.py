# SPDX-License-Identifier: Apache-2.0
"""The emulated runtime: asynchronous streams, events, memory, delays, injected faults and counters."""

import os
import subprocess
import sys
import time

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


class TestMemory:
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

    def test_asynchronous_copies_need_pinned_memory(self) -> None:
        with pytest.raises(RuntimeError, match="not pinned"):
            torch.zeros(64).to("npu", non_blocking=True)

    def test_unaligned_copies_are_counted(self) -> None:
        x, y = torch.zeros(64, device="npu"), torch.zeros(64, device="npu")
        acl_copy(x.data_ptr(), y.data_ptr(), 128, kind=3)
        assert cann_on_host.counters()["unaligned_copies"] == 0
        acl_copy(x.data_ptr() + 4, y.data_ptr(), 128, kind=3)
        assert cann_on_host.counters()["unaligned_copies"] == 1


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


class TestMissingOperators:
    def test_an_operator_that_is_not_emulated_raises_with_its_name(self) -> None:
        x = torch.zeros(4, 8, device="npu")
        with pytest.raises(RuntimeError, match="GeGlu"):
            torch.ops.npu.npu_geglu(x)


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
