# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM 0.23's scheduler on decode: output in flight of a request that was preempted does no harm, as in 0.30.

With pipeline parallelism or asynchronous scheduling, further steps are scheduled while one is in flight. So a request
may be preempted, and start again or wait for KV, before its last output arrives. Version 0.23 takes that output as one
of the request's new run. A token then counts twice, or the request ends while it is in a queue and the engine with it.

With the patch, the connector learns which steps of a request are in flight, and has it wait for them
(`VllmRequests.has_output_in_flight`). Output of steps before a reset of the prefix cache is dropped, by step. Version
0.23 drops it by counts, which are too high for drafts.
"""

from typing import Any

from vllm_ascend_pd.connector.patches import Method, replace_in_schedulers
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS, STEPS_IN_FLIGHT

_NUMBER = "number_of_step"
"""Attribute of a step, and of a scheduler: the number of its latest step."""
_DROPPED = "steps_dropped"
"""Attribute of a request: numbers of steps whose output is dropped."""


def install() -> None:
    """Patches vLLM 0.23 and all schedulers that are loaded; does nothing in 0.30. May be called again."""
    if HAS_TRANSFER_RESULTS:
        return
    replace_in_schedulers("_update_after_schedule", _numbering)
    replace_in_schedulers("reset_prefix_cache", _dropping)
    replace_in_schedulers("update_from_output", _without_dropped_outputs)


def _steps(request: Any, attribute: str) -> set[int]:
    steps: set[int] = vars(request).setdefault(attribute, set())
    return steps


def _numbering(by_vllm: Method) -> Method:
    def update_after_schedule(self: Any, scheduler_output: Any) -> None:
        if not hasattr(scheduler_output, _NUMBER):
            number = getattr(self, _NUMBER, 0) + 1
            for each in (self, scheduler_output):
                setattr(each, _NUMBER, number)
            for request_id in scheduler_output.num_scheduled_tokens:
                _steps(self.requests[request_id], STEPS_IN_FLIGHT).add(number)
        by_vllm(self, scheduler_output)

    return update_after_schedule


def _dropping(by_vllm: Method) -> Method:
    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> bool:
        running = list(self.running)
        try:
            return bool(by_vllm(self, *args, **kwargs))
        finally:
            for request in running:
                if request not in self.running:
                    _steps(request, _DROPPED).update(_steps(request, STEPS_IN_FLIGHT))
                    request.async_tokens_to_discard = 0

    return reset_prefix_cache


def _without_dropped_outputs(by_scheduler: Method) -> Method:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        number, sampled = getattr(scheduler_output, _NUMBER, 0), model_runner_output.sampled_token_ids
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue
            _steps(request, STEPS_IN_FLIGHT).discard(number)
            if number in _steps(request, _DROPPED):
                model_runner_output.prompt_logprobs_dict.pop(request_id, None)
                if sampled:
                    sampled[model_runner_output.req_id_to_index[request_id]] = []
        return by_scheduler(self, scheduler_output, model_runner_output)

    return update_from_output
