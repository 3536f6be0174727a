# SPDX-License-Identifier: Apache-2.0
"""Counts who computes prompts, once vLLM has allocated what was decided."""

from vllm_ascend_pd.core.observer import DecodeSchedulerObserver
from vllm_ascend_pd.core.placement import Decision, Reason
from vllm_ascend_pd.core.step import EngineRequests, ScheduledRequest
from vllm_ascend_pd.decode.who_computes import PromptPlacement

_COUNTED_AGAIN = (Reason.PREEMPTED, Reason.KV_LOST)


class CountedPrompts:
    """Remembers the latest decision until it counts, and tells the observer of it. The scheduler's thread owns it.

    vLLM asks for a decision again and again while a request has to wait for blocks. It allocates a request right after
    it has asked for it.
    """

    def __init__(self, placement: PromptPlacement, requests: EngineRequests, observer: DecodeSchedulerObserver) -> None:
        self._placement = placement
        self._requests = requests
        self._observer = observer
        # The request that vLLM asked for last, how many of its tokens vLLM has cached, and what was decided. None as a
        # decision: there was nothing to decide.
        self._asked: tuple[str, int, Decision | None] = ("", 0, None)
        # Ids of the requests that were counted and have not ended.
        self._counted: set[str] = set()

    def decided(self, request: ScheduledRequest, num_computed_tokens: int, decision: Decision | None) -> None:
        """vLLM has asked for the request."""
        self._asked = (request.request_id, num_computed_tokens, decision)

    def prefill_computes(self, request: ScheduledRequest) -> None:
        """The request is allocated, and its ticket issued."""
        if (decision := self._decision(request)) is not None:
            self._count(request, decision)

    def decode_computes(self, request: ScheduledRequest, lost: Reason | None = None) -> None:
        """The request is allocated, and runs from the next step on. `lost`: why it is computed once more, if it is."""
        decision = self._decision(request) if lost is None else Decision(True, lost)
        if decision is not None and decision.by_decode:
            self._count(request, decision)
        self._placement.computes(request)

    def ended(self, request: ScheduledRequest) -> None:
        """The request has ended."""
        self._placement.ended(request.request_id)
        self._counted.discard(request.request_id)

    def _decision(self, request: ScheduledRequest) -> Decision | None:
        request_id, _, decision = self._asked
        return decision if request_id == request.request_id else None

    def _count(self, request: ScheduledRequest, decision: Decision) -> None:
        """Counts a request once, and again whenever KV of it was lost."""
        again = decision.reason in _COUNTED_AGAIN
        if request.request_id in self._counted and not again:
            return
        self._counted.add(request.request_id)
        request_id, cached, _ = self._asked
        computed = cached if request_id == request.request_id else request.num_computed_tokens
        tokens = request.num_tokens - computed
        if decision.by_decode and not again:
            self._placement.charge(tokens)
        name = self._requests.external_id(request)
        self._observer.prompt_placed(name, decision.by_decode, decision.reason, tokens)
        self._observer.threshold_set(self._placement.threshold())
