# SPDX-License-Identifier: Apache-2.0
"""Who computes a prompt: decode itself, or a prefill engine. It is decided here, once per request, and nowhere else.

With `auto`, decode computes what it computes sooner than prefill would deliver it. Both times are lines through what
was measured. Three bounds hold whatever the lines say: nothing counts as cheap that is much longer than what was
measured, a cheap prompt fits one step, and a budget keeps the pace of the engine's other requests.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import TypeAlias

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.engine_view import EngineBlocks, EngineRequests, EngineSteps, ScheduledRequest
from vllm_ascend_pd.core.observer import Observer, PromptPlaced, ThresholdSet
from vllm_ascend_pd.core.reasons import Decision, Reason
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket_params import BY_DECODE, BY_PREFILL, PREFILL_AVAILABLE, WHO_COMPUTES, prefill_wait_s

FIRST_TOKENS = 64
"""Most prompt tokens that are trusted to be cheap before anything was measured. A step of so few takes hardly longer
than one that only generates, on any device."""
_FIRST_TOKEN_S = 0.0005  # per token, as the budget counts before anything was measured
_SAMPLES = 32  # so many samples are kept
_LATELY_S = 900.0  # and no longer than this, so that what is no longer measured is forgotten
_LEAST_SAMPLES = 3  # fewer tell nothing
_LEAST_S = 1e-4  # nothing that is measured here is faster; it bounds a sample's weight
_BURST_S = 0.25  # seconds that a budget saves up: a few short prompts at once
_DEEPEST_DEBT_S = 4 * _BURST_S  # most seconds that a budget may be overdrawn
_LEAST_SHARE = 0.25  # of a delivery's time that is no waiting, since the proxy only estimates the wait


Fit: TypeAlias = tuple[float, float]  # (fixed, per_token)


class CostLine:
    """Seconds as a function of tokens: `fixed + per_token * tokens`, both at least 0, fitted to the latest samples.

    A sample weighs by the inverse of its seconds, so a few very slow ones (a compilation, a stopped process) count
    little: the fit of a constant is the samples' harmonic mean.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, float]] = deque(maxlen=_SAMPLES)  # (when, tokens, seconds)
        self._largest: tuple[float, int] = (0.0, 0)  # (when, tokens)

    def add(self, now: float, tokens: int, seconds: float) -> None:
        """Adds a sample."""
        self._samples.append((now, tokens, max(seconds, _LEAST_S)))
        if tokens >= self.largest(now):
            self._largest = (now, tokens)

    def largest(self, now: float) -> int:
        """Returns the most tokens of a sample. The number falls to half in `_LATELY_S`, and further."""
        when, tokens = self._largest
        return int(tokens * 0.5 ** (max(0.0, now - when) / _LATELY_S))

    def fit(self, now: float, at_zero: Fit | None = None, steepest: float = math.inf) -> Fit | None:
        """Returns None if too little was measured lately.

        `at_zero`: the fit of what takes no tokens, which counts as one sample. Without it, `per_token` is 0 where all
        samples have the same number of tokens. `steepest`: `per_token` is no larger.
        """
        samples = [(tokens, seconds) for when, tokens, seconds in self._samples if now - when < _LATELY_S]
        if len(samples) < _LEAST_SAMPLES:
            return None
        if at_zero is not None:
            samples.append((0, at_zero[0]))
        # Weighted least squares. A weight times its seconds is 1.
        w = wx = wxx = 0.0
        for tokens, seconds in samples:
            w, wx, wxx = w + 1.0 / seconds, wx + tokens / seconds, wxx + tokens * tokens / seconds
        wy, wxy = len(samples), sum(tokens for tokens, _ in samples)
        spread = w * wxx - wx * wx
        per_token = 0.0 if spread <= 1e-9 * w * wxx else min(steepest, max(0.0, (w * wxy - wx * wy) / spread))
        fixed = (wy - per_token * wx) / w
        return (fixed, per_token) if fixed >= 0.0 else (0.0, min(steepest, wxy / wxx))


