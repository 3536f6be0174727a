# SPDX-License-Identifier: Apache-2.0
"""Compares the KV that has arrived with prefill's checksums, for `verify_kv` (docs/garbled.md).

The control thread hands over a request when all prefill ranks have reported. The model's thread owns `Verifier`. It
submits the checksums to the side stream, and lets the request go on when they are compared. It compares once more
before the request's first step reads the KV. A request whose KV cannot be compared goes on as well, and is counted.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_ascend_pd.core.caches import RegisteredCaches
from vllm_ascend_pd.core.checksum import (
    Form,
    HeadSums,
    SummedUnits,
    Sums,
    Tallies,
    common_heads,
    form_of,
    head_weights,
)
from vllm_ascend_pd.core.kv_dump import Place, write_dump
from vllm_ascend_pd.core.layout import BlockKind, Order, Packing, TokenShare
from vllm_ascend_pd.core.protocol import WriterId
from vllm_ascend_pd.core.reasons import Verified
from vllm_ascend_pd.core.step import Expect, VerifiedBlocks
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.topology import RankInfo, Sharding, held
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.checksums import UnitSummer, take_sums, to_numpy
from vllm_ascend_pd.device.event import DeviceError, Event

logger = logging.getLogger(__name__)

_ASLEEP = "it arrived before this engine slept (/sleep), and its memory was freed"
# Layers and blocks that a message names.
_NAMED = 4
# Most requests whose second comparison is still to come. Of more, the oldest are not compared again.
_MAX_WAITING = 1024
# Seconds that the device has for the checksums of a ticket. A step waits so long for those of the second comparison.
_LONGEST_S = 10.0
# Seconds after the first of its comparisons in which a step begins further ones. The next step goes on.
_STEP_S = 0.01
# Seconds between two warnings about prefill engines that send no checksums.
_WARN_EVERY_S = 60.0


@dataclass(frozen=True)
class Reported:
    """What a prefill rank has reported after success."""

    writer: WriterId
    # Indices of our tensors that it has filled, ascending.
    covers: tuple[int, ...]
    # As in `WriteReport`.
    checksums: bytes | None


@dataclass(frozen=True)
class Delivered:
    """A ticket whose KV has arrived, and that is to be verified."""

    expect: Expect
    # The expected blocks that are compared.
    verified: VerifiedBlocks
    # As in `Arrivals.ticket_closed`.
    received: tuple[int, int]
    cached_tokens: int | None
    # How prefill's ranks share KV.
    prefill: Sharding
    # Those of all writers.
    reports: tuple[Reported, ...]


def _first(names: Sequence[object]) -> str:
    more = len(names) - _NAMED
    return ", ".join(map(str, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")


@dataclass
class _Check:
    """Checksums of a delivered ticket."""

    delivered: Delivered
    # When the device must have taken them, in seconds of `time.monotonic`.
    deadline: float
    # By geometry: the units, what takes their checksums, and the indices of our tensors.
    summed: dict[int, tuple[SummedUnits, UnitSummer, list[int]]] = field(default_factory=dict)
    # That of prefill's checksums.
    form: Form = Form.SUM_64
    # By tensor: what `take_sums` returns, on the host when `done`. The side stream fills it.
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    done: Event | None = None
    failure: str | None = None


class Verifier:
    """Verifies the KV of requests on one decode rank."""

    def __init__(
        self, rank_info: RankInfo, device: Device, caches: RegisteredCaches, dump_dir: str | None = None
    ) -> None:
        """`dump_dir`: folder for dumps of KV that differs. None: there are none."""
        self._dump_dir = dump_dir
        self._rank_info = rank_info
        self._device = device
        self._caches = caches
        # By geometry: indices of its tensors.
        self._tensors: dict[int, list[int]] = {}
        for index, tensor in enumerate(caches.description.tensors):
            self._tensors.setdefault(tensor.geometry, []).append(index)
        # The oldest first.
        self._pending: deque[_Check] = deque()
        # By ticket id: what was right on arrival and has not been read, and when it was compared. The oldest first.
        self._right: dict[str, tuple[Delivered, float]] = {}
        # By result, since the last `take_counts`.
        self._counts: Counter[str] = Counter()
        # Whether the caches may have no memory.
        self._asleep = False
        # When to warn again of prefill engines that send no checksums.
        self._warn_at = -math.inf

    @owned
    def begin(self, delivered: Iterable[Delivered]) -> None:
        """Submits the checksums of tickets whose KV has just arrived."""
        self._pending.extend(map(self._check, delivered))

    def _check(self, delivered: Delivered) -> _Check:
        """Submits the checksums of a ticket."""
        check = _Check(delivered, time.monotonic() + _LONGEST_S)
        if self._asleep:
            check.failure = _ASLEEP
            return check
        try:
            self._submit(check)
        except (DeviceError, ValueError) as error:
            check.failure = str(error)
        return check

    @owned
    def sleep(self) -> None:
        """Compares nothing that arrives before `wake`, or has arrived: the caches' memory is about to be freed.

        Submitted work may still read it: wait for the device afterwards.
        """
        self._asleep = True
        self._right.clear()
        for check in self._pending:
            check.failure, check.done = _ASLEEP, None

    @owned
    def wake(self) -> None:
        """Ends `sleep`."""
        self._asleep = False

    @owned
    def take(self, wait_s: float) -> list[tuple[Delivered, str | None]]:
        """Returns the tickets that are verified, and why they fail. Waits `wait_s` seconds at most for the first."""
        ended: list[tuple[Delivered, str | None]] = []
        until = math.inf
        while self._pending and time.monotonic() < until:
            check, reason = self._pending[0], None
            try:
                mismatches = self._mismatches(check, 0.0 if ended else wait_s)
            except TimeoutError:
                break
            self._pending.popleft()
            expect = check.delivered.expect
            if mismatches:
                reason = _describe(mismatches)
                self._counts[Verified.WRONG.value] += 1
                logger.error("request %s: wrong on arrival: %s", expect.request_id, reason)
            elif mismatches is not None:
                self._counts[Verified.RIGHT.value] += 1
                self._right[expect.ticket_id] = check.delivered, time.monotonic()
            ended.append((check.delivered, reason))
            until = min(until, time.monotonic() + _STEP_S)
        while len(self._right) > _MAX_WAITING:
            del self._right[next(iter(self._right))]
        return ended

    @owned
    def verify_again(self, ticket_ids: Iterable[str]) -> list[tuple[Expect, str]]:
        """Returns of which of these tickets the KV was right on arrival and is not any more, and why it fails.

        Call it right before a step that reads their KV first. Waits for the comparison, `_LONGEST_S` seconds at most.
        """
        arrived = [self._right.pop(ticket_id) for ticket_id in ticket_ids if ticket_id in self._right]
        overwritten = []
        for check, compared_at in [(self._check(each), then) for each, then in arrived]:
            expect = check.delivered.expect
            mismatches = self._mismatches(check, math.inf)
            if mismatches:
                ago = time.monotonic() - compared_at
                reason = f"overwritten later: right on arrival {ago:.3f} s ago: {_describe(mismatches)}"
                logger.error("request %s: %s", expect.request_id, reason)
                self._counts[Verified.OVERWRITTEN.value] += 1
                overwritten.append((expect, reason))
        return overwritten

    @owned
    def take_counts(self) -> dict[str, int]:
        """Returns how many tickets were compared since the last call, by result (`Verified`)."""
        counts, self._counts = +self._counts, Counter()  # without those at 0
        return dict(counts)

    def _mismatches(self, check: _Check, wait_s: float) -> list[str] | None:
        """Returns what of a ticket's KV differs. None, which is counted: it cannot be compared.

        Raises TimeoutError if the device has not taken the checksums in `wait_s` seconds, and has time left for them.
        """
        found = None
        left_s = max(0.0, check.deadline - time.monotonic())
        try:
            if check.done is not None:
                check.done.wait(min(wait_s, left_s))
        except DeviceError as error:
            check.failure = str(error)
        except TimeoutError:
            if wait_s < left_s:
                raise
            check.failure = f"the device has not taken its checksums in {_LONGEST_S:g} s"
        if check.failure is None:
            found = self._compare(check)
        else:
            logger.error("request %s: its KV is not verified: %s", check.delivered.expect.request_id, check.failure)
        self._counts[Verified.UNKNOWN.value] += found is None
        return found

    def _submit(self, check: _Check) -> None:
        reported = [form_of(report.checksums) for report in check.delivered.reports if report.checksums]
        if not reported:
            return
        # Ranks of one engine report the same form.
        check.form = next((form for form in reported if form is not None), Form.SUM_64)
        prefill, verified = check.delivered.prefill, check.delivered.verified
        for index, tensors in self._tensors.items():
            geometry = self._caches.description.geometries[index]
            # A unit lies within one block here, and within the tokens of one rank there.
            unit = math.gcd(geometry.run, prefill.interleave) if prefill.parts > 1 else geometry.run
            blocks = verified.blocks[geometry.group]
            if geometry.kind is BlockKind.STATE:  # as one token
                start, stop = 0, len(blocks)
            else:
                start, stop = check.delivered.expect.cached_tokens, geometry.complete(verified.num_tokens)
            summed = SummedUnits.of(geometry, unit, [(start, max(start, stop))], [blocks])
            if len(summed.units):
                check.summed[index] = summed, UnitSummer(self._device, summed, check.form), tensors

        def take() -> None:
            described = self._caches.description.tensors
            of = {n: summer for _, summer, tensors in check.summed.values() for n in tensors}
            units = [summer.of(self._caches.tensors[n], described[n].base) for n, summer in of.items()]
            check.sums.update(zip(of, take_sums(units) if units else [], strict=True))

        check.done = self._device.submit(take, self._device.record_event())

    def _compare(self, check: _Check) -> list[str] | None:
        found, is_known, delivered = [], True, check.delivered
        of = delivered.verified
        # By geometry, tensors of a report and tokens: prefill ranks that have other heads of the same share these.
        folded: dict[tuple[int, tuple[int, ...], TokenShare], list[HeadSums]] = {}
        # By tensors: their rows in a report, by geometry.
        placed: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}
        for report in delivered.reports:
            if report.checksums is None:
                self._warn_silent(delivered, report.writer)
                is_known = False
                continue
            tallies = Tallies.empty(check.form, len(report.covers), of.column_tokens, of.num_tokens)
            if report.covers not in placed:
                placed[report.covers] = self._rows(report.covers)
            for index, rows in placed[report.covers].items():
                if index not in check.summed:  # nothing of it is here
                    continue
                summed, _, _ = check.summed[index]
                share, own, common = self._written(summed, delivered.prefill, report.writer.rank)
                if (key := (index, report.covers, share)) not in folded:
                    sums = [to_numpy(check.sums[report.covers[row]]) for row in rows]
                    folded[key] = tallies.fold(rows, sums, summed, summed.chosen(0, share))
                tallies.add(folded[key], own, common)
            missing = tallies.missing(report.checksums)
            if missing is None:
                logger.warning(
                    "request %s: checksums of prefill rank %d cannot be compared",
                    delivered.expect.request_id,
                    report.writer.rank,
                )
                is_known = False
                continue
            rows, columns = (tuple(np.flatnonzero(each).tolist()) for each in missing)
            if rows or columns:
                found.append(self._mismatch(delivered, report, rows, columns))
                if self._dump_dir is not None:
                    self._dump(check, report, rows, columns, missing[0], found[-1])
        return found if found or is_known else None

    def _rows(self, covers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Returns by geometry which of these tensors have it, as their places in `covers`."""
        rows: dict[int, list[int]] = {}
        for row, index in enumerate(covers):
            rows.setdefault(self._caches.description.tensors[index].geometry, []).append(row)
        return {geometry: tuple(of) for geometry, of in rows.items()}

    def _warn_silent(self, delivered: Delivered, writer: WriterId) -> None:
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + _WARN_EVERY_S
            logger.warning(
                "request %s: its KV is not verified: prefill engine %s sends no checksums: its `verify_kv` must be at "
                "least this engine's. For a minute, further requests are only counted, as `unknown`",
                delivered.expect.request_id,
                writer.engine_id,
            )

    def _written(self, summed: SummedUnits, prefill: Sharding, writer: int) -> tuple[TokenShare, range, range]:
        """Returns which tokens a prefill rank has, our heads, and those of them that it has, too."""
        writers, _ = held(summed.geometry, prefill, prefill)
        total = summed.geometry.total_heads
        own = self._rank_info.sharding.heads(self._rank_info.rank, total)
        common = common_heads(own, prefill.heads(writer, total))
        return writers.share(writer), own, common

    def _mismatch(self, delivered: Delivered, report: Reported, rows: Sequence[int], columns: Sequence[int]) -> str:
        """Returns what of a prefill rank's KV differs here: each block has some wrong tokens, or is next to one."""
        of, cached = delivered.verified, delivered.expect.cached_tokens
        tensors = [self._caches.description.tensors[report.covers[row]] for row in rows]
        kinds = list(dict.fromkeys(tensor.geometry for tensor in tensors))
        blocks: dict[int, None] = {}
        for geometry in (self._caches.description.geometries[index] for index in kinds):
            if geometry.kind is BlockKind.STATE:
                blocks.update(dict.fromkeys(of.blocks[geometry.group]))
                continue
            for column in columns:
                begin = max(column * of.column_tokens - cached, 0) // geometry.span
                end = -(-(min((column + 1) * of.column_tokens, of.num_tokens) - cached) // geometry.span)
                blocks.update(dict.fromkeys(of.blocks[geometry.group][begin:end]))
        layers = list(dict.fromkeys(f"{tensor.layer} tensor {tensor.part}" for tensor in tensors))
        writer = report.writer
        return (
            f"{_first(layers)} in blocks {_first(list(blocks))}, from prefill rank {writer.rank} of stage "
            f"{writer.pp_rank} of engine {writer.engine_id}, {self._how_sent(kinds, delivered.prefill)}"
        )

    def _dump(
        self,
        check: _Check,
        report: Reported,
        rows: Sequence[int],
        columns: Sequence[int],
        missing: Sums,
        place: str,
    ) -> None:
        """Writes the first place that differs into the dump folder, for `vllm-ascend-pd verify`."""
        assert self._dump_dir is not None
        delivered, described = check.delivered, self._caches.description.tensors
        # By geometry: its first tensor that differs.
        first = {described[report.covers[row]].geometry: row for row in reversed(rows)}
        for geometry, row in first.items():
            if geometry in check.summed:
                summed, summer, _ = check.summed[geometry]
                share, own, common = self._written(summed, delivered.prefill, report.writer.rank)
                of_units = summed.units.tokens // delivered.verified.column_tokens
                chosen = summed.chosen(0, share) & np.isin(of_units, columns)
                index, lacks = report.covers[row], int(missing[row])
                if chosen.any():
                    break
        else:  # nothing of it is here
            return
        chosen &= of_units == of_units[chosen][0]
        heads = np.where([head in common for head in own], head_weights(own), np.uint64(0))
        try:
            content, copies = summer.content(self._caches.tensors[index], described[index].base, chosen)
            alone = len(rows) == len(columns) == 1 and len(content) == chosen.sum()
            write_dump(
                self._dump_dir,
                summed.geometry,
                content,
                summed.entry_weights[chosen][: len(content)],
                heads,
                Place(f"request {delivered.expect.request_id}: {place}", lacks if alone else None, copies),
                check.form,
            )
        except (OSError, RuntimeError) as error:
            logger.error("verify_kv: no dump: %s", error)

    def _how_sent(self, geometries: Iterable[int], prefill: Sharding) -> str:
        """Returns how heads of prefill ranks of this shape come here."""
        for index in geometries:
            geometry = self._caches.description.geometries[index]
            theirs = len(prefill.heads(0, geometry.total_heads))
            if geometry.packing is not Packing.NONE:
                return "brought into decode's form"
            if geometry.order is Order.TOKEN_MAJOR and theirs != geometry.heads:
                return "regrouped"
        return "written straight from the cache"


def _describe(mismatches: Sequence[str]) -> str:
    """Returns why a request fails, as its client may read it."""
    return "KV differs from what prefill computed (verify_kv): " + "; ".join(mismatches[:_NAMED])
