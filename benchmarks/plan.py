# SPDX-License-Identifier: Apache-2.0
"""Python time on prefill's threads for each layer of a step: ours against vllm-ascend's layerwise connector.

$ CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/plan.py [--cases CASE ...] [--rounds 7] [--json] [--check]

A step prefills REQUESTS prompts of BLOCKS blocks, all new and all ending in it: `32x32-scattered`. `scattered`: random
blocks on both sides; `contiguous`: a prompt's blocks follow each other, on both sides; `-tp2`: decode has half of
prefill's tensor-parallel size, so that two ranks' heads go to one block of decode's. A block is of 128 tokens, a token
has 8 KV heads of 128 bfloat16; prefill has TP 1, with `-tp2` 2. Caches are as large as that makes them, and never
touched. Both sides get the same tensors, prompts and decode engine, take turns in one process, each first in every
other round, and must name the same bytes, or there are no figures.

ours       `PrefillWorker` with all of its threads, a decode rank's `DecodeWorker` in another process
reference  `start_load_kv`, `save_kv_layer` and the running KVCacheSendingLayerThread of the installed vllm-ascend; it
           is given decode's addresses, and does not tell decode that a request is done, which ours does

On both sides Mooncake's engine is replaced, at its own interface, by one that does nothing. Ours gives it as much in
one call as over protocol "ascend": 8192 descriptors and 1 GiB at most (the reference: all of a layer). Nothing is
computed, so neither side spends time on waiting for the device. With `-tp2` the work on the device is left out, too:
both sides change to their side stream, wait for the event there, and call operators and a collective that do nothing.

CPU milliseconds per layer: `plan` at the start of the step and at its end, `save` when a layer is computed (both on
the model's thread), `send` on the sending thread; `cpu` is their sum, which is compared. `control`: of ours, the thread
that asks decode for grants and reports; the reference's counterpart is left out. `wall`: from the start of the step
until everything was handed to Mooncake. The model's thread waits for each layer to be handed over before the next one,
so that threads do not compete for the GIL more than they do beside a model. Medians of the rounds. `less`: of the
rounds' own ratios, with their `quartiles`; `calls`: ours into Mooncake, for a layer. A step of one prompt has no bar.

--check exits with 1 where a bar is missed.
"""

import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from unittest import mock

from helpers.plan_sides import Ours, Reference, reference_without_kernels
from helpers.plan_step import BLOCK, HEAD_SIZE, PARTS, Case, Cost, Decode, Handed, layer_names
from helpers.report import options, quartiles

MODEL_BAR_MS = 0.2
DEFAULT = (
    *("32x32-contiguous", "32x32-scattered", "8x256-scattered", "1x64-scattered"),
    *("32x32-scattered-tp2", "8x256-scattered-tp2"),
)
MEMORY_GB = "1024"
"""More than an NPU has: all cases' caches are there until the end, reserved and never touched."""


@dataclass(frozen=True)
class Result:
    """`descriptors`, `calls`: of one layer, ours. `quartiles`: the first and the third of rounds' ratios, of which
    `times_less` is the median."""

    case: str
    layers: int
    descriptors: int
    calls: int
    ours: Cost
    reference: Cost
    times_less: float
    quartiles: tuple[float, float]
    bar: float | None

    @property
    def misses(self) -> list[str]:
        missed: list[str] = []
        if self.bar is None:
            return missed
        if self.times_less < self.bar:
            missed.append(f"{self.case}: {self.times_less:.1f} times less than vllm-ascend, not {self.bar:g}")
        if self.ours.model >= MODEL_BAR_MS:
            missed.append(f"{self.case}: {self.ours.model:.3f} ms per layer on the model's thread, not {MODEL_BAR_MS}")
        return missed

    def as_json(self) -> str:
        costs = {side: {**asdict(cost), "cpu": cost.cpu} for side, cost in self._sides}
        return json.dumps({**asdict(self), **costs, "misses": self.misses})

    @property
    def _sides(self) -> tuple[tuple[str, Cost], ...]:
        return ("ours", self.ours), ("reference", self.reference)

    def rows(self) -> Iterator[str]:
        for side, cost in self._sides:
            figures = (cost.plan, cost.save, cost.send, cost.cpu, cost.control, cost.wall)
            row = f"{self.case:<24}{side:<10}" + "".join(f"{figure:>9.3f}" for figure in figures)
            if side == "ours":
                low, high = self.quartiles
                row += f"{self.times_less:>9.1f}x{f'{low:.1f} to {high:.1f}':>14}{self.calls:>7}"
                if self.bar is not None:
                    row += f"{self.bar:>5g}x  {'missed' if self.misses else 'holds'}"
            yield row


