# SPDX-License-Identifier: Apache-2.0
"""Which requests a decode engine refuses that computes no prompts (`who_computes: never`). Pure functions.

Such an engine has prefill compute everything: a request that was preempted, or whose KV was lost, gets another ticket.
That ticket is for the prompt and all tokens generated since, so prefill must be asked by token ids. What cannot be
asked for in this way ends with an error. It is never computed on decode.
"""

from vllm_ascend_pd.core.failure import ReceiveFailure
from vllm_ascend_pd.core.step import EngineRequests, ScheduledRequest
from vllm_ascend_pd.core.ticket import wants_ticket, wants_token_ids

MAX_LOST = 3
"""How many tickets in a row may lose their KV until the request ends. Prefill's own retries are not counted."""

_NEVER = "this decode engine computes no prompts (who_computes: never)"


def why_refused(request: ScheduledRequest) -> str | None:
    """Why a new request is refused whatever is cached; None if it is not."""
    if request.skip_reading_prefix_cache:
        return f"{_NEVER}: prompt_logprobs, or a prompt that is to be computed anew, does not work here"
    if request.resumable:
        return f"{_NEVER}: a prompt that is added to while its request runs does not work here"
    return None


def why_no_ticket(request: ScheduledRequest, requests: EngineRequests) -> str | None:
    """Why prefill cannot be asked for a request's tokens; None if it can."""
    params = request.kv_transfer_params
    if not wants_ticket(params):
        return f"{_NEVER}, and the request names no metaserver that would have prefill compute its own: use the proxy"
    if not request.num_output_tokens:
        return None
    preempted = f"{_NEVER}, and it preempted the request after {request.num_output_tokens} tokens"
    if requests.token_ids(request) is None:
        return f"{preempted}: its prompt is more than text, so prefill cannot be asked to go on from there"
    if not wants_token_ids(params):
        return f"{preempted}: its metaserver takes no token ids, so prefill cannot be asked to go on from there"
    return None


def why_not_again(cause: ReceiveFailure | None, reason: str | None, lost: int) -> str | None:
    """Why a request whose KV was lost gets no further ticket; None if it may get one.

    `cause`, `reason`: how its last transfer failed; None: it did not.
    `lost`: how many of its transfers failed in a row.
    """
    if cause is None:
        return None
    if cause is not ReceiveFailure.TRANSFER:  # no metaserver, or prefill's retries are used up
        return reason
    return None if lost < MAX_LOST else f"KV was lost {lost} times in a row, at last: {reason}"
