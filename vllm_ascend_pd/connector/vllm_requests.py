# SPDX-License-Identifier: Apache-2.0
"""vLLM's requests, for the schedulers of both sides."""

import logging
import re
from typing import TYPE_CHECKING

import torch
import vllm.envs as envs
from vllm.v1.request import RequestStatus

from vllm_ascend_pd.connector.vllm_blocks import salt_of_client
from vllm_ascend_pd.connector.vllm_view import ADAPTER, HAS_TRANSFER_RESULTS, STEPS_IN_FLIGHT
from vllm_ascend_pd.connector.weights import unread_adapter
from vllm_ascend_pd.core.prompt_digest import (
    NamesPrompt,
    PromptDigest,
    differences,
    digest_of,
    digest_of_names,
    digest_of_tokens,
    why_media_not_compared,
)
from vllm_ascend_pd.core.ticket import TicketError

if TYPE_CHECKING:
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)

_EMBEDDING_COLUMNS = 64
"""How many elements of each token's embedding the digest covers, evenly spread. 128 Ki tokens take 20 ms."""


def _digest_of_adapter(request: "Request") -> str:
    """Returns what was read for the request; "" if it has no adapter."""
    digest: str | None = getattr(request, ADAPTER, None)
    if digest is None and request.lora_request is not None:  # it ends before its adapter was read
        return unread_adapter(request.lora_request)
    return digest or ""