HEADER = f"{'case':<24}{'side':<10}" + "".join(
    f"{name:>9}" for name in ("plan", "save", "send", "cpu", "control", "wall")
)
HEADER += f"{'less':>10}{'quartiles':>14}{'calls':>7}{'bar':>6}"


def check_same_bytes(case: Case, ours: Handed, reference: Handed) -> None:
    """Both name as many bytes of decode's, each once. Where nothing is regrouped they are the same, from the same
    sources.

    Where heads are regrouped, a rank of ours writes whole blocks for a share of them, and one of vllm-ascend's a part
    of each block. Then the ranks' parts together are the blocks that ours name, and blocks of others.
    """
    mine, theirs = written(ours, case), written(reference, case)
    wanted = case.requests * case.blocks * PARTS * len(ours.per_layer)
    if not len(mine) == len(theirs) == wanted:
        raise RuntimeError(f"{case}: {len(mine)} and {len(theirs)} blocks were written, not {wanted}")
    of_all_ranks = {(dst + rank * case.block_bytes, src) for dst, src in theirs for rank in range(case.ratio)}
    if not mine <= of_all_ranks:
        raise RuntimeError(f"{case}: the sides write different bytes: {len(mine - of_all_ranks)} blocks differ")


def written(handed: Handed, case: Case) -> set[tuple[int, int]]:
    """(destination, source) of every block of prefill's; of regrouped ones the source is in either side's staging."""
    block_bytes = case.block_bytes
    found = []
    for src, dst, lengths in handed.writes or []:
        for source, destination, length in zip(src, dst, lengths, strict=True):
            for offset in range(0, length, block_bytes):
                found.append((destination + offset, source + offset if case.ratio == 1 else 0))
    if len(set(found)) != len(found):
        raise RuntimeError(f"{case}: a block was written twice")
    return set(found)


def measure(case: Case, layers: int, rounds: int) -> Result:
    """Raises where a side does not do its work."""
    import torch

    from vllm_ascend_pd.device import ops

    names = layer_names(layers)
    shape = (case.cache_blocks, BLOCK, case.heads, HEAD_SIZE)
    tensors = {
        name: tuple(torch.empty(shape, dtype=torch.bfloat16, device="npu") for _ in range(PARTS)) for name in names
    }
    nothing = {name: lambda *args: None for name in ("gather_units", "interleave_heads", "split_heads")}
    with (
        closing(Decode(layers, case)) as decode,
        mock.patch.multiple(ops, **nothing),
        reference_without_kernels(),
        mock.patch("torch.distributed.get_world_size", return_value=case.ratio),
        closing(Ours(tensors, decode, case)) as ours,
    ):
        reference = Reference(tensors, decode, case)
        sides = (ours, reference)
        for side in sides:
            side.step()
        check_same_bytes(case, *(side.handed for side in sides))
        calls = len(ours.handed.writes or []) // layers
        for side in sides:
            side.handed.writes = None
        taking_turns: list[tuple[Ours | Reference, list[Cost]]] = [(side, []) for side in sides]
        for number in range(rounds + 1):
            for side, found in taking_turns[::-1] if number % 2 else taking_turns:
                found.append(side.step())
    mine, theirs = (found[1:] for _, found in taking_turns)  # the first warms up
    ratios = [reference.cpu / cost.cpu for cost, reference in zip(mine, theirs, strict=True)]
    return Result(
        case=str(case),
        layers=layers,
        descriptors=ours.handed.per_layer[0],
        calls=calls,
        ours=Cost.median(mine),
        reference=Cost.median(theirs),
        times_less=statistics.median(ratios),
        quartiles=quartiles(ratios),
        bar=case.bar,
    )


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[Case.parse(text) for text in DEFAULT])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if min(args.layers, args.rounds) < 1:
        parser.error("--layers and --rounds must be positive")

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # vLLM logs to standard output
    os.environ.setdefault("CANN_ON_HOST_MEMORY_GB", MEMORY_GB)
    import torch

    torch.set_num_threads(1)
    torch.npu.set_device(0)
    misses = []
    if not args.json:
        print(f"against vllm-ascend {version('vllm-ascend')}; load average {os.getloadavg()[0]:.1f}")
        print(HEADER)
    for case in args.cases:
        result = measure(case, args.layers, args.rounds)
        misses += result.misses
        for row in [result.as_json()] if args.json else result.rows():
            print(row, flush=True)
    for miss in misses:
        print(miss, file=sys.stderr)
    return 1 if args.check and misses else 0


if __name__ == "__main__":
    sys.exit(main())
