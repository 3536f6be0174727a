# SPDX-License-Identifier: Apache-2.0
"""How the ranks of an engine share its KV, read from vLLM's parallel configuration and groups."""

from typing import TYPE_CHECKING

from vllm.distributed import parallel_state

from vllm_ascend_pd.connector.vllm_versions import prefill_ranks_hold_copies
from vllm_ascend_pd.core import topology

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def sharding(vllm_config: "VllmConfig") -> topology.Sharding:
    """Returns how the ranks of a pipeline stage share its KV."""
    parallel = vllm_config.parallel_config
    tp, dcp = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    pcp = parallel.prefill_context_parallel_size
    interleave = parallel.cp_kv_cache_interleave_size
    if dcp > 1 and parallel.dcp_kv_cache_interleave_size > 1:  # its deprecated name, which vLLM prefers
        interleave = parallel.dcp_kv_cache_interleave_size
    if pcp > 1 and prefill_ranks_hold_copies():
        # Groups of decode context parallelism run over prefill-context-parallel ranks first.
        shares = tuple((tp_rank * pcp + pcp_rank) % dcp for pcp_rank in range(pcp) for tp_rank in range(tp))
        return topology.Sharding(tp, shares, interleave if dcp > 1 else 1)
    return topology.sharding(tp, dcp, interleave, pcp)


def place_in_stage() -> tuple[int, tuple[int, ...]]:
    """Returns this rank's number in its pipeline stage, as `Sharding` counts, and the stage's ranks in the world.

    vLLM numbers the world with tensor-parallel ranks running fastest, then those of prefill context parallelism.
    """
    tp, pcp = parallel_state.get_tp_group(), parallel_state.get_pcp_group()
    rank = pcp.rank_in_group * tp.world_size + tp.rank_in_group
    first = tp.ranks[tp.rank_in_group] - rank
    return rank, tuple(range(first, first + pcp.world_size * tp.world_size))
