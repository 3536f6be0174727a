# SPDX-License-Identifier: Apache-2.0
"""Checks a decode engine's description before anything of it is used (R6)."""

from collections.abc import Iterator

import msgspec

from vllm_ascend_pd.core.hosts import HostList, host_of, normal_host
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription
from vllm_ascend_pd.core.text import is_name
from vllm_ascend_pd.core.ticket import MAX_TP

MAX_PP = 1024


def unsound(description: EngineDescription, hosts: HostList) -> str | None:
    """Returns why nothing of `description` may be used; None if all of it may.

    Decoding has checked each field by itself. This checks how they fit together. `hosts`: where ranks may be.
    """
    tp, pp = description.tp, description.pp
    if not (0 < tp <= MAX_TP and 0 < pp <= MAX_PP):
        return f"decode's description has tp {tp}, pp {pp}"
    ranks = {(rank.pp_rank, rank.tp_rank) for rank in description.ranks}
    in_range = all(0 <= pp_rank < pp and 0 <= tp_rank < tp for pp_rank, tp_rank in ranks)
    if not in_range or not len(ranks) == len(description.ranks) == tp * pp:
        return f"decode's description has tp {tp}, pp {pp}, but not each of these ranks once"
    if not all(map(is_name, _names(description))):
        named = "an engine, a model, a setting, a transport or a layer"
        return f"decode's description has a name of {named} that is too long or unprintable"
    for rank in description.ranks:
        if (reason := _misplaced(rank, hosts) or _impossible(rank.caches, tp)) is not None:
            return f"decode's rank {(rank.pp_rank, rank.tp_rank)}: {reason}"
    return None


def _names(description: EngineDescription) -> Iterator[str]:
    yield from (description.engine_id, description.model)
    yield from (text for setting in description.settings.items() for text in setting)
    for rank in description.ranks:
        yield from msgspec.structs.astuple(rank.transport)
        yield from (tensor.layer for tensor in rank.caches.tensors)
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


def _impossible(caches: RankCaches, tp: int) -> str | None:
    """Returns what cannot be true of a rank's caches; None if everything can."""
    for geometry in caches.geometries:
        if geometry.block_bytes > geometry.block_stride:
            return f"blocks of {geometry.block_bytes} bytes, {geometry.block_stride} apart"
        if geometry.heads != max(1, geometry.total_heads // tp):
            return f"{geometry.heads} of {geometry.total_heads} KV heads with tp {tp}"
    if len(caches.by_name()) < len(caches.tensors):
        return "the same tensor of a layer twice"
    return None
