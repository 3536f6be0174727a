# SPDX-License-Identifier: Apache-2.0
"""Time of regrouping one layer's K and V between prefill's ranks: ours against the operators that vllm-ascend's
layerwise connector uses.

$ python benchmarks/regroup.py [--ranks 2 4] [--tokens 64 1024 4096] [--seconds 2] [--check] [--json]

Ranks are processes with gloo between them, one thread each; decode has TP 1. 8 KV heads of 128 bfloat16 in all, blocks
of 128 tokens at random places. Both sides regroup the same blocks over the same process group and take turns:

ours       our Regrouper: one gather, one all-to-all, one interleave, for K and V together
reference  for K and V one after the other: index_select, transpose, reshape, zeros, all_to_all_single, transpose,
           contiguous, copy_; as facts of vllm-ascend v0.23.0, in operators of torch

Each must leave the right bytes for the transfer engine, or the benchmark fails. Compared is the time outside the
collective, which no connector can save. (For fewer tokens than a block, both sides regroup the whole block.)

With --check, exits with 1 where the reference takes less than MIN_GAIN times as long at 1024 tokens or more.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from helpers.regroup_layer import BLOCK, HEAD_SIZE, HEADS, Layer, check_bytes, our_side
from helpers.report import options, show

from harness.rank_hosts import run_ranks
from vllm_ascend_pd.device.cpu import CpuDevice

MIN_GAIN, BIG_TOKENS = 2.0, 1024
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


def measure(layer: Layer, seconds: float) -> Result:
    """Raises RuntimeError or TimeoutError where a rank failed or did not answer."""
    samples = run_ranks(rank_samples, layer.ranks, layer, seconds, backend="gloo", timeout_s=TIMEOUT_S + 2 * seconds)
    rounds = len(samples[0]["ours"])
    middle = {
        side: [median(fmean(rank[side][index][part] for rank in samples) for index in range(rounds)) for part in (0, 1)]
        for side in ("ours", "reference")
    }
    (ours, ours_outside), (reference, reference_outside) = middle["ours"], middle["reference"]
    gain = reference_outside / ours_outside
    return Result(layer.ranks, layer.tokens, rounds, ours, ours_outside, reference, reference_outside, gain)


# --- one rank ----------------------------------------------------------------------------------------------


def rank_samples(rank: int, layer: Layer, seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of each round: all of it, and what was not the collective."""
    spent = 0.0  # in collectives

    def timed(collective: Callable[..., Any], *args: Any) -> None:
        nonlocal spent
        begun = time.perf_counter()
        collective(*args)
        spent += time.perf_counter() - begun

    blocks, caches = layer.blocks(), layer.caches(rank)
    sides = {"ours": ours(rank, layer, caches, timed), "reference": reference(layer, caches, blocks, timed)}
    samples: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    expected = {"ours": layer.expected(rank, blocks), "reference": layer.reference_expected(rank, blocks)}
    for side, (run, result) in sides.items():
        run()  # connects the ranks
        check_bytes(side, result(), expected[side])
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
    return samples


Side = tuple[Callable[[], None], Callable[[], torch.Tensor]]
"""Regroups the layer once; and what that left for the transfer engine."""


def ours(rank: int, layer: Layer, caches: Sequence[torch.Tensor], timed: Callable[..., None]) -> Side:
    device = CpuDevice()
    device.all_to_all = partial(timed, device.all_to_all)  # type: ignore[method-assign]
    run, ring = our_side(layer, rank, device, caches, TIMEOUT_S)

    def regroup() -> None:
        if (slot := run()) is not None:  # of one block another rank has all
            ring.release(slot)

    return regroup, lambda: ring.buffer.view(torch.bfloat16)


def reference(layer: Layer, caches: Sequence[torch.Tensor], blocks: list[int], timed: Callable[..., None]) -> Side:
    index = torch.tensor(blocks)
    ranks, share = layer.ranks, BLOCK // layer.ranks
    buffers = [torch.zeros(len(blocks) * share, HEADS, HEAD_SIZE, dtype=cache.dtype) for cache in caches]

    def run() -> None:
        for cache, buffer in zip(caches, buffers, strict=True):
            gathered = cache.index_select(0, index).view(len(blocks), ranks, share, layer.heads, HEAD_SIZE)
            to_send = gathered.transpose(0, 1).reshape(ranks, -1, layer.heads, HEAD_SIZE)
            delivered = torch.zeros_like(to_send)
            timed(dist.all_to_all_single, delivered, to_send)
            buffer.copy_(delivered.transpose(0, 1).contiguous().view_as(buffer))

    return run, lambda: torch.stack(buffers)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help=f"of prefill, divisors of {HEADS}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096], help="of one step")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    args = parser.parse_args()
    if min(args.tokens) <= 0 or any(tokens > BLOCK and tokens % BLOCK for tokens in args.tokens):
        parser.error(f"--tokens must be positive, and multiples of {BLOCK} above it")
    if any(ranks < 2 or HEADS % ranks for ranks in args.ranks):
        parser.error(f"--ranks must divide {HEADS}, and be 2 or more")
    cases = (Layer(ranks, tokens) for ranks, tokens in product(args.ranks, args.tokens))
    return show((measure(layer, args.seconds) for layer in cases), HEADER, args)


if __name__ == "__main__":
    sys.exit(main())
