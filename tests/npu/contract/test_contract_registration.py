# SPDX-License-Identifier: Apache-2.0
"""vLLM finds our connector beside vllm-ascend's, and calls the hooks that it has."""

import importlib.metadata
import inspect

import pytest
from vllm_ascend_contract import OURS, connector_class, our_hooks

import vllm_ascend_pd
from vllm_ascend_pd.tools.doctor.versions import NPU

pytestmark = pytest.mark.npu


def test_the_installed_vllm_ascend_is_the_one_that_is_pinned() -> None:
    from vllm_ascend import _version

    assert importlib.metadata.version("vllm-ascend") == _version.__version__ == NPU.pins["vllm-ascend"]


def test_vllm_finds_the_plugins_of_both_packages() -> None:
    general = {point.name: point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    platforms = {point.name: point.value for point in importlib.metadata.entry_points(group="vllm.platform_plugins")}
    assert general.get("vllm_ascend_pd") == "vllm_ascend_pd:register"
    assert general.get("ascend_kv_connector") == "vllm_ascend:register_connector", "vllm-ascend registers otherwise"
    assert platforms == {"ascend": "vllm_ascend:register"}, "another platform would be in use"


def test_our_connector_is_found_by_name_beside_vllm_ascends(plugins: None) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform
    from vllm_ascend.distributed.kv_transfer.ascend_multi_connector import AscendMultiConnector
    from vllm_ascend.distributed.kv_transfer.kv_p2p.mooncake_layerwise_connector import MooncakeLayerwiseConnector

    from vllm_ascend_pd.connector.connector import LayerwisePushConnector

    assert current_platform.device_type == "npu"
    found = KVConnectorFactory.get_connector_class_by_name
    assert found(OURS) is LayerwisePushConnector
    assert found("MooncakeLayerwiseConnector") is MooncakeLayerwiseConnector
    assert found("MultiConnector") is AscendMultiConnector, "vllm-ascend no longer replaces vLLM's MultiConnector"


def test_registering_twice_is_harmless(plugins: None) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    before = dict(KVConnectorFactory._registry)
    vllm_ascend_pd.register()
    vllm_ascend_pd.register()
    assert KVConnectorFactory._registry == before


def test_vllm_ascend_registers_no_connector_of_our_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm_ascend.distributed.kv_transfer import register_connector

    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    register_connector()
    theirs = set(KVConnectorFactory._registry)
    assert OURS not in theirs, "vllm-ascend registers a connector of our name: its plugin or ours cannot be loaded"
    assert theirs == {
        "AscendStoreConnector",
        "LMCacheAscendConnector",
        "MooncakeConnectorStoreV1",
        "MooncakeConnectorV1",
        "MooncakeHybridConnector",
        "MooncakeLayerwiseConnector",
        "MultiConnector",
        "RecomputeCPUOffloadConnector",
        "SimpleCPUOffloadConnector",
        "UCMConnector",
    }, "vllm-ascend registers other connectors"
    vllm_ascend_pd.register()
    assert KVConnectorFactory._registry.keys() == theirs | {OURS}


def test_the_recompute_scheduler_asks_before_it_ends_a_request() -> None:
    from vllm_ascend.core.recompute_scheduler import RecomputeScheduler
    from vllm_ascend.distributed.kv_transfer.ascend_multi_connector import AscendMultiConnector

    name = "update_state_before_preempt"
    assert name in our_hooks()
    assert f'"{name}"' in inspect.getsource(RecomputeScheduler.schedule)
    theirs, ours = (inspect.signature(getattr(each, name)) for each in (AscendMultiConnector, connector_class()))
    assert len(theirs.parameters) == len(ours.parameters)


def test_every_hook_we_implement_is_one_vllm_calls() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    theirs_alone = {"on_kv_cache_written", "update_state_before_preempt", "wait_for_layer_reuse"}  # vllm-ascend
    newer = {"has_pending_push_work", "get_loaded_kv_cache_group_ids", "get_transfer_results"}  # vLLM 0.30
    newer |= {"restore_kv_caches", "supports_sleep_mode", "unregister_kv_caches"}  # vLLM 0.33
    of_patches = {"steps_lost"}  # this package's patch of vLLM 0.33 calls it
    for name in our_hooks() - newer - theirs_alone - of_patches:
        base = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        assert base is not None, f"vLLM's connector interface has no `{name}` any more"
        if name in {"shutdown"}:
            continue
        theirs = [p for p in inspect.signature(base).parameters.values() if p.kind is not p.VAR_KEYWORD]
        ours = inspect.signature(getattr(connector_class(), name)).parameters.values()
        assert len(theirs) == len([p for p in ours if p.kind is not p.VAR_KEYWORD]), f"`{name}` takes other arguments"
