# SPDX-License-Identifier: Apache-2.0
"""vLLM's requests, for the schedulers of both sides."""

import re
from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.v1.request import RequestStatus

from vllm_ascend_pd.connector.prompts import Prompts, text_alone
from vllm_ascend_pd.connector.vllm_versions import NAMES_ALL_PREEMPTED
from vllm_ascend_pd.core.prompt_digest import NamesPrompt, PromptDigest

if TYPE_CHECKING:
    from vllm.v1.request import Request

# vLLM names child `i` of a request with n > 1 `i_<id>`, and appends 8 random characters to every id.
_CHILD_PREFIX = re.compile(r"^\d+_(?=(cmpl|chatcmpl|resp)-)")
# The API names prompt `i` of a list `cmpl-<id>-<i>`.
_PROMPT_SUFFIX = re.compile(r"(?<=.)-\d+$")
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


class VllmRequests:
    """Implements `EngineRequests`."""

    def __init__(self, prompts: Prompts, names_all_preempted: bool = NAMES_ALL_PREEMPTED) -> None:
        self._prompts = prompts
        self.names_all_preempted = names_all_preempted

    def external_id(self, request: "Request") -> str:
        return external_request_id(request.request_id)

    def shared_id(self, request: "Request") -> str:
        external = external_request_id(request.request_id)
        return _PROMPT_SUFFIX.sub("", external) if external.startswith("cmpl-") else external

    def was_aborted(self, request: "Request") -> bool:
        return request.status is RequestStatus.FINISHED_ABORTED

    def ended_in_error(self, request: "Request") -> bool:
        return request.status is RequestStatus.FINISHED_ERROR

    def preemptions(self, request: "Request") -> tuple[int, bool]:
        return request.num_preemptions, request.status is RequestStatus.PREEMPTED

    # vLLM keeps a request's cached tokens in `Request.prefill_stats`, until it hands them out with the first token as
    # `usage`. It counts whatever a connector delivers. Here a token counts only if no engine computed it for this
    # request.

    def cached_tokens(self, request: "Request") -> int:
        """Counts this engine's prefix cache and pools that other connectors read. 0 once the first token is out."""
        return 0 if request.prefill_stats is None else max(0, int(request.prefill_stats.num_cached_tokens))

    def set_cached_tokens(self, request: "Request", tokens: int) -> None:
        """A single engine computes at least the last token, so that one never counts."""
        if request.prefill_stats is not None:
            request.prefill_stats.num_cached_tokens = max(0, min(tokens, request.num_prompt_tokens - 1))

    def keep_own_cached_tokens(self, request: "Request") -> None:
        if (prefill := request.prefill_stats) is not None:
            prefill.set(prefill.num_prompt_tokens, prefill.num_local_cached_tokens, 0)

    def digest(self, request: "Request", num_tokens: int, ticket_id: str) -> PromptDigest:
        return self._prompts.digest(request, num_tokens, ticket_id)

    def check_prompt(self, request: "Request", named: NamesPrompt) -> None:
        self._prompts.check(request, named)

    def token_ids(self, request: "Request") -> list[int] | None:
        return text_alone(request)

    def drop_last_prompt_token(self, request: "Request") -> None:
        """vLLM's own connectors do the same where layers keep a state."""
        for tokens in (request.prompt_token_ids, request._all_token_ids):
            if tokens is not None:
                del tokens[-1:]
        if request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-1]
        request.num_prompt_tokens -= 1


def external_request_id(request_id: str) -> str:
    """Returns the id that the API server gave the request, which is how a proxy knows it."""
    external = _CHILD_PREFIX.sub("", request_id)
    if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        external = _RANDOM_SUFFIX.sub("", external)
    return external
