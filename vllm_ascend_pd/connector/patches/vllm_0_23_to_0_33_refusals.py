# SPDX-License-Identifier: Apache-2.0
"""Patch of the scheduler of vLLM 0.23 to 0.33 on decode: a request that the connector refuses ends with an error.

vLLM has no such answer of a connector. It knows requests whose KV was lost, but with `kv_load_failure_policy` recompute
it ends none of them, and it must have allocated blocks for them first.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.connector.patches import replace_in_schedulers

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_TAKE = "take_requests_refused_by_connector"
"""Attribute of a block pool: returns the ids of requests that are to end. The pool is the only object of its
scheduler that a connector gets, also as one of a MultiConnector's."""


def bind_refusals(pool: "BlockPool", take: Callable[[], Iterable[str]]) -> None:
    """The scheduler with this block pool asks `take` after each step for the ids of requests that end with an error."""
    setattr(pool, _TAKE, take)


def install() -> None:
    """Patches all schedulers that are loaded. May be called again."""
    replace_in_schedulers("update_from_output", _with_refusals)


def _take_back(outputs: Any, request_id: str) -> None:
    """Takes the tokens that this step has generated for a request, which ends with an error, out of `outputs`."""
    from vllm.v1.engine import FinishReason

    for of_client in outputs.values():
        mine = [output for output in of_client.outputs if output.request_id == request_id]
        for output in mine:
            if output.finish_reason is None:
                of_client.outputs.remove(output)
            else:
                output.finish_reason, output.new_token_ids, output.new_logprobs = FinishReason.ERROR, [], None


def _with_refusals(by_scheduler: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an `update_from_output` that ends refused requests after `by_scheduler`, the scheduler's own."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = by_scheduler(self, scheduler_output, model_runner_output)
        take = getattr(self.kv_cache_manager.block_pool, _TAKE, None)
        for request_id in take() if take is not None else ():
            _take_back(outputs, request_id)
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            self.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
            ending = EngineCoreOutput(
                request_id=request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(ending)
        return outputs

    return update_from_output
