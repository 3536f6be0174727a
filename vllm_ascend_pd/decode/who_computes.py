# SPDX-License-Identifier: Apache-2.0
"""Who computes a prompt: decode itself, or a prefill engine. It is decided here, once per request, and nowhere else.

Decode computes what it computes sooner than prefill would deliver it, as measured (`decode/who_computes.py`), within a
budget that keeps the pace of its other requests.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.core.caches import CacheGroup, TokenGroup
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.placement import Decision, Reason
from vllm_ascend_pd.core.step import EngineBlocks, EngineRequests, ScheduledRequest
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import BY_DECODE, BY_PREFILL, PREFILL_AVAILABLE, PREFILL_WAIT_S, WHO_COMPUTES

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


_LONGEST_WAIT_S = 86400.0
"""A longer wait in prefill's queue is not believed."""

_LEAST_SHARE = 0.25
"""Least share of a transfer's time that does not count as waiting. The proxy only estimates the wait."""

_FIRST_TOKEN_S = 0.0005
"""Seconds per token that the budget counts with before anything was measured."""


@dataclass(frozen=True)
class EngineSteps:
    """How the engine steps."""

    # Most prompt tokens of a step.
    max_tokens: int
    # Whether a prompt may be computed in several steps.
    chunked: bool = True
    # Most steps that are in flight.
    in_flight: int = 1
    # Data-parallel engines that step together. Each one's prompts hold up the others.
    engines: int = 1


