# SPDX-License-Identifier: Apache-2.0
"""Why some of vllm-ascend's settings are refused (vllm_ascend_pd/connector/unsupported.py): what it does under them."""

import dataclasses
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_ascend_contract import BLOCK, OURS, cache_config, connector_class, engine_config

from harness.ascend_caches import hybrid_specs
from harness.models import TINY
from harness.recipes import make_model
from vllm_ascend_pd.connector import caches as caches_module
from vllm_ascend_pd.core.config import ConfigError
from vllm_ascend_pd.core.layout import LayoutError

pytestmark = pytest.mark.npu


@pytest.fixture
def one_head_model(dense_model: Path, tmp_path: Path) -> Path:
    """With tensor parallelism 2 both ranks have its KV head, and may share the tokens."""
    config = json.loads((dense_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    return tmp_path


def refusal(config: object) -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    with pytest.raises(ConfigError) as refused:
        connector_class()(config, KVConnectorRole.SCHEDULER, cache_config()).shutdown()
    return str(refused.value)


def test_a_cache_in_nz_order(plugins: None, mla_model: Path) -> None:
    """It has the same shape as any other, but bytes that prefill writes into it would be read in another order."""
    from vllm_ascend.ascend_config import get_ascend_config

    config = engine_config(mla_model, kv_role="kv_consumer", additional_config={"enable_kv_nz": True})
    assert get_ascend_config().enable_kv_nz
    assert "enable_kv_nz" in refusal(config)


@pytest.mark.parametrize("graphs", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_full_graphs_with_decode_context_parallelism(plugins: None, one_head_model: Path, graphs: str) -> None:
    engine = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": BLOCK, "block_size": BLOCK}
    config = engine_config(one_head_model, 2, graphs=graphs, engine=engine, kv_role="kv_consumer")
    assert f"cudagraph_mode is {graphs}" in refusal(config)


def test_a_first_step_is_a_prefill_to_context_parallel_attention(plugins: None) -> None:
    """It computes one token after all others have come from prefill. By its size it gets the graph of a decode step."""
    from vllm_ascend.attention.context_parallel import attention_cp
    from vllm_ascend.attention.utils import split_decodes_and_prefills

    assert "treat_short_extends_as_decodes=False" in inspect.getsource(attention_cp.AscendAttentionCPMetadataBuilder)
    step = SimpleNamespace(
        prefill_context_parallel_metadata=None,
        max_query_len=1,
        num_reqs=3,
        num_actual_tokens=3,
        query_start_loc_cpu=torch.arange(4, dtype=torch.int32),
        is_prefilling=torch.tensor([False, False, True]),
    )
    decodes, prefills, *_ = split_decodes_and_prefills(step, decode_threshold=1, treat_short_extends_as_decodes=False)
    assert (decodes, prefills) == (2, 1), "such steps count as decode now: full graphs need not be refused"
    decodes, prefills, *_ = split_decodes_and_prefills(step, decode_threshold=1)
    assert (decodes, prefills) == (3, 0), "without context parallelism, full graphs must be refused now, too"


def test_weights_of_mla_are_dropped_on_decode(plugins: None) -> None:
    """`unsupported_weights` looks for them in this attribute, and tells sparse attention, which may, by its indexer."""
    from vllm_ascend.attention import mla_v1, sfa_v1

    drops = "self.fused_qkv_a_proj.weight = None"
    assert drops in inspect.getsource(mla_v1.AscendMLAImpl._process_weights_for_fused_mlapo), "no longer dropped"
    assert mla_v1.MLAPO_MAX_SUPPORTED_TOKENS == 1024, "the message names another --max-num-batched-tokens"
    assert "self.indexer" not in inspect.getsource(mla_v1.AscendMLAImpl)
    assert 'self.indexer = kwargs["indexer"]' in inspect.getsource(sfa_v1.AscendSFAImpl.__init__)


def test_hashes_of_hamming_sparse_attention_are_the_engines_own(plugins: None) -> None:
    from vllm_ascend.ascend_config import AscendConfig

    assert 'additional_config.get("hamming_sparse"' in inspect.getsource(AscendConfig.__init__), "it has another name"


def test_memory_of_a_sleeping_engine_is_given_away(plugins: None) -> None:
    """Caches are allocated and registered in the pool that sleeping unmaps, and no hook tells the connector. So the
    worker's own calls are followed."""
    from vllm_ascend.worker.worker import NPUWorker

    from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_33_sleep import follow_worker
    from vllm_ascend_pd.core.role import ConnectorRole

    follow_worker(ConnectorRole())
    assert all(hasattr(method, "_is_followed") for method in (NPUWorker.sleep, NPUWorker.wake_up))

    assert 'use_memory_pool(tag="kv_cache")' in inspect.getsource(NPUWorker.initialize_from_config)
    assert "connector" not in inspect.getsource(NPUWorker.sleep)


def test_compressed_caches(plugins: None) -> None:
    """DeepSeek V4's: a block of `block_size` entries is of `compress_ratio` times as many tokens."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec
    from vllm_ascend.core.single_type_kv_cache_manager import CompressAttentionManager

    spec = AscendMLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.bfloat16,
        compress_ratio=4,
        model_version="deepseek_v4",
    )
    manager = CompressAttentionManager(
        spec, BlockPool(64, False, BLOCK), enable_caching=False, kv_cache_group_id=0, scheduler_block_size=BLOCK
    )
    manager.allocate_new_blocks("request", 5 * BLOCK, 5 * BLOCK)
    assert len(manager.req_to_blocks["request"]) < 5, "blocks are of `block_size` tokens now"
    [group] = caches_module.cache_groups(cache_config(spec))
    assert (group.span, group.tokens_per_entry) == (4 * BLOCK, 4)


def test_vllm_ascends_own_kinds_of_caches_are_understood(plugins: None) -> None:
    import vllm_ascend.core.kv_cache_interface as interface
    from vllm.v1.kv_cache_interface import KVCacheSpec

    kinds = [kind for kind in vars(interface).values() if isinstance(kind, type) and issubclass(kind, KVCacheSpec)]
    own = {kind.__name__: kind for kind in kinds if kind.__module__ == interface.__name__}
    assert own.keys() == {"AscendMLAAttentionSpec", "AscendSlidingWindowMLASpec"}, "vllm-ascend has other kinds"
    of = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    sparse = {"sparse_head_dim": (512, 64, 128), "cache_sparse_li_c8": True}
    for spec in (
        own["AscendMLAAttentionSpec"](**of),
        own["AscendMLAAttentionSpec"](**of, **sparse),
        own["AscendSlidingWindowMLASpec"](**of, sliding_window=128),
    ):
        assert len(caches_module.cache_groups(cache_config(spec))) == 1


def test_the_models_here_are_not_refused(plugins: None, dense_model: Path, mla_model: Path) -> None:
    from vllm_ascend_pd.connector.unsupported import unsupported

    assert TINY.kv_heads > 1
    for model in (dense_model, mla_model):
        for role in ("kv_producer", "kv_consumer"):
            assert unsupported(engine_config(model, graphs="FULL_DECODE_ONLY", kv_role=role)) is None


def test_ascend_store_beside_states_is_refused_with_the_remedy_that_helps(plugins: None, tmp_path: Path) -> None:
    """`--no-enable-prefix-caching` does not, but to leave AscendStore out does."""
    from vllm.config import VllmConfig

    make_model("qwen3.5", tmp_path)

    def made(prefix_caching: bool, *others: str) -> VllmConfig:
        children = [{"kv_connector": name, "kv_role": "kv_producer"} for name in (OURS, *others)]
        return engine_config(
            tmp_path,
            engine={"enable_prefix_caching": prefix_caching},
            kv_connector="MultiConnector",
            kv_connector_extra_config={"connectors": children},
        )

    def describe(config: VllmConfig) -> None:
        caches_module.layer_specs(cache_config(*hybrid_specs(config, layers=2).values()), config)

    with pytest.raises(LayoutError, match=r"leave AscendStoreConnector out .* even with --no-enable-prefix-caching"):
        describe(made(False, "AscendStoreConnector"))
    describe(made(False))


def test_how_states_are_cached(plugins: None, tmp_path: Path) -> None:
    """In mode align; "all" is refused by name."""

    make_model("qwen3.5", tmp_path)
    config = engine_config(tmp_path, engine={"enable_prefix_caching": True})

    states = [spec for spec in hybrid_specs(config, layers=2).values() if hasattr(spec, "mamba_type")]
    assert states

    def described(**changes: Any) -> None:
        changed = [dataclasses.replace(spec, **changes) for spec in states]
        caches_module.layer_specs(cache_config(*changed), config)

    described()
    with pytest.raises(LayoutError, match=r"in mamba_cache_mode 'all': use --mamba-cache-mode align"):
        described(mamba_cache_mode="all")
