# SPDX-License-Identifier: Apache-2.0
"""Time of regrouping one layer's K and V between prefill's ranks: ours against the operators that vllm-ascend's
layerwise connector uses, and our ops against a plain copy.

$ python benchmarks/regroup.py [--ranks 2 4] [--tokens 64 1024 4096] [--seconds 2] [--check] [--json]

Ranks are processes with gloo between them, one thread each; decode has TP 1. 8 KV heads of 128 bfloat16 in all, blocks
of 128 tokens at random places. Both sides regroup the same blocks over the same process group and take turns:

ours       our Regrouper: one gather, one all-to-all, one interleave, for K and V together
reference  for K and V one after the other: index_select, transpose, reshape, zeros, all_to_all_single, transpose,
           contiguous, copy_; as facts of vllm-ascend v0.23.0, in operators of torch

Each must leave the right bytes for the transfer engine, or the benchmark fails. Compared is the time outside the
collective, which no connector can save. (Of fewer tokens than a block, all of the block is regrouped on both sides.)

Exits with 1, with --check, where the reference takes less than MIN_GAIN times as long at 1024 tokens or more, or gather
or interleave is slower than MIN_OF_COPY of a copy of the same bytes.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parent))

import ops as ops_benchmark

from vllm_ascend_pd.core.plan import make_route
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.worker.caches import LayerSpec, describe
from vllm_ascend_pd.worker.exchange_group import ExchangeGroup
from vllm_ascend_pd.worker.regroup import Regrouper
from vllm_ascend_pd.worker.shipment import Chunk
from vllm_ascend_pd.worker.staging import StagingRing

HOST = "127.0.0.1"
HEADS, HEAD_SIZE, BLOCK = 8, 128, 128
LAYER = "model.layers.0.self_attn.attn"
OPS = ("gather_slices", "interleave_heads")
MIN_GAIN, MIN_OF_COPY, BIG_TOKENS = 2.0, 0.7, 1024
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Result:
    """Medians of milliseconds, each the mean of all ranks. `gain`: the reference's time outside the collective relative
    to ours."""

    ranks: int
    tokens: int
    rounds: int
    ours_ms: float
    ours_outside_ms: float
    reference_ms: float
    reference_outside_ms: float
    gain: float

    @property
    def holds(self) -> bool:
        return self.tokens < BIG_TOKENS or self.gain >= MIN_GAIN

    def row(self) -> str:
        return (
            f"{self.ranks:>5}{self.tokens:>8}{self.rounds:>8}{self.ours_outside_ms:>10.3f}"
            f"{self.reference_outside_ms:>11.3f}{self.gain:>7.1f}{self.ours_ms:>13.3f}{self.reference_ms:>11.3f}"
        )


HEADER = (
    f"{'':21}outside the collective (ms)    all (ms)\n"
    f"{'ranks':>5}{'tokens':>8}{'rounds':>8}{'ours':>10}{'reference':>11}{'gain':>7}{'ours':>13}{'reference':>11}"
)


def measure(ranks: int, tokens: int, seconds: float) -> Result:
    """Raises RuntimeError where a rank failed or did not answer."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(ranks):
            mine, its = context.Pipe(duplex=False)
            process = context.Process(
                target=run_rank, args=(its, store.port, rank, ranks, tokens, seconds), daemon=True
            )
            process.start()
            its.close()
            pipes.append(mine)
            processes.append(process)
        samples = [received(pipe, rank, seconds) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
    rounds = len(samples[0]["ours"])
    middle = {
        side: [median(fmean(rank[side][index][part] for rank in samples) for index in range(rounds)) for part in (0, 1)]
        for side in ("ours", "reference")
    }
    (ours, ours_outside), (reference, reference_outside) = middle["ours"], middle["reference"]
    return Result(
        ranks, tokens, rounds, ours, ours_outside, reference, reference_outside, reference_outside / ours_outside
    )


def received(pipe: Connection, rank: int, seconds: float) -> dict[str, list[tuple[float, float]]]:
    if not pipe.poll(TIMEOUT_S + 2 * seconds):
        raise RuntimeError(f"rank {rank} did not answer")
    try:
        found = pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended") from None
    if isinstance(found, str):
        raise RuntimeError(f"rank {rank}: {found}")
    return found


# --- one rank ----------------------------------------------------------------------------------------------


def run_rank(pipe: Connection, port: int, rank: int, ranks: int, tokens: int, seconds: float) -> None:
    try:
        pipe.send(rank_samples(port, rank, ranks, tokens, seconds))
    except Exception as error:  # noqa: BLE001 - for the process that started this one
        pipe.send(f"{type(error).__name__}: {error}")


def rank_samples(port: int, rank: int, ranks: int, tokens: int, seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of each round: all of it, and what was not the collective."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    spent = 0.0  # in collectives

    def timed(collective: Callable[..., Any], *args: Any) -> None:
        nonlocal spent
        begun = time.perf_counter()
        collective(*args)
        spent += time.perf_counter() - begun

    blocks = block_ids(tokens)
    caches = rank_caches(rank, ranks, tokens)
    sides = {
        "ours": ours(rank, ranks, caches, blocks, timed),
        "reference": reference(ranks, caches, blocks, timed),
    }
    samples: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    wanted = expected(rank, ranks, tokens, blocks)
    for side, (layer, result) in sides.items():
        layer()  # connects the ranks
        if not torch.equal(result().view(wanted.shape), wanted):
            raise RuntimeError(f"{side} left other bytes than decode expects")
    go_on, deadline = torch.ones(1), time.perf_counter() + seconds
    while True:
        go_on.fill_(time.perf_counter() < deadline or len(samples["ours"]) < 5)
        dist.broadcast(go_on, 0)
        if not go_on.item():
            break
        order = list(sides) if len(samples["ours"]) % 2 else list(reversed(sides))
        for side in order:
            dist.barrier()
            spent, begun = 0.0, time.perf_counter()
            sides[side][0]()
            taken = time.perf_counter() - begun
            samples[side].append((taken * 1000, (taken - spent) * 1000))
    dist.barrier()
    dist.destroy_process_group()
    return samples


Side = tuple[Callable[[], None], Callable[[], torch.Tensor]]
"""Regroups the layer once; and what that left for the transfer engine."""


def num_blocks(tokens: int) -> int:
    return math.ceil(tokens / BLOCK)


def block_ids(tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return (1 + torch.randperm(2 * num_blocks(tokens), generator=generator)[: num_blocks(tokens)]).tolist()


def model_kv(tokens: int) -> torch.Tensor:
    """K and V of all heads, `[2, num_blocks, block, heads, head size]`."""
    generator = torch.Generator().manual_seed(2)
    shape = (2, 2 * num_blocks(tokens) + 1, BLOCK, HEADS, HEAD_SIZE)
    return torch.randn(shape, generator=generator).bfloat16()


def rank_caches(rank: int, ranks: int, tokens: int) -> list[torch.Tensor]:
    heads = HEADS // ranks
    return [part[:, :, rank * heads : (rank + 1) * heads].contiguous() for part in model_kv(tokens)]


def expected(rank: int, ranks: int, tokens: int, blocks: list[int]) -> torch.Tensor:
    """What a rank has to write to decode: all heads of its share of each block's tokens, K then V."""
    share = BLOCK // ranks
    return model_kv(tokens)[:, blocks, rank * share : (rank + 1) * share].contiguous()


def ours(rank: int, ranks: int, caches: Sequence[torch.Tensor], blocks: list[int], timed: Callable[..., None]) -> Side:
    spec = LayerSpec(group=0, block_size=BLOCK, heads=HEADS // ranks, total_heads=HEADS)
    registered = describe({LAYER: tuple(caches)}, {LAYER: spec}, heads_first=False)
    [geometry] = registered.description.geometries
    route = make_route(geometry, rank, sharding(ranks), sharding(1), BLOCK)
    device = CpuDevice()
    slot_bytes = 2 * len(blocks) * BLOCK * geometry.token_bytes
    ring = StagingRing(device.allocate(slot_bytes), slot_bytes, 1)
    group = device.new_groups([route.ranks], TIMEOUT_S)[route.ranks]
    exchange = ExchangeGroup(device, route.ranks, str(route.ranks), group, rank, TIMEOUT_S)
    device.all_to_all = partial(timed, device.all_to_all)  # type: ignore[method-assign]
    regrouper = Regrouper(device, ring, {route.ranks: exchange}, TIMEOUT_S)
    chunk = Chunk(0, len(blocks), torch.tensor(blocks) * geometry.block_stride)

    def layer() -> None:
        ring.release(regrouper.run(route, chunk, registered.tensors, step=1))

    return layer, lambda: ring.buffer.view(torch.bfloat16)


def reference(ranks: int, caches: Sequence[torch.Tensor], blocks: list[int], timed: Callable[..., None]) -> Side:
    index = torch.tensor(blocks)
    share, heads = BLOCK // ranks, HEADS // ranks
    buffers = [torch.zeros(len(blocks) * share, HEADS, HEAD_SIZE, dtype=cache.dtype) for cache in caches]

    def layer() -> None:
        for cache, buffer in zip(caches, buffers, strict=True):
            gathered = cache.index_select(0, index).view(len(blocks), ranks, share, heads, HEAD_SIZE)
            to_send = gathered.transpose(0, 1).reshape(ranks, -1, heads, HEAD_SIZE)
            delivered = torch.zeros_like(to_send)
            timed(dist.all_to_all_single, delivered, to_send)
            buffer.copy_(delivered.transpose(0, 1).contiguous().view_as(buffer))

    return layer, lambda: torch.stack(buffers)


# --- all of them -------------------------------------------------------------------------------------------


def results(args: argparse.Namespace) -> Iterator[Result | ops_benchmark.Result]:
    for ranks in args.ranks:
        for tokens in args.tokens:
            yield measure(ranks, tokens, args.seconds)
    for ranks in args.ranks:
        for tokens in args.tokens:
            if tokens >= BIG_TOKENS:
                yield from (each for each in ops_benchmark.measure(tokens, ranks, 1) if each.op in OPS)


def holds(result: Result | ops_benchmark.Result) -> bool:
    return result.holds if isinstance(result, Result) else result.of_copy >= MIN_OF_COPY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help=f"of prefill, divisors of {HEADS}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096], help="of one step")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    args = parser.parse_args()
    if min(args.tokens) <= 0 or any(tokens > BLOCK and tokens % BLOCK for tokens in args.tokens):
        parser.error(f"--tokens must be positive, and multiples of {BLOCK} above it")
    if any(ranks < 2 or HEADS % ranks for ranks in args.ranks):
        parser.error(f"--ranks must divide {HEADS}, and be 2 or more")
    missed, header = False, ""
    for result in results(args):
        missed |= not holds(result)
        if args.json:
            kind = "regroup" if isinstance(result, Result) else "op"
            shown = {"measure": kind, **asdict(result), "holds": holds(result), "load_average": os.getloadavg()[0]}
            print(json.dumps(shown), flush=True)
            continue
        wanted = HEADER if isinstance(result, Result) else f"\n{ops_benchmark.HEADER}"
        if wanted != header:
            print(header := wanted)
        print(result.row() + ("" if holds(result) else "   <- misses its bar"), flush=True)
    return 1 if missed and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
