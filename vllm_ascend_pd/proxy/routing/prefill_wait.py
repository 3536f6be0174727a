# SPDX-License-Identifier: Apache-2.0
"""Estimates how long a prompt would wait in the queue of a prefill engine. It computes with numbers only."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.routing.balance import EngineLoad

MAX_WAIT_SECONDS = 600.0
"""Limit of the estimate. Nobody decides otherwise about a longer wait."""
_OVER_PREFILLS = 32
"""Each prefill counts 1/32 less with each later one, so the pace follows the last few dozen."""


class PrefillPace:
    """How fast the prefill engines have computed prompts lately. The event loop's thread owns it.

    It is one pace for all engines of the role: usually they are alike.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @owned
    def note(self, tokens: int, seconds: float) -> None:
        """Notes a prefill that has ended well.

        Args:
            tokens: what its engine had to compute when it got the prompt, the prompt included.
            seconds: from then until the engine's answer.
        """
        kept = 1 - 1 / _OVER_PREFILLS
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds

    @property
    def tokens_per_second(self) -> float:
        """0: unknown."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


def queue_wait(engines: Sequence[EngineLoad], queued_tokens: float, tokens_per_second: float) -> float:
    """Returns the seconds that a further prompt would wait at the engine with the shortest queue; 0 if unknown.

    A prompt that is being computed counts as a whole until its engine has answered, so the estimate may be too high by
    the time of one prompt.

    Args:
        engines: the load of each engine that may get the prompt.
        queued_tokens: tokens of the prompts that wait until any of the engines takes them.
        tokens_per_second: how many tokens an engine computes; 0 if unknown.
    """
    if not engines or tokens_per_second <= 0:
        return 0.0
    ahead = min(engine.tokens for engine in engines) + queued_tokens / len(engines)
    return min(ahead / tokens_per_second, MAX_WAIT_SECONDS)
