# SPDX-License-Identifier: Apache-2.0
"""KV bytes per second from prefill's paged cache to decode's, against Mooncake's engine alone.

$ python benchmarks/push.py [--mib 16 64 256] [--requests 1 8] [--layers 16] [--rounds 11] [--check] [--json]
$ CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/push.py --npu [--mib ...] [--requests ...] [--layers 16] ...

ours   our PrefillWorker and DecodeWorker in a process each, over Mooncake's TCP, equal TP sizes. One step with all
       of all prompts: from when KV can be sent, which is all layers' at once, until decode's worker says that the last
       request is there, so with all writes and reports. Tickets come to prefill FIRST_LAYER_S earlier, when a model
       would begin with the first layer; grants are asked for meanwhile
alone  Mooncake's engine alone with its default settings: the same number of bytes in one buffer, in descriptors of
       ALONE_BYTES, the longest that ours uses

Sides take turns; medians, of the ratios too, and quartiles of the one that has a bar. A scattered prompt's blocks are
each by themselves, so a descriptor is one block of K or V; a contiguous one's are merged. Bytes are compared on arrival
before anything is measured. A GB is 10^9 bytes.

With --npu, on emulated CANN libraries, one step's work is counted, and nothing timed, at prefill TP 1 and 2: calls and
descriptors that Mooncake gets, and what prefill's NPUs have to do beside the model's work (helpers/push_counts.py). The
regrouping kernels are those of tests/ascendc_twin.

With --check, exits with 1 if a bar is missed. For BIG_MIB or more, ours must reach MIN_OF_ALONE of Mooncake alone.
With --npu, a device must do nothing for KV that decode wants as it is. What is regrouped may take MAX_LAUNCHES
launches a layer and MAX_PASSES passes over the bytes. No thread may wait for it.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from helpers.push_floor import Floor
from helpers.push_pair import FIRST_LAYER_S, Cache, PushPair
from helpers.report import need_emulated_npu, options, quartiles, show

from vllm_ascend_pd.transport.batches import TransferLimits

MIB = 1 << 20
ALONE_BYTES = MIB // 4
MIN_OF_ALONE, BIG_MIB = 0.9, 64


@dataclass(frozen=True)
class Result:
    """Speeds are GB/s. `of_alone`: ours by Mooncake's alone, in the median round; `of_alone_quartiles`: in the first
    and the third quartile."""

    requests: int
    mib: int
    scattered: bool
    descriptor_kib: int
    rounds: int
    ours: float
    alone: float
    of_alone: float
    of_alone_quartiles: tuple[float, float]

    @property
    def holds(self) -> bool:
        return self.mib < BIG_MIB or self.of_alone >= MIN_OF_ALONE

    def row(self) -> str:
        placed = "scattered" if self.scattered else "contiguous"
        low, high = self.of_alone_quartiles
        return (
            f"{self.requests:>8}{self.mib:>6} {placed:<11}{self.descriptor_kib:>6}{self.ours:>8.2f}"
            f"{self.alone:>8.2f}{self.of_alone:>9.0%}{f'{low:.0%} to {high:.0%}':>15}"
        )


HEADER = (
    f"{'':40}{'GB/s':>8}{'ours':>9}{'quartiles':>15}\n"
    f"{'requests':>8}{'MiB':>6} {'blocks':<11}{'KiB':>6}{'ours':>8}{'alone':>8}{'of it':>9}{'of that':>15}"
)


def measure(pair: PushPair, floor: Floor, mib: int, count: int, scattered: bool, rounds: int) -> Result:
    num_bytes = mib * MIB
    cache = pair.cache
    blocks = cache.blocks_for(num_bytes)
    requests = pair.requests(count, blocks, scattered)
    pair.push(requests)
    pair.check(requests)
    longest = 1 if scattered else blocks // count
    length = min(longest * cache.block_bytes, TransferLimits().piece_bytes(num_bytes // cache.layers))

    def ours() -> float:
        times = pair.push(requests, first_s=FIRST_LAYER_S)
        if times.num_bytes != num_bytes:
            raise RuntimeError(f"{times.num_bytes} bytes were sent, not {num_bytes}")
        return times.arrived - times.first

    sides: dict[str, Callable[[], float]] = {
        "ours": ours,
        "alone": lambda: floor.mooncake(num_bytes, ALONE_BYTES),
    }
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in list(sides) if number % 2 else list(reversed(sides)):
            samples[side].append(sides[side]())
    speeds = {side: num_bytes / median(seconds) / 1e9 for side, seconds in samples.items()}
    # Round by round: how fast the machine is changes more slowly than that.
    of_alone = [other / mine for mine, other in zip(samples["ours"], samples["alone"], strict=True)]
    return Result(
        *(count, mib, scattered, length // 1024, rounds),
        **speeds,
        of_alone=median(of_alone),
        of_alone_quartiles=quartiles(of_alone),
    )


def results(args: argparse.Namespace) -> Iterator[Result]:
    cache = Cache(args.layers, args.heads)
    largest = max(args.mib) * MIB
    floor, pair = Floor(largest), PushPair(cache, cache.blocks_for(largest))
    try:
        floor.mooncake(largest, ALONE_BYTES)
        floor.check(largest)
        for mib in args.mib:
            for count in args.requests:
                for scattered in (False, True):
                    if cache.blocks_for(mib * MIB) >= count:
                        yield measure(pair, floor, mib, count, scattered, args.rounds)
    finally:
        pair.close()
        floor.close()


def npu_results(args: argparse.Namespace) -> Iterator[Any]:
    from helpers import push_counts

    with push_counts.kernels_on_the_twin() as kernels:
        for prefill_tp in (1, 2):
            yield from push_counts.counts(Cache(args.layers, args.heads), prefill_tp, args.mib, args.requests, kernels)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 64, 256], help="of all requests together")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="in the step")
    parser.add_argument("--layers", type=int, default=16, help="that the bytes are dealt out to")
    parser.add_argument("--heads", type=int, default=8, help="KV heads of a rank, of 128 bfloat16")
    parser.add_argument("--rounds", type=int, default=11, help="of each row")
    parser.add_argument("--npu", action="store_true", help="count, on emulated CANN libraries")
    args = parser.parse_args()
    if min(*args.mib, *args.requests, args.layers, args.heads, args.rounds) < 1:
        parser.error("all numbers must be positive")
    for mib in args.mib:
        try:
            Cache(args.layers, args.heads).blocks_for(mib * MIB)
        except ValueError as error:
            parser.error(f"--mib {mib}: {error}")
    if args.npu:
        need_emulated_npu(parser)
        if args.heads % 2:
            parser.error("--heads must be even: prefill with TP 2 has half of them")
        from helpers import push_counts

        return show(npu_results(args), push_counts.HEADER, args)
    return show(results(args), HEADER, args, f"{args.layers} layers, {args.rounds} rounds")


if __name__ == "__main__":
    sys.exit(main())
