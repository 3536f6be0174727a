# SPDX-License-Identifier: Apache-2.0
"""What becomes of prefills and of their transfers, and which engine a failed one counts against. No I/O.

An HTTP answer of prefill says only that the prompt was computed. A transfer is over when decode answers the client, or
reports that the KV did not come. A ticket's result is recorded once then, unless a client may have made the ticket up.
Either engine may be at fault: `answers.at_fault` decides by the results of the others. A pair of engines that does not
fit each other is passed over as a pair.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import Prefill, ProxiedRequest
from vllm_ascend_pd.proxy.routing.answers import RULES, Counts, EngineRole, Failure, FailureKind, at_fault
from vllm_ascend_pd.proxy.routing.dispatch import EnginePool, note_result
from vllm_ascend_pd.proxy.routing.engines import RegisteredEngine, Streak

_MAX_PROBLEMS = 8
"""Pairs in `problems`."""


class _Pair:
    """The last transfers from a prefill to a decode engine."""

    def __init__(self, limit: int) -> None:
        self.streak = Streak(limit)
        self.undecided = 0
        """How many of the streak's failures count against neither engine yet."""
        self.failed_at = float("-inf")
        """When the last one failed, on `time.monotonic`'s clock."""


class Deliveries:
    """The last transfers of each pair of engines. The event loop's thread owns it."""

    def __init__(self, prefill: EnginePool, decode: EnginePool, observer: ProxyObserver, limit: int) -> None:
        """`limit`: failed transfers in a row that pass a pair over."""
        self._prefill_pool = prefill
        self._decode_pool = decode
        self._observer = observer
        self._limit = limit
        self._pairs: dict[RegisteredEngine, dict[RegisteredEngine, _Pair]] = {}
        """By prefill engine and decode engine. Engines that were removed go when the next pair comes."""

    @owned
    def prefill_failed(self, prefill: Prefill, failure: Failure) -> None:
        """A prefill has failed, or its KV has not arrived."""
        if prefill.is_recorded:
            return
        prefill.is_recorded = True
        self._observer.attempt_failed(EngineRole.PREFILL, failure, prefill.request_id)
        if not prefill.is_evidence:
            return
        self._prefill_pool.note_request_result(prefill.engine, failure.kind)
        if RULES[EngineRole.PREFILL, failure.kind].counts is Counts.IF_OTHERS_DELIVER:
            self.failed(prefill.engine, prefill.decode_engine, failure.for_all)

    @owned
    def answered(self, request: ProxiedRequest, is_complete: bool) -> None:
        """Decode has answered the client, so KV has arrived. `is_complete`: False if that is the first part only. The
        first token of a single sequence shows that all KV has arrived, too."""
        parsed = request.parsed
        if parsed is None or not (is_complete or len(parsed.prompts) * parsed.samples == 1):
            return
        for prefill in request.prefills.values():
            if prefill.engine and prefill.is_evidence and not (prefill.is_recorded or prefill.given_up):
                prefill.is_recorded = True
                self.delivered(prefill.engine, prefill.decode_engine, prefill.posted_at)
                if prefill.failures:
                    self._count_refusals(prefill)

    def _count_refusals(self, prefill: Prefill) -> None:
        """Counts other engines' refusals of the prompt's earlier tickets: this one's engine has taken it."""
        counted = prefill.request.counted_refusals
        for failure in prefill.failures:
            if failure.kind is not FailureKind.TICKET or failure.url in {prefill.engine, *counted}:
                continue
            counted.add(failure.url)
            if (engine := self._prefill_pool.engines.get(failure.url)) is not None:
                self._prefill_pool.refused_what_others_took(engine, failure.kind.value)

    @owned
    def delivered(self, prefill: str, decode: str, posted_at: float) -> None:
        """A prompt's KV has arrived.

        Args:
            prefill: the engine's URL.
            decode: the engine's URL.
            posted_at: when decode posted the ticket, on `time.monotonic`'s clock.
        """
        self._prefill_pool.note_request_result(prefill, None)
        if (engines := self._engines(prefill, decode)) is None:
            return
        for engine in engines:
            note_result(engine, engine.gate.transfers, None)
        pair = self._pair(*engines)
        pair.streak.ended(None, time.monotonic())
        pair.undecided = 0
        giver, taker = engines
        beside = [(other, taker) for other, each in self._pairs.items() if taker in each]
        for each in (*beside, *((giver, other) for other in self._pairs[giver])):
            other = self._pair(*each)
            # What failed while this one was under way was no outage of the engine that both have.
            if other.undecided and other.failed_at > posted_at:
                self._decide(*each)

    @owned
    def failed(self, prefill: str, decode: str, reason: str) -> None:
        """A prompt's KV has not arrived. `reason`: as everybody may see it."""
        if (engines := self._engines(prefill, decode)) is None:
            return
        pair = self._pair(*engines)
        pair.failed_at = time.monotonic()
        pair.streak.ended(reason, pair.failed_at)
        pair.undecided += 1
        self._decide(*engines)

    def _decide(self, giver: RegisteredEngine, taker: RegisteredEngine) -> None:
        """Counts a pair's undecided failures against one of its engines, if the others' results say which."""
        pair = self._pairs[giver][taker]
        others = [each[taker] for other, each in self._pairs.items() if other is not giver and taker in each]
        elsewhere = [each for other, each in self._pairs[giver].items() if other is not taker]
        to_decode, from_prefill = ([not each.streak.failures for each in pairs] for pairs in (others, elsewhere))
        role = at_fault(to_decode, from_prefill)
        if role is None:
            return
        engine = giver if role is EngineRole.PREFILL else taker
        for _ in range(min(pair.undecided, self._limit)):
            note_result(engine, engine.gate.transfers, pair.streak.how)
        pair.undecided = 0

    def passed_over(self, decode: Collection[str]) -> frozenset[str]:
        """URLs of the prefill engines whose last transfers to each of these decode engines have failed. None, if these
        have all been removed."""
        now, found = time.monotonic(), [self._decode_pool.engines.get(url) for url in decode]
        takers = [engine for engine in found if engine is not None]
        return frozenset(
            giver.url
            for giver, each in self._pairs.items()
            if takers and all(taker in each and each[taker].streak.passed_over(now) for taker in takers)
        )

    def problems(self) -> Mapping[str, str]:
        """The pairs between which no KV comes through, and why."""
        self._forget_removed()
        found = {
            f"prefill engine {giver.url} to decode engine {taker.url}": f"no KV arrives: "
            f"the last {pair.streak.failures} transfers failed: {pair.streak.how}"
            for giver, each in self._pairs.items()
            for taker, pair in each.items()
            if pair.streak.is_long
        }
        return dict(sorted(found.items())[:_MAX_PROBLEMS])

    def _engines(self, prefill: str, decode: str) -> tuple[RegisteredEngine, RegisteredEngine] | None:
        """The engines; None if one has been removed."""
        giver, taker = self._prefill_pool.engines.get(prefill), self._decode_pool.engines.get(decode)
        return None if giver is None or taker is None else (giver, taker)

    def _pair(self, giver: RegisteredEngine, taker: RegisteredEngine) -> _Pair:
        pair = self._pairs.get(giver, {}).get(taker)
        if pair is None:
            self._forget_removed()
            pair = self._pairs.setdefault(giver, {})[taker] = _Pair(self._limit)
        return pair

    def _forget_removed(self) -> None:
        self._pairs = {
            giver: {taker: pair for taker, pair in each.items() if not taker.removed}
            for giver, each in self._pairs.items()
            if not giver.removed
        }