class PromptPlacement:
    """Decides who computes a prompt. The scheduler's thread owns it.

    groups: the engine's cache groups.
    requests, blocks: answer questions about the engine's requests and KV blocks.
    settings: what the configuration says.
    steps: how the engine steps.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        requests: EngineRequests,
        blocks: EngineBlocks,
        settings: ConnectorConfig,
        steps: EngineSteps,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = list(groups)
        self._requests = requests
        self._blocks = blocks
        self._settings = settings
        self._engine = steps
        self._clock = clock
        self._budget = TimeBudget(settings.decode_prompt_share / steps.engines, clock())
        self._steps = StepTimes(steps.in_flight)
        # Seconds of a step that computes prompt tokens, by their number; of one that computes none; and from issuing a
        # ticket until its KV is there, without the queue for prefill, by tokens to compute.
        self._here, self._idle, self._there = CostLine(), CostLine(), CostLine()
        # Most prompt tokens of a step.
        self._largest = RecentLargest()
        # Requests whose prompt this engine computes now, by id.
        self._computing: dict[str, ScheduledRequest] = {}

    @property
    def computes_no_prompt(self) -> bool:
        """Whether decode computes no prompt whatever happens."""
        return self._settings.who_computes == "never"

    @owned
    def decide(self, request: ScheduledRequest, num_computed_tokens: int, kv_lost: bool = False) -> Decision:
        """Decides for a request that asks for a prefill. Has no side effects.

        `num_computed_tokens`: how many of the prompt's tokens the engine takes from its prefix cache.
        `kv_lost`: whether prefill was asked, and its KV did not arrive.
        """
        if self.computes_no_prompt:
            if request.num_tokens - num_computed_tokens <= 1:  # what is left is a decode step
                return Decision(True, Reason.CACHED)
            if kv_lost:
                return Decision(False, Reason.KV_LOST)
            return Decision(False, Reason.PREEMPTED if request.num_output_tokens else Reason.POLICY)
        if request.num_output_tokens:
            return Decision(True, Reason.PREEMPTED)
        if request.skip_reading_prefix_cache:
            return Decision(True, Reason.PROMPT_LOGPROBS)
        if is_cached(request, num_computed_tokens, self._groups, self._blocks):
            return Decision(True, Reason.CACHED)
        params, tokens = request.kv_transfer_params, request.num_prompt_tokens - num_computed_tokens
        wish, is_allowed = params.get(WHO_COMPUTES), self._is_allowed(tokens)
        if self._settings.who_computes == "prefill":
            if wish == BY_DECODE and is_allowed:
                return Decision(True, Reason.REQUESTED)
            return Decision(False, Reason.POLICY)
        if params.get(PREFILL_AVAILABLE) is False and is_allowed:
            return Decision(True, Reason.NO_PREFILL)
        if wish == BY_PREFILL:
            return Decision(False, Reason.REQUESTED)
        if wish == BY_DECODE and is_allowed:
            return Decision(True, Reason.REQUESTED)
        return self._weighed(request, tokens)

    def _is_allowed(self, tokens: int) -> bool:
        """Whether decode may compute so many tokens where it must or is asked to."""
        # A prompt that has to fit a step beside others would hold up all behind it.
        fits = self._engine.chunked or tokens <= self._engine.max_tokens
        return fits and tokens <= self._settings.max_decode_prompt_tokens

    def _weighed(self, request: ScheduledRequest, tokens: int) -> Decision:
        """Decides by what the prompt costs, of which decode would have to compute `tokens`."""
        params = request.kv_transfer_params
        if self._requests.token_ids(request) is None:  # what an encoder computes is in no figure here
            return Decision(False, Reason.POLICY)
        now = self._clock()
        if not self._is_cheap(now, tokens, prefill_wait_s(params)):
            return Decision(False, Reason.LONG)
        if self._generates_for_others and not self._budget.has_any(now):
            return Decision(False, Reason.BUSY)
        return Decision(True, Reason.CHEAP)

    def _is_cheap(self, now: float, tokens: int, wait_s: float) -> bool:
        """Whether decode computes so many tokens no later than prefill would deliver them."""
        if tokens > self._engine.max_tokens:
            return False
        if (fixed := self._settings.decode_prompt_tokens) is not None:
            return tokens <= fixed
        in_step = self._backlog() + tokens
        if in_step > self._trusted(now):
            return False
        if (costs := self._costs(now)) is None:
            return in_step <= FIRST_TOKENS
        here, there = costs
        return here[0] + here[1] * in_step <= there[0] + there[1] * tokens + wait_s

    def _costs(self, now: float) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """Returns (fixed, per token) seconds of computing a prompt here, and of getting it from prefill. None if too
        little was measured lately."""
        if (here := self._here.fit(now, self._idle_s(now))) is None:
            return None
        # Prefill computes a token no slower than decode does. So long prompts, where decode gets no others from
        # prefill, do not make short ones look as if they cost nothing there.
        there = self._there.fit(now, steepest=here[1])
        return None if there is None else (here, there)

    @owned
    def threshold(self) -> int:
        """Returns the longest rest of a prompt that is cheap now, if nothing else is computed and prefill is idle."""
        if self._settings.who_computes != "auto":
            return 0
        if (fixed := self._settings.decode_prompt_tokens) is not None:
            return min(fixed, self._engine.max_tokens)
        now = self._clock()
        trusted = self._trusted(now)
        if (costs := self._costs(now)) is None:
            return min(FIRST_TOKENS, trusted)
        here, there = costs
        head_start, lost_per_token = there[0] - here[0], here[1] - there[1]
        if head_start >= lost_per_token * trusted:
            return trusted
        return max(0, int(head_start / lost_per_token)) if lost_per_token > 0 else 0

    @owned
    def computes(self, request: ScheduledRequest) -> None:
        """The engine computes the request's prompt, or what was lost of it, from the next step on."""
        self._computing[request.request_id] = request

    @owned
    def charge(self, tokens: int) -> None:
        """Decode is to compute `tokens` of a prompt, as decided. Call it before `computes`."""
        if not self._generates_for_others:
            return
        now = self._clock()
        if (here := self._here.fit(now, self._idle_s(now))) is None:
            seconds = _FIRST_TOKEN_S * tokens
        elif self._backlog():  # it joins a step that computes prompts
            seconds = here[1] * tokens
        else:
            seconds = max(0.0, here[0] + here[1] * tokens - (self._idle_s(now) or 0.0))
        self._budget.spend(now, seconds)

    @owned
    def step_built(self, scheduled: Mapping[str, int]) -> None:
        """The next step computes so many tokens of each request. Measures earlier steps."""
        prompt_tokens = 0
        for request_id in [each for each in self._computing if each in scheduled]:
            left = _left(self._computing[request_id])
            prompt_tokens += min(left, scheduled[request_id])
            if left <= scheduled[request_id]:
                del self._computing[request_id]
        now = self._clock()
        if (measured := self._steps.built(now, scheduled.keys(), prompt_tokens)) is None:
            return
        tokens, seconds = measured
        if tokens:
            self._here.add(now, tokens, seconds)
            self._largest.add(now, tokens)
        else:
            self._idle.add(now, 0, seconds)

    @owned
    def delivered(self, tokens: int, seconds: float, waited_s: float) -> None:
        """Prefill delivered a prompt's KV, `seconds` after its ticket was issued.

        `waited_s`: how long it was to wait in prefill's queue, as the proxy said then.
        """
        self._there.add(self._clock(), tokens, max(seconds - waited_s, _LEAST_SHARE * seconds))

    @owned
    def ended(self, request_id: str) -> None:
        """A request has ended."""
        self._computing.pop(request_id, None)
        self._steps.ended(request_id)

    @property
    def _generates_for_others(self) -> bool:
        return self._engine.engines > 1 or bool(self._steps.alive)

    def _backlog(self) -> int:
        """Prompt tokens that the engine computes already, or is about to."""
        return sum(_left(request) for request in self._computing.values())

    def _trusted(self, now: float) -> int:
        """Most prompt tokens of a step that the figures tell anything about."""
        return min(self._engine.max_tokens, max(FIRST_TOKENS, 2 * self._largest.get(now)))

    def _idle_s(self, now: float) -> float | None:
        """Seconds of a step that computes no prompt tokens. None if none was measured lately."""
        fit = self._idle.fit(now)
        return None if fit is None else fit[0]


