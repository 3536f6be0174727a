# SPDX-License-Identifier: Apache-2.0
"""What became of the transfers between each prefill and each decode engine, and which engine a failed one counts
against. No I/O.

An HTTP answer of prefill says only that the prompt was computed. A transfer is over when decode answers the client, or
reports that the KV did not come. Either engine may be at fault then: `answers.at_fault` decides by the results of the
others. A pair of engines that does not fit each other is passed over as a pair.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.routing.answers import EngineRole, at_fault
from vllm_ascend_pd.proxy.routing.engine import RegisteredEngine, Streak
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool, note_result

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

    def __init__(self, prefill: EnginePool, decode: EnginePool, limit: int) -> None:
        """`limit`: failed transfers in a row that pass a pair over."""
        self._prefill = prefill
        self._decode = decode
        self._limit = limit
        self._pairs: dict[RegisteredEngine, dict[RegisteredEngine, _Pair]] = {}
        """By prefill engine and decode engine. Engines that were removed go when the next pair comes."""

    @owned
    def delivered(self, prefill: str, decode: str, begun: float) -> None:
        """A prompt's KV has arrived.

        Args:
            prefill: the engine's URL.
            decode: the engine's URL.
            begun: when the prefill began, on `time.monotonic`'s clock.
        """
        self._prefill.judge(prefill, None)
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
            if other.undecided and other.failed_at > begun:
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
        """URLs of the prefill engines whose last transfers to each of these decode engines have failed."""
        now, takers = time.monotonic(), [self._decode.engines.get(url) for url in decode]
        return frozenset(
            giver.url
            for giver, each in self._pairs.items()
            if takers and all(t in each and each[t].streak.passed_over(now) for t in takers if t is not None)
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
        giver, taker = self._prefill.engines.get(prefill), self._decode.engines.get(decode)
        return None if giver is None or taker is None else (giver, taker)

    def _pair(self, giver: RegisteredEngine, taker: RegisteredEngine) -> _Pair:
        if taker not in self._pairs.get(giver, ()):
            self._forget_removed()
        return self._pairs.setdefault(giver, {}).setdefault(taker, _Pair(self._limit))

    def _forget_removed(self) -> None:
        self._pairs = {
            giver: {taker: pair for taker, pair in each.items() if not taker.removed}
            for giver, each in self._pairs.items()
            if not giver.removed
        }
