# SPDX-License-Identifier: Apache-2.0
"""How the connector reads vLLM's context parallelism: the numbers of ranks, and unsupported combinations."""

import multiprocessing
import os
import traceback
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from harness.connectors import caches_of
from harness.ports import reserve_port
from harness.rank_hosts import Rank
from vllm_ascend_pd.connector import caches, setup, vllm_view
from vllm_ascend_pd.core.caches import StateGroup, TokenGroup
from vllm_ascend_pd.core.layout import LayoutError
from vllm_ascend_pd.core.topology import Sharding, sharding


def parallel(tp: int, dcp: int = 1, pcp: int = 1, interleave: int = 16) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        prefill_context_parallel_size=pcp,
        cp_kv_cache_interleave_size=interleave,
    )


def read(config: ParallelConfig) -> Sharding:
    return setup.sharding(SimpleNamespace(parallel_config=config))  # type: ignore[arg-type]


def place(sizes: dict[str, int], rank: int, world: int, init: str) -> tuple[int, tuple[int, ...], int, int]:
    """Returns our view of a rank in vLLM's own parallel groups (rank in the stage, ranks of the stage), and its rank in
    each context parallelism."""
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(world, rank, init, rank, "gloo")
        tp, dcp, pcp = (sizes[name] for name in ("tp", "dcp", "pcp"))
        parallel_state.initialize_model_parallel(
            tp,
            world // (tp * pcp),
            prefill_context_model_parallel_size=pcp,
            decode_context_model_parallel_size=dcp,
        )
    found = (
        *setup.place_in_stage(),
        parallel_state.get_dcp_group().rank_in_group,
        parallel_state.get_pcp_group().rank_in_group,
    )
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    return found


class Forking:
    """A process that imports vLLM once, and runs ranks in forks of it."""

    def places(self, *ranks: tuple[Any, ...]) -> list[Any]:
        """Returns each rank's `place`. Raises EOFError if one has none."""
        pipes = []
        for rank in ranks:
            ours, theirs = multiprocessing.Pipe(duplex=False)
            if os.fork() == 0:
                try:
                    theirs.send(place(*rank))
                except Exception:  # noqa: BLE001 - the test gets an EOFError
                    traceback.print_exc()
                finally:
                    os._exit(0)
            theirs.close()
            pipes.append(ours)
        return [pipe.recv() for pipe in pipes]

    def stop(self, reusable: bool) -> list[str]:
        return []


# What both versions of vLLM allow: with prefill context parallelism, 0.32 wants decode's to be of its size.
SIZES = {
    "TP4_DCP2": {"tp": 4, "dcp": 2, "pcp": 1},
    "PP2_TP1_PCP2": {"tp": 1, "dcp": 1, "pcp": 2},
    "TP2_PCP2_DCP2": {"tp": 2, "dcp": 2, "pcp": 2},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_ranks_hold_the_tokens_that_vllm_gives_them(sizes: dict[str, int]) -> None:
    """Real processes with vLLM's own groups. A block table deals out tokens by rank in those of decode context
    parallelism; before 0.32 by the rank in prefill's first."""
    world, dealt = 4, read(parallel(**sizes))
    init = f"tcp://127.0.0.1:{reserve_port()}"
    forking = Rank(Forking, device="cpu")
    forking.receive(120.0)
    places = forking.call("places", *((sizes, rank, world, init) for rank in range(world)))
    forking.stop()
    assert forking.stopped() == []
    stage = sizes["tp"] * sizes["pcp"]
    for number, (place, stage_ranks, dcp_rank, pcp_rank) in enumerate(places):
        assert stage_ranks[place] == number
        assert stage_ranks == tuple(range(number - number % stage, number - number % stage + stage))
        copies = vllm_view.prefill_ranks_hold_copies()
        assert dealt.shares[place] == (dcp_rank if copies else pcp_rank * sizes["dcp"] + dcp_rank)


def test_interleaving() -> None:
    assert read(parallel(4, dcp=2)) == sharding(4, 2, 16)
    assert read(parallel(4)) == sharding(4)
    deprecated = parallel(4, dcp=2)
    deprecated.dcp_kv_cache_interleave_size = 8
    assert read(deprecated) == sharding(4, 2, 8)


def spec(**fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, **fields)


def test_a_block_id_stands_for_a_block_on_each_rank() -> None:
    assert caches.cache_groups(caches_of(spec()), 2) == [TokenGroup(16, 2)]
    assert caches.cache_groups(caches_of(spec())) == [TokenGroup(16)]


STATE = MambaSpec(block_size=64, shapes=((3, 8), (4, 4, 4)), dtypes=(torch.float32, torch.float32))


def test_caches_that_ranks_hold_copies_of() -> None:
    assert caches.cache_groups(caches_of(spec(), STATE), 2) == [TokenGroup(16, 2), StateGroup(64)]
    if "dcp_sharded" in {field.name for field in fields(FullAttentionSpec)}:  # from 0.32 on: draft models' copies
        with pytest.raises(LayoutError, match=r"layer\.0: with context parallelism caches of kind FullAttentionSpec"):
            caches.cache_groups(caches_of(spec(dcp_sharded=False)), 2)


def test_windows() -> None:
    of = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
    sliding = SlidingWindowSpec(**of, sliding_window=100)
    assert [group.windowed for group in caches.cache_groups(caches_of(spec(), sliding))] == [False, True]
    local = ChunkedLocalAttentionSpec(**of, attention_chunk_size=100)
    several = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer.1": sliding})
    assert [group.windowed for group in caches.cache_groups(caches_of(local, several))] == [True, True]
