# SPDX-License-Identifier: Apache-2.0
"""Checks whether a prefill rank and a decode engine fit together: at first contact, before a byte moves."""

import logging
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from vllm_ascend_pd.core.bounds import MAX_BLOCK_KINDS
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.hosts import HostList, host_of, normal_host
from vllm_ascend_pd.core.layout import BlockKind, CacheTensor, Geometry, LayoutError, RankCaches, TokenShare
from vllm_ascend_pd.core.plan import make_route
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription, TransportInfo
from vllm_ascend_pd.core.text import is_name, one_line
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import RankInfo, Sharding, TopologyError, held


def mismatch(caches: RankCaches, rank_info: RankInfo, decode: EngineDescription) -> str | None:
    """Returns why a prefill rank cannot send to `decode`, with both sides' values; None if it can.

    Without pipeline parallelism the rank holds every layer, so layers that only decode has count, too.
    Draft layers may be on one side only: output is right without their KV, since drafts are verified.
    """
    if rank_info.model != decode.model:
        return f"prefill serves {rank_info.model}, decode serves {decode.model}"
    our_draft, their_draft = caches.draft, decode.draft
    # By tensor, from all ranks that have it.
    theirs: dict[tuple[str, int], dict[Geometry, None]] = {}
    scales: dict[tuple[str, int], set[str]] = {}
    for described in decode.ranks:
        for tensor in described.caches.tensors:
            geometry = described.caches.geometry_of(tensor)
            if geometry.is_known_to(our_draft):
                theirs.setdefault((tensor.layer, tensor.part), {})[geometry] = None
                scales.setdefault((tensor.layer, tensor.part), set()).add(tensor.scales)
    ours = {
        name: index
        for name, index in caches.by_name().items()
        if caches.geometry_of(caches.tensors[index]).is_known_to(their_draft)
    }
    if missing := sorted(ours.keys() - theirs.keys()):
        return f"prefill has cache {missing[0]} that decode lacks ({len(ours)} against {len(theirs)} tensors)"
    if rank_info.pp == 1 and (missing := sorted(theirs.keys() - ours.keys())):
        return f"decode has cache {missing[0]} that prefill lacks ({len(theirs)} against {len(ours)} tensors)"
    # Pairs of geometries that fit. Layers share them.
    fit: set[tuple[int, Geometry]] = set()
    # Our geometries and decode's block sizes between which a route exists.
    routed: set[tuple[int, int]] = set()
    for (layer, part), index in ours.items():
        tensor = caches.tensors[index]
        for other in theirs[layer, part]:
            if (tensor.geometry, other) in fit:
                continue
            mine = caches.geometry_of(tensor)
            reason = _unequal(mine, other, decode)
            if reason is None and (route := (tensor.geometry, other.ticket_block_size(decode.dcp))) not in routed:
                reason = _unroutable(mine, rank_info, decode, route[1])
                routed.add(route)
            if reason is not None:
                return f"{layer}: {reason}"
            fit.add((tensor.geometry, other))
        if scales[layer, part] != {tensor.scales}:
            return f"{layer}: prefill and decode have other scales for KV in int8: they need the same checkpoint"
    return None


# Facts about Mooncake's engines:
#
# - Mooncake, multi_transport.cpp (`selectTransport`): a writer needs the transport that the peer's segment names, so
#   both sides use one protocol. transfer_metadata.cpp and common.h: 0.3.11 and 0.3.13 read each other's segments, and
#   the newer one writes over TCP as the older one reads.
# - CANN's HIXL, src/hixl/engine/engine_factory.cc: an engine is one of several kinds. Each kind has messages of its
#   own, so engines of different kinds do not connect.
# - HIXL, hixl_engine.cc and adxl_inner_engine.cc: AutoConnect only decides when the writer connects. The peer accepts
#   either.


def cannot_write(prefill: TransportInfo, decode: TransportInfo) -> str | None:
    """Returns why prefill's engine cannot write to decode's, with both named. None if it can, or if it is not known."""
    both = f"prefill transfers by {prefill}, decode by {decode}"
    if _differ(prefill.protocol, decode.protocol):
        return f"{both}: set transfer_protocol to the same on both sides"
    if _differ(prefill.kind, decode.kind):
        return f"{both}: engines of different kinds do not connect; install the same Mooncake and CANN on both sides"
    return None


