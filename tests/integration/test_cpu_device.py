# SPDX-License-Identifier: Apache-2.0
"""The CPU device: its side stream, and gloo collectives between real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ascend_pd.device import DeviceError, make_device
from vllm_ascend_pd.device.cpu import PAGE_BYTES, CpuDevice


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


RANK = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from vllm_ascend_pd.device import DeviceError
from vllm_ascend_pd.device.cpu import CpuDevice

rank, world, store, scenario = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
device = CpuDevice()
pairs = [(i, i + 1) for i in range(0, world, 2)]
everyone = tuple(range(world))
groups = device.new_groups([*pairs, everyone], timeout_s=3)

def exchange(ranks, part):
    me = ranks.index(rank)
    inp = torch.cat([torch.full((part,), 16 * rank + to, dtype=torch.uint8) for to in ranks])
    out = torch.empty_like(inp)
    device.all_to_all(out, inp, groups[ranks])
    return out, torch.cat([torch.full((part,), 16 * of + rank, dtype=torch.uint8) for of in ranks])

if scenario == "exchange":
    assert set(groups) == {pair for pair in pairs if rank in pair} | {everyone}
    results = []
    for step in range(30):
        for ranks in groups:
            event = device.submit(
                lambda ranks=ranks, step=step: results.append(exchange(ranks, 1000 * step + 1)),
                device.record_event(),
            )
        total = torch.ones(1000)
        dist.all_reduce(total)  # the default group, on the main thread, while the side thread exchanges
        assert total.eq(world).all()
    event.wait(30)
    assert len(results) == 30 * len(groups) and all(torch.equal(out, want) for out, want in results)
    print("OK")
else:
    if rank == 0:
        _get_default_store().set("connected", "")
    if rank == 1:
        # Not by a collective: rank 0 would still be in it, or in connecting, when this one is gone.
        _get_default_store().wait(["connected"], timedelta(seconds=30))
        if scenario == "dies":
            os._exit(0)
        time.sleep(8)  # hangs
    started = time.monotonic()
    event = device.submit(lambda: exchange(everyone, 1000), device.record_event())
    try:
        event.wait(30)
        print("NO ERROR")
    except DeviceError as error:
        print(f"FAILED {time.monotonic() - started:.2f} {type(error.__cause__).__name__}: {error}")
    sys.stdout.flush()
    os._exit(0)
device.close()
dist.destroy_process_group()
"""


def run_ranks(world: int, scenario: str, store: Path) -> list[str]:
    """Returns the standard output of every rank."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world), str(store), scenario],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        return [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_all_to_all_beside_other_collectives(world: int, tmp_path: Path) -> None:
    assert run_ranks(world, "exchange", tmp_path / "store") == ["OK\n"] * world


@pytest.mark.parametrize(("scenario", "bound_s"), [("dies", 7.0), ("hangs", 7.0)])
def test_rank_that_does_not_take_part_is_bounded(scenario: str, bound_s: float, tmp_path: Path) -> None:
    word, seconds, *reason = run_ranks(2, scenario, tmp_path / "store")[0].split()
    assert word == "FAILED", reason
    assert float(seconds) < bound_s
