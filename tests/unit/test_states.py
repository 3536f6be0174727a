# SPDX-License-Identifier: Apache-2.0
"""States of Mamba and linear attention layers between any tensor-parallel sizes, byte by byte.

tests/integration/test_push_states.py has the same states in real processes.
"""

import ctypes

import numpy as np
import pytest
import torch

from harness.states import GATED_DELTA, MAMBA1, MAMBA2, ONE_GROUP, TWO_GROUPS, States
from vllm_ascend_pd.core.caches import RegisteredCaches, StateGroup, StateSpec, describe
from vllm_ascend_pd.core.layout import LayerSpec, LayoutError
from vllm_ascend_pd.core.plan import Units, descriptors, make_mapping
from vllm_ascend_pd.core.states import LayerState, Section, partition_states
from vllm_ascend_pd.core.topology import sharding

NUM_BLOCKS = 4

TP_SIZES = [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (8, 2)]


def caches_of(
    model: States, rank: int, tp: int, conv_axis: int, together: bool
) -> tuple[RegisteredCaches, list[torch.Tensor]]:
    memory, views, spec = model.allocate(rank, tp, NUM_BLOCKS, conv_axis)
    return describe({"mamba": memory if together else tuple(views)}, {"mamba": spec}, heads_first=True), views


@pytest.mark.parametrize("together", [True, False], ids=["one tensor", "a tensor per state"])
@pytest.mark.parametrize("conv_axis", [0, 1], ids=["channels first", "channels last"])
@pytest.mark.parametrize(("p_tp", "d_tp"), TP_SIZES)
@pytest.mark.parametrize("model", [MAMBA2, ONE_GROUP, TWO_GROUPS, GATED_DELTA, MAMBA1])
@pytest.mark.parametrize(("replica_hash", "context"), [(0, False), (5, True)], ids=["", "context parallelism"])
def test_each_byte_arrives(
    model: States, p_tp: int, d_tp: int, conv_axis: int, together: bool, replica_hash: int, context: bool
) -> None:
    from_block, to_block = 2, 3
    # Context parallelism shares tokens: each rank has the states of its own heads.
    shared = [sharding(tp, 2 if tp > 1 and context else 1, 4) for tp in (p_tp, d_tp)]
    decode = [caches_of(model, rank, d_tp, conv_axis, together) for rank in range(d_tp)]
    for p_rank in range(p_tp):
        prefill, views = caches_of(model, p_rank, p_tp, conv_axis, together)
        for view, state in zip(views, model.of_rank(p_rank, p_tp, conv_axis), strict=True):
            view[from_block] = torch.from_numpy(state)
        for tensor in prefill.description.tensors:
            source = prefill.description.geometry_of(tensor)
            mapping = make_mapping(source, p_rank, *shared, 1)
            assert not mapping.is_staged
            if not mapping.serves(replica_hash):
                continue
            units = Units.of(mapping.unit, [(0, 1)])
            src = units.offsets(np.array([from_block]), source)
            for target in mapping.portions:
                theirs = decode[target.tp_rank][0].description
                remote = theirs.tensors[theirs.by_name()[tensor.layer, tensor.part]]
                geometry = theirs.geometry_of(remote)
                assert (geometry.total_heads, geometry.head_bytes) == (source.total_heads, source.head_bytes)
                dst = units.offsets(np.array([to_block]), geometry)
                copies = descriptors(target, src, dst)
                for s, d, n in zip(copies.src, copies.dst, copies.nbytes, strict=True):
                    _copy(remote.base + d, tensor.base + s, n)
    for rank, (_, views) in enumerate(decode):
        for view, state in zip(views, model.of_rank(rank, d_tp, conv_axis), strict=True):
            np.testing.assert_array_equal(view[to_block].numpy(), state)
            assert not view[[0, 1, 2]].any(), "a block that belongs to nobody"


def _copy(destination: int, source: int, nbytes: int) -> None:
    ctypes.memmove(int(destination), int(source), int(nbytes))