def _differ(one: str, other: str) -> bool:
    return bool(one and other and one != other)


# A message names so many settings that differ.
_NAMED_SETTINGS = 3


def different_settings(prefill: Mapping[str, str], decode: Mapping[str, str]) -> str | None:
    """Returns which settings that change the meaning of KV differ, with both sides' values.

    Returns None if none do, or if decode does not state its settings.
    """
    if not decode:
        return None
    differ = [key for key in sorted({*prefill, *decode}) if prefill.get(key) != decode.get(key)]
    if not differ:
        return None

    def of(side: Mapping[str, str], key: str) -> str:
        return one_line(side.get(key, "not set"), 100)

    named = [f"{key} is {of(prefill, key)} on prefill, {of(decode, key)} on decode" for key in differ[:_NAMED_SETTINGS]]
    more = f" (and {len(differ) - len(named)} more)" if len(differ) > len(named) else ""
    return f"the engines compute other KV: {'; '.join(named)}{more}"


def _unequal(mine: Geometry, other: Geometry, decode: EngineDescription) -> str | None:
    """Returns why blocks of `mine` cannot be written into blocks of `other`; None if they can."""
    sent = mine.sent
    compared = ("kind", "packing", "dtype", "order", "total_heads", "head_bytes", "group", "tokens_per_entry")
    for what in (*compared, "copied") if decode.dcp > 1 else compared:
        if getattr(sent, what) != getattr(other, what):
            values = [getattr(g, what) for g in (sent, other)]
            named = [getattr(value, "value", value) for value in values]
            return f"{what} is {named[0]} on prefill, {named[1]} on decode"
    return None


def _unroutable(mine: Geometry, rank_info: RankInfo, decode: EngineDescription, d_block_size: int) -> str | None:
    """Returns why blocks of `mine` cannot go into decode's blocks of `d_block_size` tokens; None if they can."""
    try:
        make_route(mine, rank_info.rank, rank_info.sharding, decode.sharding, d_block_size)
    except (LayoutError, TopologyError) as error:
        return str(error)
    return None


# Checks a decode engine's description before anything of it is used (R6).


def unsound(description: EngineDescription, hosts: HostList) -> str | None:
    """Returns why nothing of `description` may be used; None if all of it may.

    Decoding has checked each field by itself. This checks how they fit together. `hosts`: where ranks may be.
    """
    tp, pp = description.tp, description.pp
    ranks = {(rank.pp_rank, rank.tp_rank) for rank in description.ranks}
    in_range = all(0 <= pp_rank < pp and 0 <= tp_rank < tp for pp_rank, tp_rank in ranks)
    if not in_range or not len(ranks) == len(description.ranks) == tp * pp:
        return f"decode's description has tp {tp}, pp {pp}, but not each of these ranks once"
    if tp % description.dcp:
        return f"decode has tp {tp} and dcp {description.dcp}, which does not divide it"
    if not all(map(is_name, _names(description))):
        named = "an engine, a model, a setting, a transport or a layer"
        return f"decode's description has a name of {named} that is too long or unprintable"
    geometries = (geometry for rank in description.ranks for geometry in rank.caches.geometries)
    if (kinds := len({(geometry.group, geometry.block_size) for geometry in geometries})) > MAX_BLOCK_KINDS:
        return f"decode's description has {kinds} pairs of cache group and block size, {MAX_BLOCK_KINDS} at most"
    for rank in description.ranks:
        if (reason := _misplaced(rank, hosts) or _impossible(rank, description.sharding)) is not None:
            return f"decode's rank {(rank.pp_rank, rank.tp_rank)}: {reason}"
    return None


def _names(description: EngineDescription) -> Iterator[str]:
    yield from (description.engine_id, description.model)
    yield from (text for setting in description.settings.items() for text in setting)
    for rank in description.ranks:
        yield from msgspec.structs.astuple(rank.transport)
        yield from (name for tensor in rank.caches.tensors for name in (tensor.layer, tensor.scales))
        for geometry in rank.caches.geometries:
            yield from (geometry.dtype, geometry.draft)


