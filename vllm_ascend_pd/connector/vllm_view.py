# SPDX-License-Identifier: Apache-2.0
"""What this package asks of vLLM's requests, prompts and blocks, and what differs between 0.23.0 and later versions:
0.30.0, 0.32.0 and 0.33.0."""

import hashlib
import logging
import math
import re
import secrets
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import vllm.envs as envs
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashListWithBlockSize
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from vllm_ascend_pd.connector.weights import Adapters, unread_adapter
from vllm_ascend_pd.core.caches import CacheGroup, TokenGroup
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
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

# From 0.30 on a worker reports completions and failed requests in one object. Before, it reports completions, and
# failed blocks beside them.
HAS_TRANSFER_RESULTS = hasattr(base, "KVConnectorTransferResults")

# From 0.30 on vLLM asks the scheduler for statistics in every step. Before, it asks only if a rank has some, be they
# empty.
ASKS_SCHEDULER_FOR_STATS = hasattr(KVConnectorStats, "to_dict")


def prefill_ranks_hold_copies() -> bool:
    """Whether all ranks of prefill context parallelism hold the same KV.

    They do from 0.30 on. In 0.23 they share a request's tokens, so each has memory for its part of the longest
    request. That memory is what this function compares.
    """
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=2)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(max_model_len=2))
    one_token = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype=torch.uint8)
    return bool(one_token.max_memory_usage_bytes(config) == 2 * one_token.page_size_bytes)


STEPS_IN_FLIGHT = "steps_in_flight"
"""Attribute of a request on vLLM 0.23: numbers of the steps in flight that compute for it. A patch sets it."""


# Parts of the digest of a request's prompt.


logger = logging.getLogger(__name__)

_ADAPTER = "digest_of_adapter"
"""Attribute of a request: the digest of its LoRA adapter, once that has been read."""

_EMBEDDING_COLUMNS = 64
"""How many elements of each token's embedding the digest covers, evenly spread. 128 Ki tokens take 20 ms."""


def _digest_of_adapter(request: "Request") -> str:
    """Returns what was read for the request; "" if it has no adapter."""
    digest: str | None = getattr(request, _ADAPTER, None)
    if digest is None and request.lora_request is not None:  # it ends before its adapter was read
        return unread_adapter(request.lora_request)
    return digest or ""


