# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/push.py --npu: what one step's pushes queue on prefill's NPUs and hand to Mooncake, counted."""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.rank_programs import PrefillRank
from helpers.push_pair import Cache, PushPair
from vllm_ascend_pd.transport.batches import Batch
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import Flight

MIB = 1 << 20
MAX_LAUNCHES, MAX_PASSES = 4, 2
"""Of regrouping a layer: a split, an all-to-all and an interleave, and one to spare."""
OWN_WAITS = 1  # push_pair.prefill waits for the step's end


@dataclass(frozen=True)
class Count:
    """Of one step. `calls`, `descriptors`: to Mooncake, of all prefill ranks for each layer. The rest is a rank's:
    `kernels`, `collectives`, `copies` on the device, `events` recorded, for each layer; `passes`: bytes that kernels
    and copies wrote by those of its KV; `uploads`, `downloads`, `waits` of a thread for the device, `allocated` bytes
    of its memory at most, for the whole step."""

    prefill_tp: int
    requests: int
    mib: int
    scattered: bool
    layers: int
    calls: float
    descriptors: float
    kernels: float
    collectives: float
    copies: float
    events: float
    passes: float
    uploads: int
    downloads: int
    waits: int
    allocated: int

    @property
    def launches(self) -> float:
        return self.kernels + self.collectives + self.copies

    @property
    def holds(self) -> bool:
        """Nothing is queued for KV that decode wants as it is; little for what is regrouped. Nothing ever waits."""
        most_launches, most_passes = (MAX_LAUNCHES, MAX_PASSES) if self.prefill_tp > 1 else (0, 0)
        within = self.launches <= most_launches and self.passes <= most_passes
        return within and self.downloads == self.waits == 0

    def row(self) -> str:
        placed = "scattered" if self.scattered else "contiguous"
        return (
            f"{self.prefill_tp:>3}/1{self.requests:>9}{self.mib:>5} {placed:<11}{self.calls:>6.2f}"
            f"{self.descriptors:>9.1f}{self.kernels:>9.2f}{self.collectives:>12.2f}{self.copies:>7.2f}"
            f"{self.events:>7.2f}{self.passes:>8.2f}{self.uploads:>9}{self.downloads:>10}{self.waits:>6}"
            f"{self.allocated / 1024:>10.1f}"
        )


HEADER = (
    f"{'':28}{'for each layer':>15}{'for each layer and rank':>35}{'':8}{'for each step and rank':>35}\n"
    f"{'TP':>5}{'requests':>9}{'MiB':>5} {'blocks':<11}{'calls':>6}{'descr.':>9}{'kernels':>9}{'collectives':>12}"
    f"{'copies':>7}{'events':>7}{'passes':>8}{'uploads':>9}{'downloads':>10}{'waits':>6}{'KiB more':>10}"
)


@contextmanager
def kernels_on_the_twin() -> Iterator[Path]:
    """The NPU's library as setup.py builds it, with the toolkit of tests/ascendc_twin for CANN."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "ascendc_twin"))
    from make_toolkit import build_kernels, make_toolkit

    with tempfile.TemporaryDirectory() as folder:
        library, _ = build_kernels(make_toolkit(Path(folder, "cann")), Path(folder, "build"), Path(folder))
        yield library


def counts(
    cache: Cache, prefill_tp: int, mib: Sequence[int], requests: Sequence[int], kernels: Path
) -> Iterator[Count]:
    """`kernels`: the library with them. Raises RuntimeError where other bytes than the KV's are sent, or arrive."""
    pair = PushPair(cache, cache.blocks_for(max(mib) * MIB), prefill_tp, "npu", kernels)
    try:
        for size in mib:
            for count in requests:
                for scattered in (False, True):
                    if cache.blocks_for(size * MIB) >= count:
                        yield _count(pair, prefill_tp, size, count, scattered)
    finally:
        pair.close()


def _count(pair: PushPair, prefill_tp: int, mib: int, count: int, scattered: bool) -> Count:
    requests = pair.requests(count, pair.cache.blocks_for(mib * MIB), scattered)
    pair.push(requests)  # the first ones find each other
    pair.check(requests)
    pair.pair.each(pair.p_ranks, "do", begin_counting)
    pair.push(requests)
    found: list[Counter[str]] = pair.pair.each(pair.p_ranks, "do", counted)
    pair.check(requests)
    if (sent := sum(each["sent_bytes"] for each in found)) != mib * MIB:
        raise RuntimeError(f"{sent} bytes were handed to Mooncake, not {mib} MiB")
    layers = pair.cache.layers

    def per_layer(name: str) -> float:
        return sum(each[name] for each in found) / layers

    def per_rank(name: str) -> int:
        return max(each[name] for each in found)

    return Count(
        prefill_tp,
        count,
        mib,
        scattered,
        layers,
        calls=per_layer("calls"),
        descriptors=per_layer("descriptors"),
        kernels=per_rank("launches") / layers,
        collectives=per_rank("hccl_calls") / layers,
        copies=per_rank("copies_on_device") / layers,
        events=per_rank("event_records") / layers,
        passes=per_rank("written_bytes") / (mib * MIB / prefill_tp),
        uploads=per_rank("copies_to_device"),
        downloads=per_rank("copies_to_host"),
        waits=per_rank("synchronizes") - OWN_WAITS,
        allocated=per_rank("allocated"),
    )


# --- in prefill's processes --------------------------------------------------------------------------------


def begin_counting(rank: PrefillRank) -> None:
    import torch

    import cann_on_host

    handed: Counter[str] = Counter()

    def begin(session: str, batch: Batch, *others: Any) -> Flight | None:
        handed.update(calls=1, descriptors=len(batch[2]), sent_bytes=sum(batch[2]))
        return TransferEngine.begin(rank.engine, session, batch, *others)

    rank.engine.begin = begin
    rank.handed = handed  # type: ignore[attr-defined]
    rank.drain()
    torch.npu.reset_peak_memory_stats()
    rank.allocated = torch.npu.memory_allocated()  # type: ignore[attr-defined]
    cann_on_host.reset_counters()


def counted(rank: PrefillRank) -> Counter[str]:
    """Returns the counts since `begin_counting`."""
    import torch

    import cann_on_host

    found = Counter(cann_on_host.counters())
    found["written_bytes"] = found["kernel_bytes"] + found["copy_bytes_on_device"]
    found["allocated"] = torch.npu.max_memory_allocated() - rank.allocated  # type: ignore[attr-defined]
    return found + rank.handed  # type: ignore[attr-defined]
