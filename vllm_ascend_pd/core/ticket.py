# SPDX-License-Identifier: Apache-2.0
"""A ticket: decode's promise that a prefill engine may fill these blocks of this request."""

import functools
import hashlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeGuard

import msgspec

from vllm_ascend_pd.core.hosts import authority, is_host
from vllm_ascend_pd.core.prompt_digest import PromptDigest
from vllm_ascend_pd.core.text import is_name
from vllm_ascend_pd.core.topology import Sharding, sharding

# Numbers of blocks and tokens from outside: whatever passes fits offset arithmetic and messages.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

# More ranks than any engine has: bounds what a ticket or a grant request can make us compute.
MAX_TP = 1024


WANTS_TOKEN_IDS = "wants_token_ids"
"""In the `kv_transfer_params` of a request to decode: our proxy's wish for `Ticket.token_ids`."""


class TicketError(ValueError):
    """A ticket that is malformed or does not fit the request it came with."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for what is worked out once
    """The ticket as it travels in `kv_transfer_params`, from decode over the metaserver to prefill.

    The names that vllm-ascend's layerwise connector uses keep their meaning; the last block are our own.
    Block ids are per cache group and cover the whole prompt; prefill writes tokens
    `[remote_cached_tokens, num_tokens)` only. With decode context parallelism a block id stands for a block of
    `remote_block_size` tokens on each of `remote_dcp_size` ranks, `remote_interleave_size` tokens in turn. Of draft
    layers those of `remote_draft` are written (`Geometry.draft`). `prompt` says whose KV it is for. `expires_at` (unix
    seconds) and `signature` are there when the cluster has a secret (`core/signing.py`). `token_ids` are for the
    metaserver alone, which may ask prefill by them: no digest and no signature covers them, and `parse_ticket` drops
    them.
    """

    request_id: str
    do_remote_prefill: bool = False
    do_remote_decode: bool = True
    token_ids: list[int] = []
    remote_block_ids: list[list[_Count]]
    remote_block_size: list[_Count]
    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_tp_size: int
    remote_pcp_size: int = 1
    remote_dcp_size: _Count = 1
    remote_cached_tokens: _Count

    ticket_id: str
    attempt: _Count = 0
    num_tokens: _Count
    remote_interleave_size: _Count = 1
    remote_draft: str = ""
    prompt: PromptDigest | None = None
    expires_at: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    signature: Annotated[str, msgspec.Meta(max_length=64)] = ""

    @property
    def sharding(self) -> Sharding:
        """Decode's."""
        return sharding(self.remote_tp_size, self.remote_dcp_size, self.remote_interleave_size)

    def span(self, group: int) -> int:
        """How many of the prompt's tokens one of decode's block ids stands for."""
        return self.remote_block_size[group] * self.remote_dcp_size

    @property
    def replica_hash(self) -> int:
        """A number that spreads tickets over replicas, the same on both sides."""
        return replica_hash_of(self.ticket_id)

    @property
    def endpoint(self) -> str:
        """Decode's listener."""
        return f"tcp://{authority(self.remote_host, self.remote_port)}"

    @functools.cached_property
    def issuer(self) -> tuple[str, str]:
        """The decode engine: where it is asked, and its id."""
        return (self.endpoint, self.remote_engine_id)

    def digest(self) -> str:
        """Fingerprint of all that decides which bytes go where, the same in all attempts. Without a `prompt` it is that
        of versions that know none."""
        content: tuple[object, ...] = (
            self.ticket_id,
            self.remote_engine_id,
            self.remote_cached_tokens,
            self.num_tokens,
            self.remote_block_ids,
            self.remote_block_size,
            self.remote_draft,
        )
        if self.prompt is not None:
            content += (self.prompt,)
        return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).hexdigest()


def replica_hash_of(ticket_id: str) -> int:
    return int(ticket_id[:8], 16)


def wants_ticket(params: Mapping[str, Any] | None) -> bool:
    """Whether a request on decode asks for its prompt's KV to be pushed.

    Where several connectors serve one engine, all see all requests. One for a connector that pulls says which engine
    it pulls from; vLLM's and vllm-ascend's name it `remote_engine_id`.
    """
    if not isinstance(params, Mapping):  # vLLM checks the type of `kv_transfer_params`, but not in `vllm_xargs`
        return False
    return bool(params.get("do_remote_prefill")) and params.get("remote_engine_id") is None