class StepTimes:
    """Measures steps by when the scheduler builds them.

    in_flight: how many steps the engine has in flight at most. It builds a step when that many before it are over but
        for the last `in_flight - 1`. So the time from step `n` to step `n + in_flight` is the time of step `n`, from
        when it was built until its tokens are there.

    While nothing runs, the engine builds no steps. Such a pause is noticed by the requests of the latest step: if all
    have ended before the next one, the engine may have waited for new ones.
    """

    def __init__(self, in_flight: int) -> None:
        # When the latest steps were built without a pause in between, and how many prompt tokens they compute.
        self._built: deque[tuple[float, int]] = deque(maxlen=in_flight + 1)
        self.alive: set[str] = set()  # requests of the latest step that have not ended

    def built(self, now: float, request_ids: Set[str], prompt_tokens: int) -> tuple[int, float] | None:
        """A step is built, with tokens of these requests. Returns (prompt tokens, seconds) of a step that is over."""
        if not self.alive or not request_ids:
            self._built.clear()
        self.alive = set(request_ids)
        if not request_ids:
            return None
        self._built.append((now, prompt_tokens))
        if len(self._built) != self._built.maxlen:
            return None
        began, tokens = self._built[0]
        return tokens, now - began


class TimeBudget:
    """Seconds that may be spent: it fills with `share` of the time that passes, up to a burst of a quarter second. What
    is spent may overdraw it, by a second at most. Then it must fill first."""

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._empty_at = now - _BURST_S / share if share > 0 else math.inf  # it fills from then on

    def has_any(self, now: float) -> bool:
        return self._empty_at < now

    def spend(self, now: float, seconds: float) -> None:
        if self._share > 0:
            empty_at = max(self._empty_at, now - _BURST_S / self._share) + seconds / self._share
            self._empty_at = min(empty_at, now + _DEEPEST_DEBT_S / self._share)


