# SPDX-License-Identifier: Apache-2.0
"""The slots that vllm-ascend's block table gives to the tokens of a rank of context parallelism."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_ascend.worker.block_table import BlockTable

from vllm_ascend_pd.core.layout import Geometry, Order
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
