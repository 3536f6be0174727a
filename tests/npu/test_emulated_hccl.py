# SPDX-License-Identifier: Apache-2.0
"""HCCL groups between real processes on the emulated CANN libraries."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cann_on_host
from harness.pool import long
from harness.rank_processes import RankFailed, run_ranks, try_ranks

pytestmark = [pytest.mark.npu, pytest.mark.emulated]


def collectives(rank: int, size: int) -> None:
    own = torch.arange(2.0 * size).npu() + 100 * rank

    # all_to_all_single, equal parts: part j goes to rank j
    out = torch.empty_like(own)
    dist.all_to_all_single(out, own)
    expected = torch.cat([torch.arange(2.0) + 2 * rank + 100 * i for i in range(size)])
    assert torch.equal(out.cpu(), expected)

    # uneven: rank r sends r + j + 1 rows to rank j
    splits_in = [rank + j + 1 for j in range(size)]
    rows = (torch.arange(sum(splits_in) * 3, dtype=torch.int32).view(-1, 3) + 1000 * rank).npu()
    uneven = torch.empty(sum(splits_in), 3, dtype=torch.int32, device="npu")  # symmetric: as many as it sends
    work = dist.all_to_all_single(uneven, rows, splits_in, splits_in, async_op=True)
    work.wait()
    begin = 0
    for i in range(size):
        first = sum(i + j + 1 for j in range(rank))
        count = i + rank + 1
        sent = torch.arange(first * 3, (first + count) * 3, dtype=torch.int32).view(-1, 3) + 1000 * i
        assert torch.equal(uneven[begin : begin + count].cpu(), sent)
        begin += count

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8):
        x = (torch.arange(5) + rank).to(dtype).npu()
        dist.all_reduce(x)
        assert torch.equal(x.cpu(), sum(torch.arange(5) + i for i in range(size)).to(dtype))
        x = (torch.arange(5) + rank).to(dtype).npu()
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        assert torch.equal(x.cpu(), (torch.arange(5) + size - 1).to(dtype))

    gathered = [torch.empty(2, device="npu") for _ in range(size)]
    dist.all_gather(gathered, torch.full((2,), float(rank)).npu())
    assert [part.cpu().tolist() for part in gathered] == [[i, i] for i in range(size)]
    whole = torch.empty(2 * size, device="npu")
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)).npu())
    assert torch.equal(whole.cpu(), torch.arange(float(size)).repeat_interleave(2))

    for root in range(size):
        x = torch.full((3,), float(rank)).npu()
        dist.broadcast(x, root)
        assert x.cpu().tolist() == [root] * 3

    scattered = torch.empty(2, device="npu")
    dist.reduce_scatter_tensor(scattered, own.clone())
    assert torch.equal(scattered.cpu(), sum(torch.arange(2.0) + 2 * rank + 100 * i for i in range(size)))

    to, source = (rank + 1) % size, (rank - 1) % size
    received = torch.empty_like(own)
    if rank % 2 == 0:
        dist.send(own, to)
        dist.recv(received, source)
    else:
        dist.recv(received, source)
        dist.send(own, to)
    assert torch.equal(received.cpu(), torch.arange(2.0 * size) + 100 * source)
    received.zero_()
    operations = [dist.P2POp(dist.isend, own, to), dist.P2POp(dist.irecv, received, source)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert torch.equal(received.cpu(), torch.arange(2.0 * size) + 100 * source)

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": i} for i in range(size)]
    dist.barrier()

    pairs = [dist.new_group([i, i + 1]) for i in range(0, size, 2)]
    x = torch.full((2,), float(rank)).npu()
    dist.all_reduce(x, group=pairs[rank // 2])
    assert x.cpu().tolist() == [2 * (rank // 2 * 2) + 1] * 2
    torch.npu.synchronize()


@pytest.mark.parametrize(("size", "delay_us"), [(2, 0), (2, 1000), long(4, 0)])
def test_collectives(size: int, delay_us: int) -> None:
    run_ranks(collectives, size, size, env={"CANN_ON_HOST_DELAY_US": str(delay_us)})


def side_stream_exchange(rank: int) -> bool:
    """A collective is ordered by the stream it is called on, behind an event of another one."""
    side = torch.npu.Stream()
    x, out = torch.zeros(4, device="npu"), torch.empty(4, device="npu")
    dist.all_to_all_single(out, x)  # connects
    torch.npu.synchronize()
    with cann_on_host.delays(50_000, 0):
        x.fill_(rank + 1)
        written = torch.npu.current_stream().record_event()
        with torch.npu.stream(side):
            side.wait_event(written)
            dist.all_to_all_single(out, x)
        side.synchronize()
    return out.cpu().tolist() == [1, 1, 2, 2]


def test_a_collective_waits_for_events() -> None:
    assert run_ranks(side_stream_exchange, 2) == [True, True]


def counted(rank: int) -> dict[str, int]:
    x = torch.zeros(8, device="npu")
    cann_on_host.reset_counters()
    dist.all_to_all_single(torch.empty_like(x), x)
    torch.npu.synchronize()
    return cann_on_host.counters()


def test_calls_are_counted() -> None:
    for counters in run_ranks(counted, 2):
        assert (counters["hccl_calls"], counters["hccl_bytes"]) == (1, 32)


def failing_call(rank: int) -> str:
    x = torch.zeros(4, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 0:
        cann_on_host.inject("hccl:fail")
    started = time.monotonic()
    try:
        dist.all_reduce(x)
        torch.npu.current_stream().synchronize()
    except RuntimeError as error:
        return f"{time.monotonic() - started:.0f} s: {error}"
    return "nothing happened"


def test_a_call_that_fails() -> None:
    """The rank whose call fails raises at once, the other one after its timeout."""
    first, second = try_ranks(failing_call, 2, env={"CANN_ON_HOST_HCCL_TIMEOUT_S": "2"})
    assert str(first).startswith("0 s"), first
    assert "507035" in str(second) or "timed out" in str(second), second


def why_the_stream_fails() -> str:
    try:
        torch.npu.current_stream().synchronize()
    except RuntimeError as error:
        return str(error)
    return "nothing happened"


def hanging_call(rank: int) -> str:
    x = torch.zeros(4, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 0:
        cann_on_host.inject("hccl:hang")
    dist.all_reduce(x)
    return why_the_stream_fails()


def test_a_call_that_hangs() -> None:
    env = {"CANN_ON_HOST_HCCL_TIMEOUT_S": "2", "CANN_ON_HOST_OP_TIMEOUT_S": "2"}
    first, second = try_ranks(hanging_call, 2, env=env)
    assert "507014" in str(first), first
    assert "507035" in str(second), second


def dying_peer(rank: int) -> str:
    x = torch.zeros(4, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    return why_the_stream_fails()


def test_a_peer_that_dies() -> None:
    first, second = try_ranks(dying_peer, 2, env={"CANN_ON_HOST_HCCL_TIMEOUT_S": "2"})
    assert "507035" in str(first), first
    assert isinstance(second, RankFailed)


def mismatched(rank: int) -> None:
    x = torch.zeros(4, device="npu")
    if rank == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 1)
    torch.npu.synchronize()


def test_ranks_that_call_different_collectives_end(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed):
        run_ranks(mismatched, 2)
    assert "HcclAllReduce number 1 meets HcclBroadcast" in capfd.readouterr().err


def products(rank: int) -> list[str]:
    refused = []
    for dtype in (torch.float32, torch.int32, torch.float16, torch.int16, torch.bfloat16):
        x = torch.full((4,), 2, dtype=dtype, device="npu")
        try:
            dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)
        except RuntimeError:
            refused.append(str(dtype))
        else:
            assert x.cpu().eq(4).all(), dtype
    return refused


def test_hccl_does_not_multiply_all_types() -> None:
    assert run_ranks(products, 2) == 2 * [["torch.int16", "torch.bfloat16"]]
