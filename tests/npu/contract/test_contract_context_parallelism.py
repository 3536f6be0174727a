# SPDX-License-Identifier: Apache-2.0
"""The slots that vllm-ascend gives to the tokens of a rank of context parallelism."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_ascend.worker.block_table import BlockTable

from harness.ascend_caches import sparse_spec
from vllm_ascend_pd.connector import caches
from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.core.layout import Geometry, LayerSpec, Order
from vllm_ascend_pd.core.plan import Units
from vllm_ascend_pd.core.topology import sharding

pytestmark = pytest.mark.npu

BLOCKS = [7, 3, 9, 4]
BLOCK = 16


def slots(tokens: int, tp: int, dcp: int, pcp: int, interleave: int, rank: int) -> list[int]:
    """Returns the slot of each token of a request with `BLOCKS`; -1 for tokens that other ranks hold.

    It calls the method alone, because the rest of a block table needs parallel groups.
    """
    table = BlockTable.__new__(BlockTable)
    vars(table).update(
        pcp_world_size=pcp,
        pcp_rank=rank // tp,
        dcp_world_size=dcp,
        dcp_rank=rank % tp % dcp,
        cp_kv_cache_interleave_size=interleave,
        physical_block_size=BLOCK,
        block_size=BLOCK,
        blocks_per_phys_block=1,
        max_num_blocks_per_req=len(BLOCKS),
        block_table=SimpleNamespace(cpu=torch.tensor([BLOCKS], dtype=torch.int32)),
        slot_mapping=SimpleNamespace(cpu=torch.full((tokens,), -2)),
    )
    table._compute_pcp_dcp_slot_mapping(torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens))
    return table.slot_mapping.cpu.tolist()


@pytest.mark.parametrize("interleave", [1, 4, BLOCK])
@pytest.mark.parametrize(("tp", "dcp", "pcp"), [(4, 2, 1), (2, 2, 1), (1, 1, 2), (2, 2, 2), (2, 1, 3)])
def test_slots_are_where_the_plan_reads_and_writes(tp: int, dcp: int, pcp: int, interleave: int) -> None:
    dealt = sharding(tp, dcp, interleave, pcp)
    for rank in range(tp * pcp):
        share = dealt.share(rank)
        # A byte per token: offsets are slots.
        geometry = Geometry(0, Order.TOKEN_MAJOR, "int8", BLOCK, BLOCK, 1, 1, 1, share=share)
        tokens = 3 * geometry.span + 5
        units = Units.of(1, [(0, tokens)])
        held = units.cut(units.held(share))
        ours = np.full(tokens, -1)
        ours[held.tokens] = held.offsets(held.blocks([np.array(BLOCKS)], [0], geometry.span), geometry)
        assert slots(tokens, tp, dcp, pcp, interleave, rank) == ours.tolist()


@pytest.mark.parametrize("kernel_block", [BLOCK, BLOCK // 2])
def test_the_index_of_sparse_attention_is_whole_on_each_rank(kernel_block: int) -> None:
    """The two methods of its builder need no more than this."""
    import vllm_ascend.ops  # noqa: F401  # the module below imports it in a circle otherwise
    from vllm_ascend.attention.context_parallel.sfa_cp import AscendSFADCPMetadataBuilder

    dcp, tokens, pieces = 2, 3 * 2 * BLOCK + 5, BLOCK // kernel_block
    columns = len(BLOCKS) * pieces
    builder = AscendSFADCPMetadataBuilder.__new__(AscendSFADCPMetadataBuilder)
    vars(builder).update(
        pcp_size=1,
        dcp_size=dcp,
        device="cpu",
        blocks_per_phys_block=pieces,
        replicated_view_block_size=kernel_block,
        block_table_replicated_view_buf=torch.empty((1, columns * dcp), dtype=torch.int32),
        arange_buffer=torch.arange(columns * dcp, dtype=torch.int32),
        slot_mapping_replicated_view_buf=torch.empty(tokens, dtype=torch.int32),
    )
    table = torch.tensor([[block * pieces + piece for block in BLOCKS for piece in range(pieces)]], dtype=torch.int32)
    step = SimpleNamespace(
        num_reqs=1,
        num_input_tokens=tokens,
        num_actual_tokens=tokens,
        block_table_tensor=table,
        query_start_loc=torch.tensor([0, tokens]),
        positions=torch.arange(tokens),
    )
    view = builder._build_block_table_replicated_view(table, torch.tensor([tokens]))
    theirs = builder._build_slot_mapping_replicated_view(step, view).tolist()
    spec = sparse_spec(BLOCK, packed=False, index=True, index_int8=False)
    spec = replace(spec, sfa_dcp_replicated_indexer_size=dcp)
    described = caches.index_of_sparse(spec)
    assert described == 2
    of = LayerSpec(0, BLOCK, 1, 1, share=sharding(2, 2, BLOCK).share(1), copied_from=described, copies=dcp)
    index = torch.empty(10 * dcp, BLOCK, 1, 1, dtype=torch.int8)
    parts = (torch.empty(10, BLOCK, 1, 1), torch.empty(10, BLOCK, 1, 1), index)
    geometry = describe({"layer": parts}, {"layer": of}, heads_first=False).description.geometries[-1]
    units = Units.of(1, [(0, tokens)])
    assert units.offsets(units.blocks([BLOCKS], [0], dcp * BLOCK), geometry).tolist() == theirs
