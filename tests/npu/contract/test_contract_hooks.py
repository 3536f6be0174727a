# SPDX-License-Identifier: Apache-2.0
"""When vllm-ascend calls its hooks for written caches. tests/npu/e2e shows that what is sent then is right."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_ascend_contract import statements_after

pytestmark = pytest.mark.npu


def test_the_event_in_attention_metadata_is_recorded_where_the_hook_is_called() -> None:
    """`reshape_cache_event`, which only sparse attention records, says nothing that the hook does not."""
    recorded = statements_after("vllm_ascend.attention.sfa_v1", "attn_metadata.reshape_cache_event.record()")
    assert recorded == ["notify_kv_cache_written(self.layer_name or '')"], "recorded elsewhere: use it"
    for module in ("attention_v1", "mla_v1", "dsa_v1"):
        found = statements_after(f"vllm_ascend.attention.{module}", "attn_metadata.reshape_cache_event.record()")
        assert found == [], f"{module} records reshape_cache_event now: see whether it is earlier than the hook"


def test_deepseek_v4_announces_a_layer_when_all_its_caches_are_written() -> None:
    """Under the name of its attention, beside which the caches are named (`connector/caches.py`)."""
    save = "maybe_save_kv_layer_to_connector(layer_name, list(kv_cache))"
    assert statements_after("vllm_ascend.attention.dsa_v1", save) == ["return output_padded"]
    for module, prefixes in {
        "ops/dsa": ("{prefix}.attn",),
        "models/deepseek_v4": ("{prefix}.swa_cache", "{prefix}.compressor", "{prefix}.indexer"),
    }.items():
        spec = find_spec("vllm_ascend")
        assert spec is not None
        assert spec.origin is not None
        source = (Path(spec.origin).parent / f"{module}.py").read_text()
        for prefix in prefixes:
            assert f'prefix=f"{prefix}"' in source, "its caches have other names: see caches_of_layers"