def prefill_wait_s(params: Mapping[str, Any]) -> float:
    """Returns how long the prompt would wait in prefill's queue, as the proxy says in `kv_transfer_params`. 0 if it
    says nothing, or nothing that makes sense."""
    wait_s = params.get(PREFILL_WAIT_S)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= _LONGEST_WAIT_S:
        return 0.0
    return float(wait_s)


def _left(request: ScheduledRequest) -> int:
    """How many tokens that the request has are not computed."""
    return max(0, request.num_tokens - request.num_computed_tokens)


def is_cached(
    request: ScheduledRequest, num_computed_tokens: int, groups: Sequence[CacheGroup], blocks: EngineBlocks
) -> bool:
    """Whether decode's prefix cache has the whole prompt.

    `num_computed_tokens`: how many of the prompt's tokens the engine takes from its prefix cache.

    The engine never takes all of a prompt from its cache, since it needs the last token's logits. So the whole prompt
    counts as cached in two cases:

    - Only the last token is left.
    - The prompt ends with a block, and the cache has the blocks that the engine computes once more: the last one, or
      the last two with an EAGLE head.
    """
    prompt = request.num_prompt_tokens
    if prompt - num_computed_tokens <= 1:
        return True
    # Windows are left out if there are other groups. For a window, the engine keeps the blocks that the tokens after a
    # hit see, and not the prompt's last one. These are there, or the hit would end earlier. States have no prefix
    # cache.
    tokens = [(index, group) for index, group in enumerate(groups) if isinstance(group, TokenGroup)]
    decisive = [(index, group) for index, group in tokens if not group.windowed] or tokens
    if not decisive:
        return False
    aligned = math.lcm(*(group.span for _, group in tokens))
    end = prompt - prompt % aligned
    if prompt - end > 1 or end - num_computed_tokens > 2 * aligned:
        return False
    return all(
        blocks.are_cached(request, index, group.span, num_computed_tokens // group.span, end // group.span)
        for index, group in decisive
    )