def _digest_of_embeddings(ticket_id: str, embeddings: torch.Tensor) -> str:
    step = max(1, embeddings.shape[-1] // _EMBEDDING_COLUMNS)
    sampled = embeddings[..., ::step].detach().cpu().contiguous()
    shape = f"{tuple(embeddings.shape)} {embeddings.dtype}".encode()
    return digest_of(ticket_id, shape, sampled.view(torch.uint8).numpy().tobytes())


# vLLM names child `i` of a request with n > 1 `i_<id>`, and appends 8 random characters to every id.
_CHILD_PREFIX = re.compile(r"^\d+_(?=(cmpl|chatcmpl|resp)-)")
# The API names prompt `i` of a list `cmpl-<id>-<i>`.
_PROMPT_SUFFIX = re.compile(r"(?<=.)-\d+$")
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


class VllmRequests:
    """Implements `EngineRequests`: digests prompts on decode and compares them on prefill, among others.

    media_hashing: how this engine hashes images, sounds and videos by content (`model.py`); "": it does not.
    allow_other_media: prefill serves images, sounds and videos that cannot be compared with decode's.
    """

    # Before 0.30 a step's output leaves out requests preempted by a prefix cache reset. vllm-ascend's
    # SchedulerDynamicBatch names none.
    names_all_preempted = HAS_TRANSFER_RESULTS

    def __init__(self, media_hashing: str = "", allow_other_media: bool = False) -> None:
        self._media_hashing = media_hashing
        self._allow_other_media = allow_other_media
        self._said_not_compared = False

    def external_id(self, request: "Request") -> str:
        return external_request_id(request.request_id)

    def shared_id(self, request: "Request") -> str:
        external = external_request_id(request.request_id)
        return _PROMPT_SUFFIX.sub("", external) if external.startswith("cmpl-") else external

    def was_aborted(self, request: "Request") -> bool:
        return request.status is RequestStatus.FINISHED_ABORTED

    def ended_in_error(self, request: "Request") -> bool:
        return request.status is RequestStatus.FINISHED_ERROR

    def has_output_in_flight(self, request: "Request") -> bool:
        """vLLM 0.30 sees to it itself."""
        return bool(getattr(request, STEPS_IN_FLIGHT, ()))

    def preemptions(self, request: "Request") -> tuple[int, bool]:
        return request.num_preemptions, request.status is RequestStatus.PREEMPTED

    def compute_again(self, request: "Request", token: int) -> None:
        request.num_computed_tokens = min(request.num_computed_tokens, token)

    # vLLM keeps a request's cached tokens in `Request.prefill_stats`, until it hands them out with the first token as
    # `usage`. It counts whatever a connector delivers. Here a token counts only if no engine computed it for this
    # request.

    def cached_tokens(self, request: "Request") -> int:
        """Counts this engine's prefix cache and pools that other connectors read. 0 once the first token is out."""
        return 0 if request.prefill_stats is None else max(0, int(request.prefill_stats.num_cached_tokens))

    def own_cached_tokens(self, request: "Request") -> int:
        return 0 if request.prefill_stats is None else request.prefill_stats.num_local_cached_tokens

    def set_cached_tokens(self, request: "Request", tokens: int) -> None:
        """A single engine computes at least the last token, so that one never counts."""
        if request.prefill_stats is not None:
            request.prefill_stats.num_cached_tokens = max(0, min(tokens, request.num_prompt_tokens - 1))

    def keep_own_cached_tokens(self, request: "Request") -> None:
        if (prefill := request.prefill_stats) is not None:
            prefill.set(prefill.num_prompt_tokens, prefill.num_local_cached_tokens, 0)

    def digest(self, request: "Request", num_tokens: int, ticket_id: str) -> PromptDigest:
        """Covers generated tokens, too, and what comes with the prompt."""
        embeddings, salt = request.prompt_embeds, salt_of_client(request)
        token_ids = None if request.prompt_token_ids is None else request.all_token_ids
        media = [name for one in request.mm_features for name in (one.modality, one.mm_hash or one.identifier)]
        compared = bool(media and self._media_hashing)
        return PromptDigest(
            tokens="" if token_ids is None else digest_of_tokens(ticket_id, token_ids[:num_tokens]),
            media=digest_of_names(ticket_id, media) if compared else "",
            media_hashing=digest_of_names(ticket_id, [self._media_hashing]) if compared else "",
            num_media=len(request.mm_features),
            embeddings="" if embeddings is None else _digest_of_embeddings(ticket_id, embeddings[:num_tokens]),
            adapter=_digest_of_adapter(request),
            salt=digest_of_names(ticket_id, [salt]) if salt else "",
        )

    def check_prompt(self, request: "Request", named: NamesPrompt) -> None:
        """A ticket of an older decode engine has no digest: it is for any prompt of its length."""
        if named.prompt is None:
            return
        ours = self.digest(request, named.num_tokens, named.ticket_id)
        if found := differences(named.prompt, ours):
            raise TicketError("; ".join(found))
        why = why_media_not_compared(named.prompt, ours)
        if why is None:
            return
        not_compared = f"images, sounds and videos cannot be compared with decode's: {why}"
        if not self._allow_other_media:
            raise TicketError(f"{not_compared}, or set allow_other_model on prefill")
        if not self._said_not_compared:
            self._said_not_compared = True
            logger.warning("%s: allow_other_model is set, so answers may be wrong", not_compared)

    def token_ids(self, request: "Request") -> list[int] | None:
        if request.mm_features or request.prompt_embeds is not None or request.prompt_token_ids is None:
            return None
        token_ids: list[int] = request.all_token_ids[:] if request.num_output_tokens else request.prompt_token_ids
        return token_ids

    def drop_last_prompt_token(self, request: "Request") -> None:
        """vLLM's own connectors do the same where layers keep a state."""
        for tokens in (request.prompt_token_ids, request._all_token_ids):
            if tokens is not None:
                del tokens[-1:]
        if request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-1]
        if (are_token_ids := getattr(request, "prompt_is_token_ids", None)) is not None:  # not in 0.23
            request.prompt_is_token_ids = are_token_ids[:-1]
        request.num_prompt_tokens -= 1
        if request.block_hashes:  # the last one may cover that token
            request.block_hashes.pop()
            request.update_block_hashes()


def external_request_id(request_id: str) -> str:
    """Returns the id that the API server gave the request, which is how a proxy knows it."""
    external = _CHILD_PREFIX.sub("", request_id)
    if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        external = _RANDOM_SUFFIX.sub("", external)
    return external