class PromptPlacement:
    """Decides who computes prompts, and counts it once vLLM has allocated what was decided.

    The scheduler's thread owns it. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        requests: EngineRequests,
        blocks: EngineBlocks,
        settings: ConnectorConfig,
        steps: EngineSteps,
        observer: Observer,
        clock: Callable[[], float] = lambda: time.monotonic(),
    ) -> None:
        self._requests = requests
        self._blocks = blocks
        self._settings = settings
        self.computes_no_prompt = settings.who_computes == "never"  # whatever happens
        self._engine = steps
        self._observer = observer
        self._clock = clock
        self._budget = TimeBudget(settings.decode_prompt_share / steps.engines, clock())
        self._steps = StepTimes(steps.in_flight)
        # Seconds of a step that computes prompt tokens, by their number; of one that computes none; and from issuing a
        # ticket until its KV is there, without the queue for prefill, by tokens to compute.
        self._here, self._idle, self._there = CostLine(), CostLine(), CostLine()
        self._computing: dict[str, ScheduledRequest] = {}  # by id: requests whose prompt this engine computes now
        # The request that vLLM asked for last, how many of its tokens vLLM has cached, and what was decided. vLLM asks
        # again and again while a request waits for blocks, and allocates a request right after it has asked for it.
        self._asked: tuple[str, int, Decision | None] = ("", 0, None)
        self._counted: set[str] = set()  # ids of the requests that were counted and have not ended

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
        if self._blocks.have_prompt(request, num_computed_tokens):
            return Decision(True, Reason.CACHED)
        params, tokens = request.kv_transfer_params, request.num_prompt_tokens - num_computed_tokens
        # A prompt that has to fit a step beside others would hold up all behind it.
        fits = self._engine.chunked or tokens <= self._engine.max_tokens
        is_allowed = fits and tokens <= self._settings.max_decode_prompt_tokens
        wish, policy = params.get(WHO_COMPUTES), self._settings.who_computes
        if policy == "auto" and params.get(PREFILL_AVAILABLE) is False and is_allowed:
            return Decision(True, Reason.NO_PREFILL)
        if wish == BY_DECODE and is_allowed:
            return Decision(True, Reason.REQUESTED)
        if policy == "prefill":
            return Decision(False, Reason.POLICY)
        if wish == BY_PREFILL:
            return Decision(False, Reason.REQUESTED)
        if self._requests.token_ids(request) is None:  # what an encoder computes is in no figure here
            return Decision(False, Reason.POLICY)
        now = self._clock()
        backlog = sum(map(_left, self._computing.values()))  # prompt tokens that are computed before these
        if tokens > self._cheap_tokens(now, backlog, prefill_wait_s(params)):
            return Decision(False, Reason.LONG)
        if self._generates_for_others and not self._budget.has_any(now):
            return Decision(False, Reason.BUSY)
        return Decision(True, Reason.CHEAP)

    @owned
    def threshold(self) -> int:
        """Returns the longest rest of a prompt that is cheap now, if nothing else is computed and prefill is idle."""
        return max(0, self._cheap_tokens(self._clock(), 0, 0.0)) if self._settings.who_computes == "auto" else 0

    def _cheap_tokens(self, now: float, backlog: int, wait_s: float) -> int:
        """Returns how many tokens decode computes, after `backlog` others, no later than prefill would deliver them
        after `wait_s` seconds in its queue. May be negative."""
        if (fixed := self._settings.decode_prompt_tokens) is not None:
            return min(fixed, self._engine.max_tokens)
        room = min(self._engine.max_tokens, max(FIRST_TOKENS, 2 * self._here.largest(now))) - backlog
        here = self._here.fit(now, self._idle.fit(now))
        # Prefill computes a token no slower than decode does. So long prompts, where decode gets no others from
        # prefill, do not make short ones look as if they cost nothing there.
        there = None if here is None else self._there.fit(now, steepest=here[1])
        if here is None or there is None:
            return min(FIRST_TOKENS - backlog, room)
        ahead_s = there[0] + wait_s - here[0] - here[1] * backlog
        lost_per_token = here[1] - there[1]
        if ahead_s >= lost_per_token * room:
            return room
        return math.floor(ahead_s / lost_per_token) if lost_per_token > 0 else 0

    @owned
    def asked(self, request: ScheduledRequest, num_computed_tokens: int, decision: Decision | None) -> None:
        """vLLM has asked for the request. `decision`: None if there was nothing to decide."""
        self._asked = (request.request_id, num_computed_tokens, decision)

    @owned
    def allocated(self, request: ScheduledRequest, by_decode: bool, lost: Reason | None = None) -> None:
        """vLLM has allocated the request, and computes it from the next step on if `by_decode`.

        Counts the request once, and again whenever KV of it was `lost`, with the reason.
        """
        if by_decode:
            self._computing[request.request_id] = request
        asked, cached, decision = self._asked
        if asked != request.request_id:
            cached, decision = request.num_computed_tokens, None
        if lost is not None:
            decision = Decision(True, lost)
        if decision is None or decision.by_decode != by_decode:
            return
        again, tokens = decision.reason in (Reason.PREEMPTED, Reason.KV_LOST), request.num_tokens - cached
        if request.request_id in self._counted and not again:
            return
        self._counted.add(request.request_id)
        if by_decode and not again and self._generates_for_others:
            self._spend(tokens)
        self._observer.on(PromptPlaced(self._requests.external_id(request), by_decode, decision.reason, tokens))
        self._observer.on(ThresholdSet(self.threshold()))

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
        if (measured := self._steps.built(now, scheduled.keys(), prompt_tokens)) is not None:
            tokens, seconds = measured
            (self._here if tokens else self._idle).add(now, tokens, seconds)

    @owned
    def delivered(self, tokens: int, seconds: float, waited_s: float) -> None:
        """Prefill delivered a prompt's KV, `seconds` after its ticket was issued.

        `waited_s`: how long it was to wait in prefill's queue, as the proxy said then.
        """
        self._there.add(self._clock(), tokens, max(seconds - waited_s, _LEAST_SHARE * seconds))

    @owned
    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._computing.pop(request_id, None)
        self._steps.alive.discard(request_id)
        self._counted.discard(request_id)

    def _spend(self, tokens: int) -> None:
        """Takes from the budget what `tokens` of a prompt cost beyond a step that computes none."""
        now = self._clock()
        idle = self._idle.fit(now)
        here = self._here.fit(now, idle)
        seconds = _FIRST_TOKEN_S * tokens if here is None else here[0] + here[1] * tokens - (idle[0] if idle else 0.0)
        self._budget.spend(now, max(0.0, seconds))

    @property
    def _generates_for_others(self) -> bool:
        return self._engine.engines > 1 or bool(self._steps.alive)


def _left(request: ScheduledRequest) -> int:
    """How many tokens that the request has are not computed."""
    return max(0, request.num_tokens - request.num_computed_tokens)