def _digest_of_embeddings(ticket_id: str, embeddings: torch.Tensor) -> str:
    step = max(1, embeddings.shape[-1] // _EMBEDDING_COLUMNS)
    sampled = embeddings[..., ::step].detach().cpu().contiguous()
    shape = f"{tuple(embeddings.shape)} {embeddings.dtype}".encode()
    return digest_of(ticket_id, shape, memoryview(sampled.view(torch.uint8).numpy()).cast("B"))


# vLLM's KV blocks and prefix cache, for the schedulers of both sides.
#
# vLLM does not empty the prefix cache when weights change: it leaves that to whoever changes them. Here the cache is
# emptied as soon as a rank reports an update.
#
# Nor does vLLM notice that a LoRA adapter's files were replaced. Here requests with the new files find no KV of the old
# ones.


_HASH_BYTES = 32
_CLIENT_SALT = "cache_salt_of_client"
"""Attribute of a request whose salt was replaced: the salt before that."""
_SALT_KEY = secrets.token_bytes(_HASH_BYTES)
"""Makes salts of this module differ from any that a client can choose."""


class VllmBlocks:
    """Implements `EngineBlocks`. Used by the scheduler's thread alone. `groups`: the engine's cache groups."""

    def __init__(self, groups: Sequence[CacheGroup] = ()) -> None:
        self._groups = list(groups)
        # Blocks of all cache groups. None until vLLM hands it over.
        self._pool: BlockPool | None = None
        # Rank -> its latest weight update after which the cache was emptied.
        self._updates: dict[str, int] = {}
        # Requests that have had blocks, for as long as vLLM keeps them.
        self._with_blocks: WeakSet[Any] = WeakSet()
        self._adapters = Adapters()
        # Requests whose adapters have not been read yet, by id.
        self._unread: dict[str, Any] = {}

    def bind(self, pool: "BlockPool") -> None:
        self._pool = pool

    @property
    def num_free(self) -> int:
        assert self._pool is not None
        return int(self._pool.get_num_free_blocks())

    @property
    def weight_updates(self) -> dict[str, int]:
        return dict(self._updates)

    def arrived(self, request: Any) -> None:
        if request.lora_request is not None:
            self._adapters.read(request.lora_request)
            self._unread[request.request_id] = request
            self.take_adapters()

    def take_adapters(self) -> None:
        """Requests with other content of one name find no KV of each other."""
        for request in list(self._unread.values()):
            content = self._adapters.content(request.lora_request)
            if content is None and not request.is_finished():
                continue
            del self._unread[request.request_id]
            if content is None:
                continue
            setattr(request, _ADAPTER, content.digest)
            if content.beyond_name:
                salted = f"{request.cache_salt} {content.beyond_name}".encode()
                _replace_salt(request, hashlib.blake2b(salted, key=_SALT_KEY).hexdigest())
                request.block_hashes.clear()
                request.update_block_hashes()

    def is_ready(self, request: Any) -> bool:
        return request.request_id not in self._unread

    def allocated(self, request: Any) -> None:
        self._with_blocks.add(request)

    def weights_updated(self, updates: dict[str, int]) -> None:
        if all(self._updates.get(rank) == count for rank, count in updates.items()):
            return
        self._updates.update(updates)
        for request in self._with_blocks:
            _make_unfindable(request)
        self._with_blocks.clear()
        dropped = 0
        if self._pool is not None:
            cached = {block.block_id for block in self._pool.blocks if block.block_hash is not None}
            self._pool.evict_blocks(cached)
            dropped = len(cached)
        logger.info("weights were updated: %d blocks were dropped from the prefix cache", dropped)

    def evict(self, block_ids: Collection[int]) -> None:
        if self._pool is not None:
            self._pool.evict_blocks(set(block_ids))

    def have_prompt(self, request: Any, num_computed_tokens: int) -> bool:
        """The whole prompt counts as cached in two cases:

        - Only the last token is left.
        - The prompt ends with a block, and the cache has the blocks that vLLM computes once more: the last one, or the
          last two with an EAGLE head.
        """
        prompt = request.num_prompt_tokens
        if prompt - num_computed_tokens <= 1:
            return True
        # Windows are left out if there are other groups. For a window, vLLM keeps the blocks that the tokens after a
        # hit see, and not the prompt's last one. These are there, or the hit would end earlier. A state cannot be
        # computed once more from the one at the prompt's end, so for states the second case does not count.
        if any(group.holds_state for group in self._groups):
            return False
        tokens = [(index, group) for index, group in enumerate(self._groups) if isinstance(group, TokenGroup)]
        decisive = [(index, group) for index, group in tokens if not group.windowed] or tokens
        if not decisive:
            return False
        aligned = math.lcm(*(group.span for _, group in tokens))
        end = prompt - prompt % aligned
        if prompt - end > 1 or end - num_computed_tokens > 2 * aligned:
            return False
        return all(
            self._are_cached(request, index, group.span, num_computed_tokens // group.span, end // group.span)
            for index, group in decisive
        )

    def _are_cached(self, request: Any, group: int, span: int, first: int, stop: int) -> bool:
        """Whether the prefix cache has blocks `[first, stop)` of a cache group. `span`: tokens per block."""
        pool = self._pool
        if pool is None or span % pool.hash_block_size:  # prefix caching is off
            return False
        hashes = BlockHashListWithBlockSize(request.block_hashes, pool.hash_block_size, span)
        return stop <= len(hashes) and all(
            pool.get_cached_block(hashes[number], [group]) is not None for number in range(first, stop)
        )

    def hold(self, block_ids: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])


def _make_unfindable(request: Any) -> None:
    """Gives the request's blocks hashes that no other request has.

    Some of its blocks hold KV of the old weights. Later blocks attend to those, and vLLM will cache them. Each hash
    depends on the one before it, and the first one on the salt.
    """
    _replace_salt(request, secrets.token_hex(_HASH_BYTES))
    request.block_hashes[:] = [BlockHash(secrets.token_bytes(_HASH_BYTES)) for _ in request.block_hashes]


def _replace_salt(request: Any, salt: str) -> None:
    if not hasattr(request, _CLIENT_SALT):
        setattr(request, _CLIENT_SALT, request.cache_salt)
    request.cache_salt = salt


def salt_of_client(request: Any) -> str | None:
    """Returns the `cache_salt` that the request came with. The one that it has now may be of this module."""
    salt: str | None = getattr(request, _CLIENT_SALT, request.cache_salt)
    return salt


# vLLM's requests, for the schedulers of both sides.


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