def wants_token_ids(params: Mapping[str, Any]) -> bool:
    """Whether the metaserver that such a request's ticket is posted to asks prefill by token ids."""
    return params.get(WANTS_TOKEN_IDS) is True


def carries_ticket(params: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Whether a request on prefill is to be pushed. One that another connector's decode will pull names no blocks."""
    if not isinstance(params, Mapping) or not params.get("do_remote_decode"):
        return False
    return any(params.get(name) is not None for name in ("ticket_id", "remote_block_ids"))


def parse_ticket(
    params: object, num_tokens: int, num_groups: int, state_groups: Collection[int] = frozenset()
) -> Ticket:
    """The ticket in a request's `kv_transfer_params`, checked. Raises TicketError naming what is wrong.

    `num_tokens`: the prompt's length; the ticket may be for one less. `num_groups`: how many cache groups this engine
    has; `state_groups`: which of them hold states, so that their tickets name one block, of one token.
    """
    try:
        ticket = msgspec.convert(params, Ticket)
    except msgspec.ValidationError as error:
        raise TicketError(f"kv_transfer_params is not a ticket: {error}") from None
    if len(ticket.ticket_id) != 32 or not set(ticket.ticket_id) <= set("0123456789abcdef"):
        raise TicketError("ticket_id is not 32 hexadecimal digits")
    if not all(map(is_name, (ticket.request_id, ticket.remote_engine_id, ticket.remote_draft))):
        raise TicketError("request_id, remote_engine_id or remote_draft is too long or has unprintable characters")
    if not is_host(ticket.remote_host):
        raise TicketError("remote_host is neither an address nor a host's name")
    if not (0 < ticket.remote_port < 65536 and 0 < ticket.remote_tp_size <= MAX_TP):
        raise TicketError("remote_port or remote_tp_size is out of range")
    if not max(1, num_tokens - 1) <= ticket.num_tokens <= num_tokens:
        raise TicketError(f"the ticket is for {ticket.num_tokens} prompt tokens, the prompt has {num_tokens}")
    if not len(ticket.remote_block_ids) == len(ticket.remote_block_size) == num_groups:
        raise TicketError(f"the ticket has {len(ticket.remote_block_ids)} cache groups, this engine has {num_groups}")
    if not 0 <= ticket.remote_cached_tokens <= ticket.num_tokens:
        raise TicketError(f"remote_cached_tokens {ticket.remote_cached_tokens} is out of range")
    if ticket.remote_pcp_size != 1:
        raise TicketError(f"remote_pcp_size is {ticket.remote_pcp_size}: prefill context parallelism on decode")
    dcp, interleave = ticket.remote_dcp_size, ticket.remote_interleave_size
    if dcp < 1 or ticket.remote_tp_size % dcp:
        raise TicketError(f"remote_dcp_size {dcp} does not divide remote_tp_size {ticket.remote_tp_size}")
    if interleave < 1:
        raise TicketError(f"remote_interleave_size {interleave} is not positive")
    if dcp > 1 and state_groups:
        raise TicketError(f"remote_dcp_size {dcp}: states are not shared by context parallelism")
    for group, (blocks, size) in enumerate(zip(ticket.remote_block_ids, ticket.remote_block_size, strict=True)):
        if group in state_groups:
            if size != 1 or len(blocks) != 1:
                raise TicketError(f"remote_block_ids: {len(blocks)} blocks of {size} for the state in group {group}")
            continue
        if size < 1 or ticket.remote_cached_tokens % (span := ticket.span(group)):
            raise TicketError(f"remote_block_size {size} does not fit remote_cached_tokens")
        if size % interleave:
            raise TicketError(f"remote_interleave_size {interleave} does not divide remote_block_size {size}")
        if len(blocks) * span < ticket.num_tokens or any(block < 0 for block in blocks):
            raise TicketError(f"remote_block_ids: {len(blocks)} blocks of {span} for {ticket.num_tokens} tokens")
    return msgspec.structs.replace(ticket, token_ids=[]) if ticket.token_ids else ticket
