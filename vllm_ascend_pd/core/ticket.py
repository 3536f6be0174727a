# SPDX-License-Identifier: Apache-2.0
"""A ticket: decode's permission for a prefill engine to fill certain blocks of one request."""

import functools
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from vllm_ascend_pd.core.bounds import MAX_BLOCK_IDS, MAX_GROUPS, MAX_TOKEN_IDS, MAX_TP
from vllm_ascend_pd.core.hosts import authority, is_host
from vllm_ascend_pd.core.prompt_digest import PromptDigest
from vllm_ascend_pd.core.secret import MAX_SIGNATURE_CHARS
from vllm_ascend_pd.core.text import NAME, is_name
from vllm_ascend_pd.core.topology import Sharding, sharding

if TYPE_CHECKING:
    from vllm_ascend_pd.core.caches import CacheGroup

# Numbers of blocks and tokens from outside. Within this range they fit offset arithmetic and messages.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Size = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
_BlockIds = Annotated[list[_Count], msgspec.Meta(max_length=MAX_BLOCK_IDS)]
_GROUPS = msgspec.Meta(max_length=MAX_GROUPS)


class TicketError(ValueError):
    """A ticket is malformed, or does not fit the request that it came with."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for cached_property
    """The ticket as `kv_transfer_params` carry it, from decode over the metaserver to prefill.

    Prefill writes the KV of tokens `[remote_cached_tokens, num_tokens)`.
    """

    # These names are vllm-ascend's layerwise connector's, and keep their meaning.

    # Decode's id of the request.
    request_id: Annotated[str, NAME]
    do_remote_prefill: bool = False
    do_remote_decode: bool = True
    # The prompt and what was generated after it, for a metaserver that asks prefill by token ids. No digest and no
    # signature covers it, and `parse_ticket` drops it.
    token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_TOKEN_IDS)] = []
    # Per cache group: decode's blocks for the whole prompt.
    remote_block_ids: Annotated[list[_BlockIds], _GROUPS]
    # Per cache group: tokens in a block on one rank.
    remote_block_size: Annotated[list[_Size], _GROUPS]
    remote_engine_id: Annotated[str, NAME]
    # Decode's listener.
    remote_host: Annotated[str, NAME]
    remote_port: Annotated[int, msgspec.Meta(gt=0, lt=65536)]
    # Decode's parallel sizes. A block id stands for a block on each of `remote_dcp_size` ranks.
    remote_tp_size: Annotated[int, msgspec.Meta(gt=0, le=MAX_TP)]
    remote_pcp_size: int = 1
    remote_dcp_size: _Size = 1
    # Tokens that decode has in its own prefix cache.
    remote_cached_tokens: _Count

    # These names are our own.

    # Drawn at random.
    ticket_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    # Tokens whose KV decode needs: all tokens of the request, or one less. These are the prompt's, unless the request
    # goes on after a preemption: then the tokens generated before it count as part of the prompt.
    num_tokens: _Count
    # Tokens in a run, as in `TokenShare`.
    remote_interleave_size: _Size = 1
    # Decode's draft model (`Geometry.draft`). Prefill writes draft layers only if it is its own, too.
    remote_draft: Annotated[str, NAME] = ""
    # The prompt that the KV is for. None from versions that do not send it.
    prompt: PromptDigest | None = None
    # An earlier ticket of the same request, whose transfer has ended: this one is for the prompt and all tokens
    # generated since. For the metaserver, so no digest and no signature covers it, and `parse_ticket` drops it.
    replaces: Annotated[str, msgspec.Meta(max_length=64)] = ""
    # The newest form of checksums that decode reads (`core/checksum.py`). Whoever changes it changes how KV is verified
    # and not whether, so no digest and no signature covers it.
    checksum_form: Annotated[int, msgspec.Meta(ge=2, lt=1 << 16)] = 2
    # Unix seconds. Set if the cluster has a secret (`core/signing.py`).
    expires_at: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    # Set if the cluster has a secret.
    signature: Annotated[str, msgspec.Meta(max_length=MAX_SIGNATURE_CHARS)] = ""

    @property
    def sharding(self) -> Sharding:
        """How decode's ranks share KV."""
        return sharding(self.remote_tp_size, self.remote_dcp_size, self.remote_interleave_size)

    def span(self, group: int) -> int:
        """Returns how many of the prompt's tokens one of decode's block ids stands for."""
        return self.remote_block_size[group] * self.remote_dcp_size

    @property
    def spans(self) -> list[int]:
        """`span` of each cache group."""
        return [self.span(group) for group in range(len(self.remote_block_size))]

    @property
    def replica_hash(self) -> int:
        """Spreads tickets over replicas. It is the same on both sides."""
        return replica_hash_of(self.ticket_id)

    @property
    def endpoint(self) -> str:
        """Address of decode's listener."""
        return f"tcp://{authority(self.remote_host, self.remote_port)}"

    @functools.cached_property
    def issuer(self) -> tuple[str, str]:
        """The decode engine: the address of its listener, and its id."""
        return (self.endpoint, self.remote_engine_id)

    def digest(self) -> str:
        """Returns a digest of everything that decides which bytes go where.

        Without a `prompt` it equals the digest of versions that have no such field.
        """
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


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """What decode posts for a prompt that prefill computes before decode has blocks for it. The ticket follows, with
    the same id, straight to the prefill engine that holds the prompt.

    It permits nothing, so it has no signature: prefill holds a prompt for whoever may ask it for one.
    """

    # As in `Ticket`.
    request_id: str
    remote_engine_id: str
    ticket_id: str
    num_tokens: int
    prompt: PromptDigest
    token_ids: list[int] = []
    do_remote_prefill: bool = False
    do_remote_decode: bool = True
    # Under which prefill holds the prompt. Drawn at random.
    transfer_id: str
    # Tells it from a ticket (`core/ticket_params.py`).
    ticket_follows: bool = True


