# SPDX-License-Identifier: Apache-2.0
"""Checks whether a prefill rank and a decode engine fit together: at first contact, before a byte moves."""

from collections.abc import Mapping

from vllm_ascend_pd.core.layout import Geometry, LayoutError, RankCaches
from vllm_ascend_pd.core.plan import make_route
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.core.topology import Sharding, TopologyError


def mismatch(
    caches: RankCaches, model: str, rank: int, prefill: Sharding, whole_model: bool, decode: EngineDescription
) -> str | None:
    """Returns why prefill's `rank` cannot send to `decode`, with both sides' values; None if it can.

    `whole_model`: this rank holds every layer (no pipeline parallelism), so layers that only decode has count, too.
    Draft layers may be on one side only: output is right without their KV, since drafts are verified.
    """
    if model != decode.model:
        return f"prefill serves {model}, decode serves {decode.model}"
    if (reason := _contradiction(decode)) is not None:
        return reason
    our_draft, their_draft = caches.draft, decode.draft
    theirs: dict[tuple[str, int], dict[Geometry, None]] = {}  # by tensor, from all ranks that have it
    for described in decode.ranks:
        for tensor in described.caches.tensors:
            geometry = described.caches.geometry_of(tensor)
            if geometry.is_known_to(our_draft):
                theirs.setdefault((tensor.layer, tensor.part), {})[geometry] = None
    ours = {
        name: index
        for name, index in caches.by_name().items()
        if caches.geometry_of(caches.tensors[index]).is_known_to(their_draft)
    }
    if missing := sorted(ours.keys() - theirs.keys()):
        return f"prefill has cache {missing[0]} that decode lacks ({len(ours)} against {len(theirs)} tensors)"
    if whole_model and (missing := sorted(theirs.keys() - ours.keys())):
        return f"decode has cache {missing[0]} that prefill lacks ({len(theirs)} against {len(ours)} tensors)"
    for (layer, part), index in ours.items():
        for other in theirs[layer, part]:
            if (
                reason := _unequal(caches.geometry_of(caches.tensors[index]), rank, prefill, other, decode)
            ) is not None:
                return f"{layer}: {reason}"
    return None


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


def _unequal(mine: Geometry, rank: int, prefill: Sharding, other: Geometry, decode: EngineDescription) -> str | None:
    """Returns why blocks of `mine` cannot be written into blocks of `other`; None if they can."""
    for what in ("kind", "dtype", "order", "total_heads", "head_bytes", "group", "tokens_per_entry"):
        if getattr(mine, what) != getattr(other, what):
            values = [getattr(g, what) for g in (mine, other)]
            named = [getattr(value, "value", value) for value in values]
            return f"{what} is {named[0]} on prefill, {named[1]} on decode"
    try:
        make_route(mine, rank, prefill, decode.sharding, other.block_size)
    except (LayoutError, TopologyError) as error:
        return str(error)
    return None


def _contradiction(decode: EngineDescription) -> str | None:
    """Returns where an engine's description contradicts those of its ranks; None if it does not."""
    ranks = {(rank.pp_rank, rank.tp_rank) for rank in decode.ranks}
    complete = len(decode.ranks) == decode.pp * decode.tp
    if not complete or ranks != {(pp, t) for pp in range(decode.pp) for t in range(decode.tp)}:
        return f"decode describes ranks {sorted(ranks)}, but has tp {decode.tp}, pp {decode.pp}"
    if decode.tp % decode.dcp:
        return f"decode has tp {decode.tp} and dcp {decode.dcp}, which does not divide it"
    for rank in decode.ranks:
        for geometry in rank.caches.geometries:
            if geometry.share != decode.sharding.share(rank.tp_rank):
                return (
                    f"decode's tensor-parallel rank {rank.tp_rank} describes {geometry.share} of the tokens, but "
                    f"decode has dcp {decode.dcp}, interleaved by {decode.interleave}"
                )
    return None
