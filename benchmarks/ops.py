# SPDX-License-Identifier: Apache-2.0
"""Speed of the regroup ops against a plain `copy_` of the same bytes on the same threads.

$ python benchmarks/ops.py [--tokens 1024 8192] [--ratios 2 8] [--threads 1 2] [--json]
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import torch

from vllm_ascend_pd.device import ops

HEADS = 8  # of the side with the smaller TP size; its peer's ranks have HEADS / ratio
HEAD_BYTES = 128 * 2  # head size 128, bfloat16
BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Result:
    op: str
    tokens: int
    ratio: int  # TP sizes of prefill and decode: ratio to 1, or for split_heads 1 to ratio
    threads: int
    bytes: int
    gb_per_s: float
    of_copy: float  # speed relative to copy_; 1.0 is as fast

    def row(self) -> str:
        return (
            f"{self.op:<17}{self.tokens:>7}{self.ratio:>7}{self.threads:>9}"
            f"{self.bytes / 2**20:>7.1f}{self.gb_per_s:>7.1f}{self.of_copy:>10.0%}"
        )


HEADER = f"{'op':<17}{'tokens':>7}{'ratio':>7}{'threads':>9}{'MiB':>7}{'GB/s':>7}{'of copy_':>10}"


def median_seconds(runs: list[Callable[[], object]], seconds: float = 0.3) -> list[float]:
    """Median time of each run; they take turns, so that a change in the machine's load hits all alike."""
    times: list[list[float]] = [[] for _ in runs]
    deadline = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < deadline or len(times[0]) < 5:
        for run, samples in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
    return [sorted(samples)[len(samples) // 2] for samples in times]


@dataclass(frozen=True)
class Case:
    op: str
    bytes: int
    run: Callable[[], None]


def paged(num_blocks: int, block_bytes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache, the offsets of half its blocks in random order, and a buffer for their bytes."""
    cache = torch.ones(2 * num_blocks, block_bytes, dtype=torch.uint8)
    offsets = torch.randperm(2 * num_blocks)[:num_blocks] * block_bytes
    return cache, offsets, torch.ones(num_blocks * block_bytes, dtype=torch.uint8)


def cases(tokens: int, ratio: int) -> Iterator[Case]:
    num_blocks, row_bytes = tokens // BLOCK_TOKENS, HEADS // ratio * HEAD_BYTES

    cache, offsets, out = paged(num_blocks, BLOCK_TOKENS * row_bytes)
    size, section = out.numel(), out.numel() // ratio
    slice_bytes = BLOCK_TOKENS // ratio * row_bytes
    gather = partial(ops.gather_slices, [cache], offsets, ratio, slice_bytes, out, 0, 0, section)
    yield Case("gather_slices", size, gather)

    src = torch.ones_like(out)  # what the all-to-all delivers: 1/ratio of the tokens, all heads
    interleave = partial(ops.interleave_heads, src, 0, section, out, 0, ratio, tokens // ratio, row_bytes)
    yield Case("interleave_heads", size, interleave)

    cache, offsets, out = paged(num_blocks, BLOCK_TOKENS * HEADS * HEAD_BYTES)
    size, section = out.numel(), out.numel() // ratio
    split = partial(ops.split_heads, [cache], offsets, ratio, BLOCK_TOKENS, row_bytes, out, 0, 0, section)
    yield Case("split_heads", size, split)


def measure(tokens: int, ratio: int, threads: int) -> Iterator[Result]:
    torch.set_num_threads(threads)
    for case in cases(tokens, ratio):
        src, dst = (torch.ones(case.bytes, dtype=torch.uint8) for _ in range(2))
        ours, copy = median_seconds([case.run, partial(dst.copy_, src)])
        yield Result(case.op, tokens, ratio, threads, case.bytes, case.bytes / ours / 1e9, copy / ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192], help=f"multiples of {BLOCK_TOKENS}")
    parser.add_argument("--ratios", type=int, nargs="+", default=[2, 8], help=f"divisors of {HEADS}")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    args = parser.parse_args()
    if any(tokens <= 0 or tokens % BLOCK_TOKENS for tokens in args.tokens):
        parser.error(f"--tokens must be positive multiples of {BLOCK_TOKENS}")
    if any(ratio <= 0 or HEADS % ratio for ratio in args.ratios):
        parser.error(f"--ratios must divide {HEADS}")

    if not args.json:
        print(HEADER)
    for threads, ratio, tokens in product(sorted(set(args.threads)), args.ratios, args.tokens):
        for result in measure(tokens, ratio, threads):
            print(json.dumps(asdict(result)) if args.json else result.row())


if __name__ == "__main__":
    main()
