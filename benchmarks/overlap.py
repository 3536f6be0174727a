# SPDX-License-Identifier: Apache-2.0
"""How much of a request's KV is in decode when prefill's last layer ends, and how long the rest takes. Compares pushing
layer by layer with one push of everything after prefill.

$ python benchmarks/overlap.py [--layers 16] [--mib 128] [--compute 2 1 0.5] [--rounds 9] [--check] [--json]
$ CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/overlap.py --npu ...

Our PrefillWorker and DecodeWorker in a process each, over Mooncake's TCP, equal TP sizes, one prompt in one step. A
layer's computation is a sleep, as a device's is to the host, of `--compute` times what pushing a layer took in the last
bulk round (`wanted`); `came out` is what both took in the end. The link keeps up where this is 1 or more. Sides take
turns, with the same sleeps; medians:

layerwise  every layer is announced when it ends
bulk       all layers are announced after the last one

A layer's push time is the bulk side's time after prefill, divided by the layers. Counted as being in decode is what
prefill's ranks had written by the end of the last layer, as they report it to decode.

With --npu, on emulated CANN libraries, a layer is a few kernels on the device's stream that take that long and a little
more. The model's thread queues and announces all layers at once (`queued`: how long this takes).

With --check, exits with 1 where the link keeps up and less than 1 - 2/layers of the bytes are there, or the rest takes
longer than pushing two layers.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from helpers.push_pair import FIRST_LAYER_S, Cache, PushPair, Times
from helpers.report import need_emulated_npu, options, show

from harness.kv import Prompt

MIB = 1 << 20
LATE_LAYERS = 2
SIDES = ("bulk", "layerwise")


@dataclass(frozen=True)
class Result:
    """Milliseconds. `compute_ms`, `push_ms`: of a layer, as they came out; `ratio`: of the two, asked for as `wanted`;
    `early`: share of the bytes that were there when the last layer ended; `after_ms`, `bulk_after_ms`: from then until
    decode had everything; `queued_ms`: from the step's beginning until the model's thread was done with it."""

    wanted: float
    layers: int
    mib: int
    rounds: int
    compute_ms: float
    push_ms: float
    ratio: float
    early: float
    early_bar: float
    after_ms: float
    after_bar_ms: float
    bulk_after_ms: float
    queued_ms: float

    @property
    def keeps_up(self) -> bool:
        return self.ratio >= 1

    @property
    def holds(self) -> bool:
        return not self.keeps_up or (self.early >= self.early_bar and self.after_ms < self.after_bar_ms)

    def row(self) -> str:
        bars = f"{self.early_bar:>8.1%}{self.after_bar_ms:>10.1f}" if self.keeps_up else f"{'-':>8}{'-':>10}"
        return (
            f"{self.wanted:>7.1f}{self.ratio:>9.2f}{self.compute_ms:>12.1f}{self.push_ms:>9.1f}{self.early:>10.1%}{bars[:8]}"
            f"{self.after_ms:>12.1f}{bars[8:]}{self.bulk_after_ms:>11.1f}{self.queued_ms:>10.1f}"
        )


HEADER = (
    f"{'':16}{'a layer (ms)':>21}{'in D at the end':>18}{'the rest after it (ms)':>33}{'queued':>10}\n"
    f"{'wanted':>7}{'came out':>9}{'compute':>12}{'push':>9}{'layerwise':>10}{'bar':>8}{'layerwise':>12}{'bar':>10}"
    f"{'bulk':>11}{'(ms)':>10}"
)


def measure(pair: PushPair, requests: list[Prompt], mib: int, wanted: float, rounds: int) -> Result:
    layers = pair.cache.layers
    push_s = after_s(pair.push(requests, layerwise=False, first_s=FIRST_LAYER_S)) / layers
    times: dict[str, list[Times]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        compute_s = wanted * push_s
        for side in SIDES:
            times[side].append(pair.push(requests, compute_s, layerwise=side == "layerwise"))
        push_s = after_s(times["bulk"][-1]) / layers
    if any(each.num_bytes != mib * MIB for side in SIDES for each in times[side]):
        raise RuntimeError(f"not all of {mib} MiB were sent")
    if any(each.early for each in times["bulk"]):
        raise RuntimeError("bytes left before their layers were announced")
    bulk, after = (1e3 * median(map(after_s, times[side])) for side in SIDES)
    compute = 1e3 * median((each.computed - each.begun) / layers for each in times["layerwise"])
    early = median(each.early / each.num_bytes for each in times["layerwise"])
    push = bulk / layers
    bar = 1 - LATE_LAYERS / layers
    queued = 1e3 * median(each.queued - each.begun for each in times["layerwise"])
    return Result(
        wanted, layers, mib, rounds, compute, push, compute / push, early, bar, after, LATE_LAYERS * push, bulk, queued
    )


def after_s(times: Times) -> float:
    return times.arrived - times.computed


def results(args: argparse.Namespace) -> Iterator[Result]:
    cache = Cache(args.layers, args.heads)
    blocks = cache.blocks_for(args.mib * MIB)
    pair = PushPair(cache, blocks, device="npu" if args.npu else "cpu")
    try:
        requests = pair.requests(1, blocks, scattered=True)
        pair.push(requests)
        pair.check(requests)
        for wanted in args.compute:
            yield measure(pair, requests, args.mib, wanted, args.rounds)
    finally:
        pair.close()


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--mib", type=int, default=128, help="of the prompt's KV")
    parser.add_argument("--heads", type=int, default=8, help="KV heads of a rank, of 128 bfloat16")
    parser.add_argument("--compute", type=float, nargs="+", default=[2.0, 1.0, 0.5], help="times a layer's push time")
    parser.add_argument("--rounds", type=int, default=9, help="of each row")
    parser.add_argument("--npu", action="store_true", help="on emulated CANN libraries")
    args = parser.parse_args()
    if min(*args.compute, args.mib, args.heads, args.rounds) <= 0 or args.layers <= LATE_LAYERS:
        parser.error(f"all numbers must be positive, and --layers above {LATE_LAYERS}")
    try:
        Cache(args.layers, args.heads).blocks_for(args.mib * MIB)
    except ValueError as error:
        parser.error(f"--mib {args.mib}: {error}")
    if args.npu:
        need_emulated_npu(parser)
    return show(results(args), HEADER, args, f"{args.layers} layers, {args.mib} MiB, {args.rounds} rounds")


if __name__ == "__main__":
    sys.exit(main())
