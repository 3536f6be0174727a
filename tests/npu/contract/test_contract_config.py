# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration as vllm-ascend's platform completes and checks it."""

from pathlib import Path

import pytest
from vllm_ascend_contract import LAYERWISE, constants, engine_config

from vllm_ascend_pd.core.config import ConnectorConfig, TlsConfig, UserConfig, parse_config

pytestmark = pytest.mark.npu


@pytest.mark.parametrize(
    ("role", "tp", "prefill_tp", "decode_tp"),
    [("kv_producer", 1, 1, 1), ("kv_producer", 2, 2, 1), ("kv_consumer", 1, 2, 1), ("kv_consumer", 2, 2, 2)],
)
def test_declared_sizes(plugins: None, dense_model: Path, role: str, tp: int, prefill_tp: int, decode_tp: int) -> None:
    """`prefill` and `decode` as vllm-ascend's guides have them are taken by both."""
    extra = {
        "prefill": {"tp_size": prefill_tp, "dp_size": 1},
        "decode": {"tp_size": decode_tp, "dp_size": 1},
    }
    config = engine_config(dense_model, tp, kv_role=role, kv_connector_extra_config=extra)
    parsed = parse_config(config.kv_transfer_config.kv_connector_extra_config)
    assert (parsed.prefill, parsed.decode) == (extra["prefill"], extra["decode"])
    suffix = config.kv_transfer_config.engine_id.removeprefix("an-engine-")
    assert len(suffix) == 32, f"the platform makes another engine id: {config.kv_transfer_config.engine_id}"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_sizes_may_be_left_out(plugins: None, dense_model: Path, role: str, tp: int) -> None:
    config = engine_config(dense_model, tp, kv_role=role)
    assert parse_config(config.kv_transfer_config.kv_connector_extra_config) == ConnectorConfig()


def test_vllm_ascend_refuses_declared_sizes_that_do_not_divide(plugins: None, dense_model: Path) -> None:
    """Why they must be left out where prefill's TP is smaller than decode's."""
    extra = {"prefill": {"tp_size": 1}, "decode": {"tp_size": 2}}
    with pytest.raises(Exception, match="Prefill TP size must be divisible by Decode TP size"):
        engine_config(dense_model, 1, kv_connector_extra_config=extra)


def test_vllm_ascend_refuses_sizes_that_are_not_the_engines(plugins: None, dense_model: Path) -> None:
    extra = {"prefill": {"tp_size": 2}, "decode": {"tp_size": 1}}
    with pytest.raises(Exception, match="conflicting tensor parallel size"):
        engine_config(dense_model, 1, kv_connector_extra_config=extra)


def test_every_key_vllm_ascend_reads_is_one_of_ours() -> None:
    read = {
        key
        for module in ("vllm_ascend.ascend_config", "vllm_ascend.utils", LAYERWISE)
        for key in constants(module, "get_from_extra_config")
    }
    read |= constants("vllm_ascend.utils", "get", "extra_config")
    assert read == {"prefill", "decode", "tls_config", "ascend_local_comm_res_path"}, (
        "vllm-ascend reads other keys of kv_connector_extra_config"
    )
    assert read <= set(UserConfig.__struct_fields__)


TLS_KEYS = {"ssl_enable", "ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs"}


def test_keys_of_vllm_ascends_tls_config() -> None:
    assert constants(LAYERWISE, "get", "tls_config") == TLS_KEYS, "vllm-ascend's tls_config has other keys"


def test_our_tls_config_has_vllm_ascends_keys() -> None:
    assert set(TlsConfig.__struct_fields__) >= TLS_KEYS


@pytest.mark.parametrize("graphs", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE"])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_graphs_are_as_the_user_wants_them(plugins: None, dense_model: Path, role: str, graphs: str) -> None:
    config = engine_config(dense_model, graphs=graphs, kv_role=role)
    assert config.compilation_config.cudagraph_mode.name == graphs


def test_a_connector_that_asks_for_piecewise_graphs_gets_them(plugins: None, dense_model: Path) -> None:
    """On decode too: the question does not say for which side it is."""
    layerwise = {"kv_connector": "AscendStoreConnector", "kv_connector_extra_config": {"use_layerwise": True}}
    config = engine_config(dense_model, graphs="FULL_DECODE_ONLY", kv_role="kv_consumer", **layerwise)
    assert config.compilation_config.cudagraph_mode.name == "PIECEWISE"
