# SPDX-License-Identifier: Apache-2.0
"""Checks a decode engine's description before anything of it is used (R6), and that tickets name what it has."""

from collections.abc import Iterable, Iterator

import msgspec

from vllm_ascend_pd.core.bounds import MAX_BLOCK_KINDS
from vllm_ascend_pd.core.hosts import HostList, host_of, normal_host
from vllm_ascend_pd.core.layout import BlockKind, CacheTensor, Geometry, TokenShare
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription
from vllm_ascend_pd.core.text import is_name
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import Sharding, held


def why_unsound(description: EngineDescription, hosts: HostList) -> str | None:
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


def why_foreign(
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
