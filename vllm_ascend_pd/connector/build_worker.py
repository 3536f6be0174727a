# SPDX-License-Identifier: Apache-2.0
"""Builds the connector of a rank, once vLLM has allocated its KV caches."""

from contextlib import ExitStack

from vllm.distributed.parallel_state import get_pp_group

from vllm_ascend_pd.connector import parallel_ranks
from vllm_ascend_pd.connector.cache_specs import caches_of_layers, layer_specs, lost_blocks_say_all
from vllm_ascend_pd.connector.engine_setup import EngineSetup
from vllm_ascend_pd.connector.environment import device_type
from vllm_ascend_pd.connector.model_settings import model_settings
from vllm_ascend_pd.connector.model_summary import draft_summary, model_summary
from vllm_ascend_pd.connector.model_weights import loaded_weights
from vllm_ascend_pd.connector.role import CLOSE_TIMEOUT_S, ConnectorRole
from vllm_ascend_pd.connector.roles.decode_worker import DecodeWorkerRole
from vllm_ascend_pd.connector.roles.prefill_worker import PrefillWorkerRole
from vllm_ascend_pd.connector.shared_engine import SharedEngine
from vllm_ascend_pd.connector.unsupported import unsupported_weights
from vllm_ascend_pd.connector.vllm_versions import ASKS_SCHEDULER_FOR_STATS, HAS_TRANSFER_RESULTS
from vllm_ascend_pd.core.caches import KVCache, describe
from vllm_ascend_pd.core.config import ConfigError, ConnectorConfig
from vllm_ascend_pd.core.observer import DecodeObserver, PrefillObserver, tell_all
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.decode.worker import DecodeWorker
from vllm_ascend_pd.device import make_device
from vllm_ascend_pd.observe.stats import PrefillStats
from vllm_ascend_pd.observe.traces import decode_trace, prefill_trace
from vllm_ascend_pd.prefill.worker import PrefillWorker
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine


def build_worker_role(setup: EngineSetup, kv_caches: dict[str, KVCache]) -> ConnectorRole:
    """Builds this rank's role and registers its KV caches. `kv_caches`: the tensors of each layer, by its name.

    Raises ConfigError, LayoutError or what Mooncake raises. Nothing stays open then.
    """
    vllm_config, config = setup.vllm_config, setup.config
    if not setup.prefills and (reason := unsupported_weights(vllm_config)) is not None:
        raise ConfigError(reason)
    with ExitStack() as opened:
        device = make_device(device_type())
        opened.callback(device.close)
        rank = _rank_info(setup)
        is_first = (rank.pp_rank, rank.rank) == (0, 0)
        specs = layer_specs(setup.caches, vllm_config, rank.share)
        caches = describe(kv_caches, specs, heads_first=device.name == "cpu")
        _check_declared_sizes(config, "prefill" if setup.prefills else "decode", rank)
        protocol = config.transfer_protocol or device.transfer_protocol
        limits = TransferLimits.over(
            protocol, config.max_batch_descriptors, config.max_batch_bytes, config.write_timeout_s
        )
        engine = TransferEngine(setup.host, protocol, limits, SharedEngine.find(protocol))
        opened.callback(engine.close)
        engine.register(caches.regions(), of_caches=True)
        weights = loaded_weights(vllm_config, logs=is_first)
        always_has_stats = not ASKS_SCHEDULER_FOR_STATS and is_first
        if setup.prefills:
            step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            measured = PrefillStats(rank, engine.transport)
            observer = tell_all(PrefillObserver, measured, prefill_trace(config.trace_dir, rank))
            prefill = PrefillWorker(rank, config, device, engine, caches, step_tokens, weights, observer)
            opened.callback(prefill.close, CLOSE_TIMEOUT_S)
            caches_of = caches_of_layers(specs)
            return PrefillWorkerRole(prefill, measured, opened.pop_all(), always_has_stats, caches_of)
        traced = tell_all(DecodeObserver, decode_trace(config.trace_dir, rank))
        decode = DecodeWorker(rank, config, device, engine, caches, weights, traced)
        opened.callback(decode.close, CLOSE_TIMEOUT_S)
        # Where lost blocks are named, vLLM computes from the first of them on without asking the scheduler's connector.
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        asks_again = config.who_computes == "never" and policy == "recompute"
        fails_by_request = HAS_TRANSFER_RESULTS and (asks_again or not lost_blocks_say_all(setup.caches))
        return DecodeWorkerRole(decode, rank.settings, fails_by_request, opened.pop_all(), always_has_stats)


def _rank_info(setup: EngineSetup) -> RankInfo:
    stage = get_pp_group()
    rank, stage_ranks = parallel_ranks.place_in_stage()
    return RankInfo(
        engine_id=setup.engine_id,
        model=model_summary(setup.vllm_config),
        host=setup.host,
        rank=rank,
        sharding=parallel_ranks.sharding(setup.vllm_config),
        pp_rank=stage.rank_in_group,
        pp=stage.world_size,
        stage_ranks=stage_ranks,
        draft=draft_summary(setup.vllm_config),
        settings=model_settings(setup.vllm_config),
    )


def _check_declared_sizes(config: ConnectorConfig, side: str, rank: RankInfo) -> None:
    """Raises ConfigError if the engine's own parallel sizes are declared, and others."""
    declared = getattr(config, side)
    for name, actual in (("tp_size", rank.tp), ("pp_size", rank.pp)):
        if declared is not None and getattr(declared, name) not in (None, actual):
            raise ConfigError(
                f"kv_connector_extra_config: {side}.{name} is {getattr(declared, name)}, this engine's is {actual}"
            )
