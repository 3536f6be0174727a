# SPDX-License-Identifier: Apache-2.0
"""The digest of a request's prompt, and its token ids if the prompt is nothing but text."""

import logging
from typing import TYPE_CHECKING

import torch

from vllm_ascend_pd.connector.adapters import adapter_digest
from vllm_ascend_pd.connector.vllm_blocks import salt_of_client
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


class Prompts:
    """Digests prompts on decode and compares them on prefill.

    media_hashing: how this engine hashes images, sounds and videos by content (`model_summary.py`); "": it does not.
    allow_other_media: prefill serves images, sounds and videos that cannot be compared with decode's.
    """

    def __init__(self, media_hashing: str = "", allow_other_media: bool = False) -> None:
        self._media_hashing = media_hashing
        self._allow_other_media = allow_other_media
        self._said_not_compared = False

    def digest(self, request: "Request", num_tokens: int, ticket_id: str) -> PromptDigest:
        """Returns the digest of the first `num_tokens` tokens, generated ones included, and of what comes with them."""
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
            adapter=adapter_digest(request.lora_request),
            salt=digest_of_names(ticket_id, [salt]) if salt else "",
        )

    def check(self, request: "Request", named: NamesPrompt) -> None:
        """Raises TicketError if another prompt than the request's is meant, or may be, and says why.

        A ticket of an older decode engine has no digest: it is for any prompt of its length.
        """
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


def text_alone(request: "Request") -> list[int] | None:
    """Returns the prompt's token ids if the prompt is nothing but text, else None."""
    if request.mm_features or request.prompt_embeds is not None or request.prompt_token_ids is None:
        return None
    token_ids: list[int] = request.all_token_ids[:] if request.num_output_tokens else request.prompt_token_ids
    return token_ids


def _digest_of_embeddings(ticket_id: str, embeddings: torch.Tensor) -> str:
    step = max(1, embeddings.shape[-1] // _EMBEDDING_COLUMNS)
    sampled = embeddings[..., ::step].detach().cpu().contiguous()
    shape = f"{tuple(embeddings.shape)} {embeddings.dtype}".encode()
    return digest_of(ticket_id, shape, memoryview(sampled.view(torch.uint8).numpy()).cast("B"))
