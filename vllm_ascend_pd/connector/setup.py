# SPDX-License-Identifier: Apache-2.0
"""An engine's configuration as the connector reads it: roles, ports, ranks, device, neighbours in a MultiConnector."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from vllm_ascend_pd.connector.unsupported import computes_prompts, survives_faults, unsupported
from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.config import CONNECTOR, ConfigError, ConnectorConfig, parse_config
from vllm_ascend_pd.transport.peers import Peers, read_peers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class EngineSetup:
    """The configuration of an engine that this connector serves."""

    # vLLM's own.
    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig | None
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
    # Whether vLLM computes requests whose KV could not be loaded (`kv_load_failure_policy`).
    recomputes: bool
    # The engines on the other side.
    peers: Peers = field(default_factory=Peers)

    @property
    def caches(self) -> KVCacheConfig:
        """vLLM's cache configuration. It exists once vLLM has measured its memory."""
        assert self.kv_cache_config is not None
        return self.kv_cache_config


def read_setup(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> EngineSetup:
    """Reads the engine's configuration. Raises ConfigError if this connector cannot work with it."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role not in ("kv_producer", "kv_consumer"):
        raise ConfigError(
            f"kv_role is {transfer.kv_role}: LayerwisePushConnector prefills (kv_producer) or decodes (kv_consumer)"
        )
    config = parse_config(transfer.kv_connector_extra_config)
    if (reason := unsupported(vllm_config)) is not None:
        raise ConfigError(reason)
    if vllm_config.model_config is not None and vllm_config.model_config.enable_sleep_mode and is_being_built():
        raise ConfigError(
            "--enable-sleep-mode is set, with other connectors in a MultiConnector: memory that they have registered "
            "would be freed"
        )
    if survives_faults(vllm_config) and is_being_built():
        raise ConfigError(
            "--enable-fault-tolerance is set, with other connectors in a MultiConnector: they would report once more "
            "after a fault what counts only once"
        )
    if not transfer.is_kv_producer and not computes_prompts(vllm_config):
        config = msgspec.structs.replace(config, who_computes="never")
    host = own_host()
    return EngineSetup(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        config=config,
        engine_id=transfer.engine_id,
        started_as=f"{transfer.engine_id}-{secrets.token_hex(4)}",
        host=host,
        # Each data-parallel engine of a node has its own listener.
        port=int(transfer.kv_port) + int(getattr(vllm_config.parallel_config, "data_parallel_index", 0)),
        prefills=bool(transfer.is_kv_producer),
        recomputes=(_multi_connector() or vllm_config).kv_transfer_config.kv_load_failure_policy == "recompute",
        peers=read_peers(config, host),
    )


def own_host() -> str:
    """Returns the address that vLLM knows this host by. Raises ConfigError for that of all interfaces by accident."""
    from vllm import envs

    host = host_address()
    if host in ("0.0.0.0", "::") and not envs.VLLM_HOST_IP:
        raise ConfigError(
            "vLLM does not know this host's address, and listening on all interfaces is not allowed: set VLLM_HOST_IP"
        )
    return host


# How the ranks of an engine share its KV, read from vLLM's parallel configuration and groups.


def sharding(vllm_config: VllmConfig) -> topology.Sharding:
    """Returns how the ranks of a pipeline stage share its KV."""
    parallel = vllm_config.parallel_config
    tp, dcp = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    pcp = parallel.prefill_context_parallel_size
    interleave = parallel.cp_kv_cache_interleave_size
    if dcp > 1 and parallel.dcp_kv_cache_interleave_size > 1:  # its deprecated name, which vLLM prefers
        interleave = parallel.dcp_kv_cache_interleave_size
    from vllm_ascend_pd.connector.vllm_view import prefill_ranks_hold_copies

    if pcp > 1 and prefill_ranks_hold_copies():
        # Groups of decode context parallelism run over prefill-context-parallel ranks first.
        shares = tuple((tp_rank * pcp + pcp_rank) % dcp for pcp_rank in range(pcp) for tp_rank in range(tp))
        return topology.Sharding(tp, shares, interleave if dcp > 1 else 1)
    return topology.sharding(tp, dcp, interleave, pcp)


def place_in_stage() -> tuple[int, tuple[int, ...]]:
    """Returns this rank's number in its pipeline stage, as `Sharding` counts, and the stage's ranks in the world.

    vLLM numbers the world with tensor-parallel ranks running fastest, then those of prefill context parallelism.
    """
    from vllm.distributed import parallel_state

    tp, pcp = parallel_state.get_tp_group(), parallel_state.get_pcp_group()
    rank = pcp.rank_in_group * tp.world_size + tp.rank_in_group
    first = tp.ranks[tp.rank_in_group] - rank
    return rank, tuple(range(first, first + pcp.world_size * tp.world_size))


# What vLLM detects on this machine, for tools, which do not import vLLM themselves.


def load_connector() -> str:
    """Registers and loads the connector as vLLM does. Returns its class name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import vllm_ascend_pd

    vllm_ascend_pd.register()
    return str(KVConnectorFactory.get_connector_class_by_name("LayerwisePushConnector").__name__)


def device_type() -> str:
    """Returns the kind of device that vLLM uses in this process, such as "npu" or "cpu"."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def host_address() -> str:
    """Returns the address that vLLM has for this host. It may be that of all interfaces (0.0.0.0)."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def shared_engine(protocol: str) -> Any:
    """Returns what vllm-ascend's connectors share Mooncake's engine by, if one of them is loaded in this process.

    None otherwise, and for every protocol but "ascend".
    """
    module = sys.modules.get("vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine")
    return getattr(module, "global_te", None) if protocol == "ascend" else None


# Connectors beside this one in a MultiConnector.
#
# vLLM takes the first connector that has any token of a prompt. If a pool before this connector has 1 % of a prompt,
# decode computes the other 99 % itself, and prefill is not asked.


def is_being_built() -> bool:
    """Whether a MultiConnector's constructor is running in this thread, so that other connectors may be beside ours.

    vLLM tells a scheduler's connector nothing of the others.
    """
    return _multi_connector() is not None


def _multi_connector() -> VllmConfig | None:
    """Returns the configuration that the outermost MultiConnector is being built with. None if none is being built.

    Each connector in it gets a copy with a `kv_transfer_config` of its own, while vLLM goes by this one.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    found, frame = None, cast("FrameType | None", sys._getframe())
    while frame is not None:
        if frame.f_code is MultiConnector.__init__.__code__:
            found = frame.f_locals["vllm_config"]
        frame = frame.f_back
    return found


def asked_before(kv_connector: str | None, extra_config: Mapping[str, Any]) -> list[str]:
    """Returns the names of the connectors before this one. `extra_config`: of the MultiConnector."""
    if kv_connector != "MultiConnector":
        return []
    entries = extra_config.get("connectors")
    if not isinstance(entries, list):
        return []
    names = [str(entry.get("kv_connector")) if isinstance(entry, Mapping) else "?" for entry in entries]
    return names[: names.index(CONNECTOR)] if CONNECTOR in names else []
