# SPDX-License-Identifier: Apache-2.0
"""What a prompt costs here and there, as measured. Pure: clocks are passed in, as monotonic seconds."""

import math
from collections import deque
from collections.abc import Set

FIRST_TOKENS = 64
"""Most prompt tokens that are trusted to be cheap before anything was measured. A step of so few takes hardly longer
than one that only generates, on any device."""

_SAMPLES = 32.0
"""A sample's weight falls by 1/e while so many follow."""

_HALF_LIFE_S = 600.0
"""A sample's weight falls to half in this time, so that what is no longer measured is forgotten."""

_LEAST_WEIGHT = 2.0
"""Fewer samples than this tell nothing."""

_LEAST_S = 1e-4
"""Nothing that is measured here is faster. It bounds a sample's weight."""

_LATELY_S = 300.0
"""How long the largest prompt is remembered, at least. At most it is three times as long."""

_BURST_S = 0.25
"""Seconds of computing that a budget saves up: a few short prompts at once."""

_DEEPEST_DEBT_S = 4 * _BURST_S
"""Most seconds that a budget may be overdrawn."""


class CostLine:
    """Seconds as a function of tokens: `fixed + per_token * tokens`, both at least 0, fitted to samples.

    Later samples weigh more. A sample weighs by the inverse of its seconds, so a few very slow ones (a compilation, a
    stopped process) count little: the fit of a constant is the samples' harmonic mean.
    """

    def __init__(self) -> None:
        self._at = 0.0  # when the sums were last brought up to date
        # Sums over samples: of 1 without and with the inverse of seconds as weight, and weighted sums of tokens,
        # seconds and their products.
        self._count = self._w = self._wx = self._wy = self._wxx = self._wxy = 0.0

    def add(self, now: float, tokens: float, seconds: float) -> None:
        """Adds a sample."""
        seconds = max(seconds, _LEAST_S)
        self._fade((1.0 - 1.0 / _SAMPLES) * self._faded(now))
        self._at = now
        weight = 1.0 / seconds
        self._count += 1.0
        self._w += weight
        self._wx += weight * tokens
        self._wy += weight * seconds
        self._wxx += weight * tokens * tokens
        self._wxy += weight * tokens * seconds

    def fit(self, now: float, at_zero: float | None = None, steepest: float = math.inf) -> tuple[float, float] | None:
        """Returns (fixed, per_token), or None if too little was measured lately.

        `at_zero`: seconds without any tokens, which counts as one sample. Without it, `per_token` is 0 where all
        samples have the same number of tokens. `steepest`: `per_token` is no larger.
        """
        faded = self._faded(now)
        if self._count * faded < _LEAST_WEIGHT:
            return None
        w, wx, wy, wxx, wxy = (faded * each for each in (self._w, self._wx, self._wy, self._wxx, self._wxy))
        if at_zero is not None:
            w += 1.0 / max(at_zero, _LEAST_S)
            wy += 1.0
        spread = w * wxx - wx * wx
        per_token = 0.0 if spread <= 1e-9 * w * wxx else min(steepest, max(0.0, (w * wxy - wx * wy) / spread))
        fixed = (wy - per_token * wx) / w
        if fixed < 0.0:
            return 0.0, min(steepest, wxy / wxx)
        return fixed, per_token

    def _faded(self, now: float) -> float:
        return float(0.5 ** (max(0.0, now - self._at) / _HALF_LIFE_S))

    def _fade(self, factor: float) -> None:
        self._count *= factor
        self._w *= factor
        self._wx *= factor
        self._wy *= factor
        self._wxx *= factor
        self._wxy *= factor


class RecentLargest:
    """The largest number of the last minutes."""

    def __init__(self) -> None:
        self._since = 0.0
        # The largest since then, and in the period before.
        self._now = self._before = 0

    def add(self, now: float, number: int) -> None:
        self._turn(now)
        self._now = max(self._now, number)

    def get(self, now: float) -> int:
        """Returns 0 if there was none."""
        self._turn(now)
        return max(self._now, self._before)

    def _turn(self, now: float) -> None:
        if now - self._since < _LATELY_S:
            return
        self._before = self._now if now - self._since < 2 * _LATELY_S else 0
        self._now, self._since = 0, now


class StepTimes:
    """Measures steps by when the scheduler builds them.

    in_flight: how many steps the engine has in flight at most. It builds a step when that many before it are over but
        for the last `in_flight - 1`. So the time from step `n` to step `n + in_flight` is the time of step `n`, from
        when it was built until its tokens are there.

    While nothing runs, the engine builds no steps. Such a pause is noticed by the requests of the latest step: if all
    have ended before the next one, the engine may have waited for new ones.
    """

    def __init__(self, in_flight: int) -> None:
        self._in_flight = in_flight
        # When the latest steps were built without a pause in between, and how many prompt tokens they compute.
        self._built: deque[tuple[float, int]] = deque(maxlen=in_flight + 1)
        # Requests of the latest step that have not ended.
        self.alive: set[str] = set()

    def built(self, now: float, request_ids: Set[str], prompt_tokens: int) -> tuple[int, float] | None:
        """A step is built, with tokens of these requests. Returns (prompt tokens, seconds) of a step that is over."""
        if not self.alive or not request_ids:
            self._built.clear()
        self.alive = set(request_ids)
        if not request_ids:
            return None
        self._built.append((now, prompt_tokens))
        if len(self._built) <= self._in_flight:
            return None
        began, tokens = self._built[0]
        return tokens, now - began

    def ended(self, request_id: str) -> None:
        """A request has ended."""
        self.alive.discard(request_id)


class TimeBudget:
    """Seconds that may be spent: it fills with `share` of the time that passes, up to a burst of a quarter second.

    What is spent may overdraw it, by a second at most. Then it must fill first.
    """

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._filled_at = now
        self._seconds = _BURST_S if share > 0 else 0.0

    def has_any(self, now: float) -> bool:
        return self._level(now) > 0.0

    def spend(self, now: float, seconds: float) -> None:
        self._seconds = max(-_DEEPEST_DEBT_S, self._level(now) - seconds)
        self._filled_at = max(self._filled_at, now)

    def _level(self, now: float) -> float:
        return min(_BURST_S, self._seconds + self._share * max(0.0, now - self._filled_at))
