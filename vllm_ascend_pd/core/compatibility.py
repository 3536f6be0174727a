# SPDX-License-Identifier: Apache-2.0
"""Checks whether a prefill rank and a decode engine fit together: at first contact, before a byte moves."""

import logging
from collections.abc import Mapping

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.layout import Geometry, LayoutError, RankCaches
from vllm_ascend_pd.core.plan import make_mapping
from vllm_ascend_pd.core.protocol import EngineDescription, TransportInfo
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.core.topology import RankInfo, TopologyError

logger = logging.getLogger(__name__)


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
    # Our geometries and decode's block sizes between which a mapping exists.
    mapped: set[tuple[int, int]] = set()
    for (layer, part), index in ours.items():
        tensor = caches.tensors[index]
        for other in theirs[layer, part]:
            if (tensor.geometry, other) in fit:
                continue
            mine = caches.geometry_of(tensor)
            reason = _unequal(mine, other, decode)
            if reason is None and (pair := (tensor.geometry, other.ticket_block_size(decode.dcp))) not in mapped:
                reason = _unmappable(mine, rank_info, decode, pair[1])
                mapped.add(pair)
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


def _unmappable(mine: Geometry, rank_info: RankInfo, decode: EngineDescription, d_block_size: int) -> str | None:
    """Returns why blocks of `mine` cannot go into decode's blocks of `d_block_size` tokens; None if they can."""
    try:
        make_mapping(mine, rank_info.rank, rank_info.sharding, decode.sharding, d_block_size)
    except (LayoutError, TopologyError) as error:
        return str(error)
    return None


def why_misfit(
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
