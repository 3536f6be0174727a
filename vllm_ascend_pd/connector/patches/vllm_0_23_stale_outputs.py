# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM 0.23's scheduler on decode: what a step computed for a request before a preemption is dropped.

With pipeline parallelism or asynchronous scheduling, further steps are scheduled while one is in flight. So a request
may be preempted, and start again or wait for KV, before its last output arrives. Version 0.23 takes that output as one
of the request's new run. A token then counts twice, or the request ends while it is in a queue and the engine with it.
Version 0.30 drops such output itself. The request computes its tokens again.
"""

import math
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.connector.patches import Method, replace_in_schedulers
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NUMBER = "number_of_step"
"""Attribute of a step, and of a scheduler: the number of its latest step."""
_FIRST_STEP = "first_step_of_run"
"""Attribute of a request that was preempted: the number of the first step that may compute for it since then."""


def install() -> None:
    """Patches vLLM 0.23 and all schedulers that are loaded; does nothing in 0.30. May be called again."""
    if HAS_TRANSFER_RESULTS:
        return
    replace_in_schedulers("_preempt_request", _noting_the_step)
    replace_in_schedulers("_update_after_schedule", _numbering)
    replace_in_schedulers("update_from_output", _without_stale_outputs)


def _numbering(by_vllm: Method) -> Method:
    def update_after_schedule(self: Any, scheduler_output: Any) -> None:
        number = getattr(self, _NUMBER, 0) + 1
        setattr(self, _NUMBER, number)
        setattr(scheduler_output, _NUMBER, number)
        by_vllm(self, scheduler_output)

    return update_after_schedule


def _noting_the_step(by_vllm: Method) -> Method:
    def preempt_request(self: Any, request: "Request", *args: Any) -> None:
        by_vllm(self, request, *args)
        setattr(request, _FIRST_STEP, getattr(self, _NUMBER, 0) + 1)
        request.num_output_placeholders = 0  # none of these tokens will come

    return preempt_request


def _without_stale_outputs(by_scheduler: Method) -> Method:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        number, sampled = getattr(scheduler_output, _NUMBER, math.inf), model_runner_output.sampled_token_ids
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None and number < getattr(request, _FIRST_STEP, 0):
                model_runner_output.prompt_logprobs_dict.pop(request_id, None)
                if sampled:
                    sampled[model_runner_output.req_id_to_index[request_id]] = []
        return by_scheduler(self, scheduler_output, model_runner_output)

    return update_from_output