def test_states_of_an_unknown_kind_fit_equal_sizes_only() -> None:
    dealt = partition_states("SOMETHING_NEW", 4, None, 0, [(3, 5), (7, 2)])
    assert dealt == [(0, (Section(1, 4, 3),)), (0, (Section(1, 4, 7),))]
    # A description with 4 heads in all meets one with 2: refused as total_heads differ.
    assert partition_states("SOMETHING_NEW", 2, None, 0, [(6, 5)])[0][1][0].total_heads == 2


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ((torch.empty(4, 1, 1, 100, dtype=torch.int8),), "states of"),
        ((torch.empty(4, 3, 10), torch.empty(4, 2), torch.empty(4, 2)), "3 tensors for 2 states"),
        ((torch.empty(4, 10, 3).transpose(1, 2), torch.empty(4, 8, 4, 5)), "states of"),
    ],
)
def test_blocks_that_do_not_hold_the_states(tensors: tuple[torch.Tensor, ...], complaint: str) -> None:
    shapes = [(3, 10), (8, 4, 5)]
    states = tuple(LayerState(shape, "float32", 4, 0, (Section(shape[0], shape[0], 1),)) for shape in shapes)
    with pytest.raises(LayoutError, match=f"mamba: {complaint}"):
        describe({"mamba": tensors}, {"mamba": StateSpec(0, states)}, heads_first=True)


def test_a_layer_that_shares_anothers_cache_is_sent_once() -> None:
    memory = torch.zeros(NUM_BLOCKS, 2, 16, 8)
    specs = {name: LayerSpec(0, 16, 2, 2) for name in ("own", "sharing")} | {"elsewhere": LayerSpec(1, 16, 2, 2)}
    registered = describe({"own": memory, "sharing": memory, "elsewhere": memory}, specs, heads_first=True)
    # Another cache group has other blocks of the same memory.
    assert registered.layers == {"own": (0,), "sharing": (), "elsewhere": (1,)}
    assert [tensor.layer for tensor in registered.description.tensors] == ["own", "elsewhere"]


def test_layers_that_use_a_buffer_in_turn_are_told_from_those_that_share_a_cache() -> None:
    memory, own = torch.zeros(NUM_BLOCKS, 2, 16, 8), torch.zeros(NUM_BLOCKS, 2, 16, 8)
    caches = {"0": own, "1": memory, "2": memory, "reader": own, "3": memory}
    registered = describe(caches, dict.fromkeys(caches, LayerSpec(0, 16, 2, 2)), heads_first=True, readers={"reader"})
    assert registered.layers == {"0": (0,), "1": (1,), "2": (2,), "reader": (), "3": (3,)}
    assert registered.sharing_buffers == (("1", "2"), ("2", "3"))
    assert len(registered.regions()) == 2, "each buffer is registered once"
    twice = describe({"0": (own, own)}, {"0": LayerSpec(0, 16, 2, 2)}, heads_first=True, readers=())
    assert twice.sharing_buffers == ()


def test_a_layer_that_only_the_ranks_know_to_share_anothers_cache() -> None:
    k, v, other = (torch.zeros(NUM_BLOCKS, 16, 2, 8) for _ in range(3))
    specs = {"own": LayerSpec(0, 16, 2, 2)}
    registered = describe({"own": (k, v), "sharing": (k, v)}, specs, heads_first=False)
    assert registered.layers == {"own": (0, 1), "sharing": ()}
    with pytest.raises(LayoutError, match="stranger: registered without belonging to a cache group"):
        describe({"own": (k, v), "stranger": (k, other)}, specs, heads_first=False)


def test_blocks_that_are_several_of_the_kernels() -> None:
    """vllm-ascend's, where blocks of attention are as long as those of the states beside it."""
    kernel, per_block, heads, size = 16, 4, 2, 8
    k, v = (torch.zeros(NUM_BLOCKS * per_block, kernel, heads, size) for _ in range(2))
    registered = describe({"layer": (k, v)}, {"layer": LayerSpec(0, kernel * per_block, heads, 4)}, heads_first=False)
    [geometry] = registered.description.geometries
    assert (geometry.block_size, geometry.block_stride) == (kernel * per_block, kernel * per_block * heads * size * 4)
    assert [(t.base, t.num_blocks) for t in registered.description.tensors] == [
        (k.data_ptr(), NUM_BLOCKS),
        (v.data_ptr(), NUM_BLOCKS),
    ]
    with pytest.raises(LayoutError, match="layer: "):
        describe({"layer": k[:, ::2]}, {"layer": LayerSpec(0, kernel * per_block, heads, 4)}, heads_first=False)
    with pytest.raises(LayoutError, match="layer: "):
        describe({"layer": k[1:]}, {"layer": LayerSpec(0, kernel * per_block, heads, 4)}, heads_first=False)


def test_blocks_of_a_group_of_states() -> None:
    group = StateGroup(4)
    assert group.holding([10, 11, 12], 0, 8, last=False) == []
    assert [group.holding([10, 11, 12], 0, stop, last=True) for stop in (1, 4, 5, 12)] == [[10], [10], [11], [12]]
    assert group.ticket_block_size == 1
