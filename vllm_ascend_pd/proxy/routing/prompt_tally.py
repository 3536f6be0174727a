# SPDX-License-Identifier: Apache-2.0
"""Adds up who computed prompts and why, from what all decode engines report. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.routing.load import PlacedPrompts

_MAX_PLACES = 64
"""Different pairs of `by` and `reason`. Engines have about a dozen; more are ignored."""


class PromptTally:
    """Sums since the proxy started. They only grow, though engines are restarted and removed. The event loop's thread
    owns it, and `EngineRegistry` alone changes it."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[int, int]] = {}
        """Prompts and tokens, by `by` and `reason`."""

    @owned
    def add(self, before: Iterable[PlacedPrompts], now: Iterable[PlacedPrompts]) -> None:
        """Adds what an engine has reported since its last report.

        Args:
            before: the last report.
            now: the new one. Lower figures than before mean that the engine was restarted, and began at 0.
        """
        old = {(each.by, each.reason): each for each in before}
        for each in now:
            place = (each.by, each.reason)
            last = old.get(place)
            since = (0, 0) if last is None or each.prompts < last.prompts else (last.prompts, last.tokens)
            if place not in self._sums and len(self._sums) >= _MAX_PLACES:
                continue
            prompts, tokens = self._sums.get(place, (0, 0))
            self._sums[place] = (prompts + each.prompts - since[0], tokens + max(0, each.tokens - since[1]))

    def sums(self) -> tuple[PlacedPrompts, ...]:
        """In order of `by` and `reason`."""
        return tuple(PlacedPrompts(*place, *self._sums[place]) for place in sorted(self._sums))
