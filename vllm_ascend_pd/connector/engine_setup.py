# SPDX-License-Identifier: Apache-2.0
"""What the connector reads of an engine's configuration when it is built, checked."""

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from vllm import envs
from vllm.utils.network_utils import get_ip

from vllm_ascend_pd.connector.unsupported import computes_prompts, unsupported
from vllm_ascend_pd.core.config import ConfigError, ConnectorConfig, parse_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class EngineSetup:
    """The configuration of an engine that this connector serves."""

    # vLLM's own.
    vllm_config: "VllmConfig"
    kv_cache_config: "KVCacheConfig | None"
    # `kv_connector_extra_config`.
    config: ConnectorConfig
    # The configured engine id, which outlives a restart.
    engine_id: str
    # The engine id with a random part: prefill must not take a restarted engine for the one it knows.
    started_as: str
    # Where the engine listens, and what its tickets name.
    host: str
    port: int
    # Whether the engine prefills. Otherwise it decodes.
    prefills: bool

    @property
    def caches(self) -> "KVCacheConfig":
        """vLLM's cache configuration. It exists once vLLM has measured its memory."""
        assert self.kv_cache_config is not None
        return self.kv_cache_config


def read_setup(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig | None") -> EngineSetup:
    """Reads the engine's configuration. Raises ConfigError if this connector cannot work with it."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role not in ("kv_producer", "kv_consumer"):
        raise ConfigError(
            f"kv_role is {transfer.kv_role}: LayerwisePushConnector prefills (kv_producer) or decodes (kv_consumer)"
        )
    config = parse_config(transfer.kv_connector_extra_config)
    if (reason := unsupported(vllm_config)) is not None:
        raise ConfigError(reason)
    if not transfer.is_kv_producer and not computes_prompts(vllm_config):
        config = msgspec.structs.replace(config, who_computes="never")
    return EngineSetup(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        config=config,
        engine_id=transfer.engine_id,
        started_as=f"{transfer.engine_id}-{secrets.token_hex(4)}",
        host=own_host(),
        # Each data-parallel engine of a node has its own listener.
        port=int(transfer.kv_port) + int(getattr(vllm_config.parallel_config, "data_parallel_index", 0)),
        prefills=bool(transfer.is_kv_producer),
    )


def own_host() -> str:
    """Returns the address that vLLM knows this host by. Raises ConfigError for that of all interfaces by accident."""
    host: str = get_ip()
    if host in ("0.0.0.0", "::") and not envs.VLLM_HOST_IP:
        raise ConfigError(
            "vLLM does not know this host's address, and listening on all interfaces is not allowed: set VLLM_HOST_IP"
        )
    return host
