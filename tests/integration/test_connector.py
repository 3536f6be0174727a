# SPDX-License-Identifier: Apache-2.0
"""The connector inside vLLM's own configuration and factory, without an engine."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

import vllm_ascend_pd
from vllm_ascend_pd.compat import external_request_id
from vllm_ascend_pd.config import ConfigError


@pytest.fixture(scope="module")
def connector_class() -> type[KVConnectorBase_V1]:
    """Found as vLLM finds it: by name, after the plugin has registered it (twice, as vLLM may do)."""
    vllm_ascend_pd.register()
    vllm_ascend_pd.register()
    return KVConnectorFactory.get_connector_class_by_name("LayerwisePushConnector")


def test_it_is_a_whole_connector(connector_class: type[KVConnectorBase_V1]) -> None:
    assert issubclass(connector_class, SupportsHMA)
    assert not getattr(connector_class, "__abstractmethods__", None)
    assert not connector_class.requires_piecewise_for_cudagraph({}), "decode would lose its full graphs"


class _Config:
    """As much of a VllmConfig as is read before the transfer config is refused."""

    def __init__(self, role: str, extra: dict[str, Any]) -> None:
        self.kv_transfer_config = KVTransferConfig(
            kv_connector="LayerwisePushConnector", kv_role=role, kv_connector_extra_config=extra
        )


@pytest.mark.parametrize(
    ("role", "extra", "named"),
    [
        ("kv_both", {}, "kv_both"),
        ("kv_producer", {"lease": 3}, "did you mean `lease_s`"),
        ("kv_consumer", {"lease_s": "long"}, "lease_s"),
    ],
    ids=["both", "unknown-key", "ill-typed"],
)
def test_a_config_it_cannot_work_with(
    connector_class: type[KVConnectorBase_V1], role: str, extra: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        connector_class(_Config(role, extra), KVConnectorRole.WORKER, None)


@pytest.mark.parametrize(
    ("engine_id", "api_id"),
    [
        ("cmpl-7c5a-0-0a1b2c3d", "cmpl-7c5a-0"),
        ("1_cmpl-7c5a-0-0a1b2c3d", "cmpl-7c5a-0"),
        ("chatcmpl-7c5a-0a1b2c3d", "chatcmpl-7c5a"),
        ("7_of-mine-0a1b2c3d", "7_of-mine"),
        ("no-suffix", "no-suffix"),
    ],
)
def test_the_id_a_proxy_knows_a_request_by(engine_id: str, api_id: str) -> None:
    assert external_request_id(engine_id) == api_id


def test_the_entry_point_is_declared() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'vllm_ascend_pd = "vllm_ascend_pd:register"' in pyproject