def replica_hash_of(ticket_id: str) -> int:
    """Returns `Ticket.replica_hash` of a ticket with this id."""
    return int(ticket_id[:8], 16)


def parse_ticket(params: object, num_tokens: int, groups: Sequence["CacheGroup"]) -> Ticket:
    """Returns the ticket in a request's `kv_transfer_params`, checked.

    `num_tokens`: the prompt's length. The ticket may be for one token less.
    `groups`: this engine's cache groups. For one that holds states, a ticket names one block of one token. For
        compressed caches it names blocks for complete entries only.

    Raises TicketError, which names what is wrong.
    """
    try:
        ticket = msgspec.convert(params, Ticket)
    except msgspec.ValidationError as error:
        raise TicketError(f"kv_transfer_params is not a ticket: {error}") from None
    if not all(map(is_name, (ticket.request_id, ticket.remote_engine_id, ticket.remote_draft))):
        raise TicketError("request_id, remote_engine_id or remote_draft is too long or has unprintable characters")
    texts = [ticket.signature, *(msgspec.structs.astuple(ticket.prompt) if ticket.prompt is not None else ())]
    if not all(text.isprintable() for text in texts if isinstance(text, str)):  # half of a surrogate pair, say
        raise TicketError("signature or prompt has unprintable characters")
    if not is_host(ticket.remote_host):
        raise TicketError("remote_host is neither an address nor a host's name")
    if not max(1, num_tokens - 1) <= ticket.num_tokens <= num_tokens:
        raise TicketError(f"the ticket is for {ticket.num_tokens} prompt tokens, the prompt has {num_tokens}")
    if not len(ticket.remote_block_ids) == len(ticket.remote_block_size) == len(groups):
        raise TicketError(f"the ticket has {len(ticket.remote_block_ids)} cache groups, this engine has {len(groups)}")
    if not 0 <= ticket.remote_cached_tokens <= ticket.num_tokens:
        raise TicketError(f"remote_cached_tokens {ticket.remote_cached_tokens} is out of range")
    if ticket.remote_pcp_size != 1:
        raise TicketError(f"remote_pcp_size is {ticket.remote_pcp_size}: prefill context parallelism on decode")
    dcp, interleave = ticket.remote_dcp_size, ticket.remote_interleave_size
    if ticket.remote_tp_size % dcp:
        raise TicketError(f"remote_dcp_size {dcp} does not divide remote_tp_size {ticket.remote_tp_size}")
    named = zip(groups, ticket.remote_block_ids, ticket.remote_block_size, strict=True)
    for group, (ours, blocks, size) in enumerate(named):
        if ours.holds_state:
            if size != 1 or len(blocks) != 1:
                raise TicketError(f"remote_block_ids: {len(blocks)} blocks of {size} for the state in group {group}")
            continue
        if ticket.remote_cached_tokens % (span := ticket.span(group)):
            raise TicketError(f"remote_block_size {size} does not fit remote_cached_tokens")
        if size % interleave:
            raise TicketError(f"remote_interleave_size {interleave} does not divide remote_block_size {size}")
        per_entry = ours.tokens_per_entry
        if size % per_entry:
            raise TicketError(f"remote_block_size {size} in group {group}, which has an entry for {per_entry} tokens")
        if len(blocks) * span < ticket.num_tokens - ticket.num_tokens % per_entry:
            raise TicketError(f"remote_block_ids: {len(blocks)} blocks of {span} for {ticket.num_tokens} tokens")
    return msgspec.structs.replace(ticket, token_ids=[], replaces="") if ticket.token_ids or ticket.replaces else ticket