def _misplaced(rank: RankDescription, hosts: HostList) -> str | None:
    """Returns what is wrong with a rank's two addresses, which must be on one admitted host; None if nothing is."""
    try:
        control, session = host_of(rank.control), host_of(rank.session)
    except ValueError as error:
        return str(error)
    if not rank.control.startswith("tcp://"):
        return "its control address is not tcp://host:port"
    if normal_host(control) != normal_host(session):
        return "its control address and its session are on different hosts"
    return hosts.refusal(control)


def _impossible(rank: RankDescription, sharding: Sharding) -> str | None:
    """Returns what cannot be true of a rank's caches; None if everything can. `sharding`: the engine's."""
    caches, tp = rank.caches, sharding.tp
    shares: dict[tuple[BlockKind, bool], TokenShare] = {}  # not worked out for each of many geometries
    for geometry in caches.geometries:
        kind = (geometry.kind, geometry.copied)
        if kind not in shares:
            shares[kind] = held(geometry, sharding, sharding)[1].share(rank.tp_rank)
        if geometry.share != (share := shares[kind]):
            return f"it describes {geometry.share} of the tokens, its engine {share}"
        if geometry.copied and geometry.block_size % sharding.parts:
            return f"blocks of {geometry.block_size} tokens, which {sharding.parts} ranks copy"
        if geometry.block_bytes > geometry.block_stride:
            return f"blocks of {geometry.block_bytes} bytes, {geometry.block_stride} apart"
        if geometry.heads != max(1, geometry.total_heads // tp):
            return f"{geometry.heads} of {geometry.total_heads} KV heads with tp {tp}"
    if len(caches.by_name()) < len(caches.tensors):
        return "the same tensor of a layer twice"
    return None


def foreign(
    ticket: Ticket, description: EngineDescription, smallest: Iterable[tuple[CacheTensor, Geometry]]
) -> str | None:
    """Returns why `ticket` cannot come from the engine that described itself (R6); None if it can.

    `smallest`: the tensors with the fewest blocks, one of each cache group and block size.
    """
    if ticket.remote_tp_size != description.tp:
        return f"the ticket says decode's tp is {ticket.remote_tp_size}, decode says {description.tp}"
    if ticket.sharding != description.sharding:
        return (
            f"the ticket says decode's dcp is {ticket.remote_dcp_size}, interleaved by "
            f"{ticket.remote_interleave_size}; decode says {description.dcp}, by {description.interleave}"
        )
    highest = [max(blocks, default=-1) for blocks in ticket.remote_block_ids]
    for tensor, geometry in smallest:
        group = geometry.group
        if group >= len(highest) or highest[group] >= tensor.num_blocks:
            return f"the ticket names blocks that {tensor.layer} on decode does not have"
        if ticket.remote_block_size[group] != (size := geometry.ticket_block_size(description.dcp)):
            return f"the ticket says decode's block size is {ticket.remote_block_size[group]}, decode says {size}"
    return None


# Checks whether a prefill rank and a decode engine are configured so that the rank may send to it.

logger = logging.getLogger(__name__)


def misfit(
    rank_info: RankInfo,
    config: ConnectorConfig,
    caches: RankCaches,
    transport: TransportInfo,
    description: EngineDescription,
) -> str | None:
    """Returns why this prefill rank cannot send to the decode engine that described itself, None if it can.

    Warns of differences that are allowed but cost something.
    """
    if description.draft not in ("", rank_info.draft):
        logger.warning(
            "decode engine %s drafts with %s, prefill with %s: the draft's KV of prompts is not sent, and fewer of "
            "its tokens will be accepted",
            description.engine_id,
            description.draft,
            rank_info.draft or "no layers of its own",
        )
    if (reason := mismatch(caches, rank_info, description)) is not None:
        return reason
    for rank in description.ranks:
        if (reason := cannot_write(transport, rank.transport)) is not None:
            return reason
    different = different_settings(rank_info.settings, description.settings)
    if different is not None and config.allow_other_model:
        logger.warning(
            "decode engine %s: %s: allow_other_model is set, so answers may be wrong",
            description.engine_id,
            different,
        )
        return None
    return different
