# SPDX-License-Identifier: Apache-2.0
"""Makes the scheduler's side of the connector out of vLLM's configuration and ours."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from vllm_ascend_pd.connector import compat
from vllm_ascend_pd.connector.known_faults import warn_of_known_faults
from vllm_ascend_pd.connector.patches import vllm_0_23_scheduler as patch_vllm_0_23_scheduler
from vllm_ascend_pd.connector.patches import vllm_0_32_scheduler as patch_vllm_0_32_scheduler
from vllm_ascend_pd.connector.prompts import Prompts
from vllm_ascend_pd.core.config import ConfigError, ConnectorConfig, TlsConfig
from vllm_ascend_pd.core.hosts import decode_hosts
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings
from vllm_ascend_pd.decode.scheduler import DecodeScheduler, Listener, Signer
from vllm_ascend_pd.observe.decode import scheduler_trace
from vllm_ascend_pd.prefill.scheduler import PrefillScheduler
from vllm_ascend_pd.prefill.ticket_admission import Admission
from vllm_ascend_pd.transport.curve import load_keys
from vllm_ascend_pd.transport.idle_wait import IdleWait
from vllm_ascend_pd.transport.own_networks import own_networks
from vllm_ascend_pd.transport.secret_files import SecretFileError, read_text_secret, read_ticket_secret
from vllm_ascend_pd.transport.wakeup import WakeupSocket

# vLLM shows what its own loggers and their children say of a start.
logger = logging.getLogger(f"vllm.{__name__}")

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_T = TypeVar("_T")


def make_scheduler(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    config: ConnectorConfig,
    started_as: str,
    host: str,
    port: int,
) -> PrefillScheduler | DecodeScheduler:
    """`started_as`: the engine id of this start; `host`, `port`: where it is found. Raises `ConfigError`."""
    transfer = vllm_config.kv_transfer_config
    sharding = compat.sharding(vllm_config)
    groups = compat.cache_groups(kv_cache_config, sharding.parts)
    if compat.lacks_a_block(vllm_config, kv_cache_config):
        raise ConfigError(
            f"the KV cache has {kv_cache_config.num_blocks} blocks, one of which vLLM keeps for itself: a request of "
            f"--max-model-len {vllm_config.model_config.max_model_len} tokens would wait for ever for the last one. "
            "Lower --max-model-len by a block's tokens, or give the cache more memory"
        )
    _read(load_keys, config.side_channel_key_file)  # what is wrong with it is said before models are loaded
    secret = _read(read_ticket_secret, config.ticket_secret_file)
    parallel = vllm_config.parallel_config
    in_lockstep = parallel.data_parallel_size > 1
    longest_s = 0.0 if in_lockstep else config.idle_wait_s
    in_flight = vllm_config.max_concurrent_batches
    prompts = Prompts(compat.media_hashing(vllm_config))
    if transfer.is_kv_producer:
        hosts = decode_hosts(config.decode_allowlist, host, secret is not None, own_networks())
        logger.info("decode engines are served at: %s; tickets for other hosts are refused", hosts.admitted)
        return PrefillScheduler(groups, IdleWait(longest_s, in_flight), Admission(hosts, secret), prompts)
    warn_of_known_faults(parallel.data_parallel_size)
    recomputes = transfer.kv_load_failure_policy == "recompute"
    if recomputes and compat.gives_blocks_away(kv_cache_config):
        raise ConfigError(
            "kv_load_failure_policy is recompute, for a model with sliding windows or chunked attention: where blocks "
            "run out, vLLM would wait for ever for what a request computed again needs beyond its transfer. Set it to "
            "fail: the proxy tries again"
        )
    compat.accept_lost_blocks_of_any_groups()
    compat.keep_cached_blocks_until_all_groups_have_theirs()
    patch_vllm_0_23_scheduler.let_arrived_requests_run()
    patch_vllm_0_32_scheduler.let_transfers_start()
    draft = compat.draft_summary(vllm_config)
    listener = Listener(started_as, host, port, sharding.tp, sharding.parts, sharding.interleave, draft)
    settings = _metaserver_settings(config, recomputes)
    client = MetaserverClient(settings, own_host=host)
    signer = None if secret is None else Signer(secret, config.queue_timeout_s)
    # Of the CPU backend a single rank has a process of its own, too.
    doorbell = None if parallel.distributed_executor_backend == "uni" else WakeupSocket()
    idle = IdleWait(longest_s, in_flight, doorbell)
    return DecodeScheduler(listener, groups, client, idle, signer, scheduler_trace(config, started_as), prompts)


def _read(reader: Callable[[str], _T], path: str | None) -> _T | None:
    """What `reader` finds in a file with a secret. Raises ConfigError."""
    try:
        return None if path is None else reader(path)
    except SecretFileError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None


def _metaserver_settings(config: ConnectorConfig, recomputes: bool) -> MetaserverSettings:
    tls = config.tls_config or TlsConfig()
    password = _read(read_text_secret, tls.ssl_keyfile_password_file) or tls.ssl_keyfile_password
    return MetaserverSettings(
        allowlist=config.metaserver_allowlist,
        connect_timeout_s=config.metaserver_connect_timeout_s,
        deadline_s=config.transfer_timeout_s,
        longest_s=config.queue_timeout_s + config.transfer_timeout_s,
        max_connections=config.metaserver_max_connections,
        max_pending=config.max_pending_tickets,
        retries=config.metaserver_retries,
        ca_file=tls.ssl_ca_certs,
        cert_file=tls.ssl_certfile,
        key_file=tls.ssl_keyfile,
        key_password=password,
        token_file=config.metaserver_token_file,
        recomputes=recomputes,
    )
