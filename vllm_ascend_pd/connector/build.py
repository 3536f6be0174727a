# SPDX-License-Identifier: Apache-2.0
"""Builds the connector of a scheduler, and of a rank once vLLM has allocated its KV caches."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from vllm.config import KVTransferConfig
from vllm.distributed.parallel_state import get_pp_group

from vllm_ascend_pd.connector.bootstrap_server import (
    BootstrapServer,
    BootstrapServerError,
    answer_of,
    port_of_environment,
)
from vllm_ascend_pd.connector.caches import (
    block_needs,
    cache_groups,
    caches_of_layers,
    gives_blocks_away,
    lacks_a_block,
    layer_specs,
    layers_in_order,
    lost_blocks_say_all,
    readers_of_others,
)
from vllm_ascend_pd.connector.int8_caches import int8_caches
from vllm_ascend_pd.connector.known_faults import warn_of_known_faults
from vllm_ascend_pd.connector.metrics import PushSpans, ReceiveSpans
from vllm_ascend_pd.connector.model import draft_summary, media_hashing, model_settings, model_summary
from vllm_ascend_pd.connector.patches import (
    install_for_decode_scheduler,
    vllm_0_23_to_0_33_window_holds,
    vllm_0_33_lost_steps,
)
from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_33_sleep import follow_engine, follow_worker
from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_33_weight_updates import follow
from vllm_ascend_pd.connector.roles import CLOSE_TIMEOUT_S, VllmDecodeScheduler, VllmPrefillScheduler
from vllm_ascend_pd.connector.setup import (
    EngineSetup,
    device_type,
    is_being_built,
    place_in_stage,
    sharding,
    shared_engine,
)
from vllm_ascend_pd.connector.unsupported import survives_faults, unsupported_weights
from vllm_ascend_pd.connector.vllm_blocks import VllmBlocks
from vllm_ascend_pd.connector.vllm_requests import VllmRequests
from vllm_ascend_pd.connector.vllm_view import ASKS_SCHEDULER_FOR_STATS, HAS_TRANSFER_RESULTS
from vllm_ascend_pd.connector.weights import loaded_weights
from vllm_ascend_pd.core.caches import BlockNeeds, CacheGroup, KVCache, RegisteredCaches, describe, left_to_decode
from vllm_ascend_pd.core.checksum import Form, takes_32_bits
from vllm_ascend_pd.core.config import ConfigError
from vllm_ascend_pd.core.engine_view import EngineSteps
from vllm_ascend_pd.core.hosts import authority
from vllm_ascend_pd.core.layout import LayoutError
from vllm_ascend_pd.core.observer import tell_all
from vllm_ascend_pd.core.role import ConnectorRole
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.decode.intents import Intents
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.prefill_client import PrefillClient
from vllm_ascend_pd.decode.tickets import EngineInfo, TicketIssuer, TicketRecipients
from vllm_ascend_pd.decode.who_computes import PromptPlacement
from vllm_ascend_pd.decode.worker import DecodeWorker
from vllm_ascend_pd.device.checksums import best_form
from vllm_ascend_pd.device.event import DeviceError
from vllm_ascend_pd.device.make import make_device
from vllm_ascend_pd.observe.stats import (
    PREFILL_FIRST_TOKENS,
    Data,
    DecodeSchedulerStats,
    PrefillSchedulerStats,
    PrefillStats,
)
from vllm_ascend_pd.observe.traces import decode_scheduler_trace, decode_trace, prefill_trace
from vllm_ascend_pd.prefill.held_prompts import HOLD_TIMEOUT_S, HeldPrompts
from vllm_ascend_pd.prefill.ticket_admission import TicketAdmission
from vllm_ascend_pd.prefill.ticket_listener import TicketListener
from vllm_ascend_pd.prefill.worker import PrefillWorker
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.side_channel import SideChannelError
from vllm_ascend_pd.transport.wakeup import BETWEEN_S, IdleWait, WakeupSender, WakeupSocket

# vLLM shows what its own loggers and their children log while an engine starts.
logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True)
class Connected:
    """What a connector passes vLLM's calls on to. The default does nothing: a worker's before its caches are
    registered, and every connector's after shutdown."""

    role: ConnectorRole = field(default_factory=ConnectorRole)
    # Returns what was counted since the last call. None: nothing is reported.
    take_stats: Callable[[], Data | None] = lambda: None
    # Closes the role and what it uses, even if a part of it raises.
    closing: ExitStack = field(default_factory=ExitStack)


def connect_scheduler(setup: EngineSetup) -> Connected:
    """Builds the scheduler. Raises ConfigError or LayoutError for what is not supported."""
    vllm_config = setup.vllm_config
    groups = cache_groups(setup.caches, sharding(vllm_config).parts)
    if lacks_a_block(vllm_config, setup.caches):
        raise ConfigError(
            f"the KV cache has {setup.caches.num_blocks} blocks, one of which vLLM keeps for itself: a request of "
            f"--max-model-len {vllm_config.model_config.max_model_len} tokens would wait for ever for the last one. "
            "Lower --max-model-len by a block's tokens, or give the cache more memory"
        )
    requests = VllmRequests(media_hashing(vllm_config), setup.config.allow_other_model)
    build = _prefill if setup.prefills else _decode
    connected = build(setup, groups, requests)
    follow_engine(connected.role)
    if survives_faults(vllm_config):
        vllm_0_33_lost_steps.install()
    return connected


def _prefill(setup: EngineSetup, groups: list[CacheGroup], requests: VllmRequests) -> Connected:
    peers = setup.peers
    logger.info("decode engines are served at: %s; tickets for other hosts are refused", peers.hosts.admitted)
    blocks = VllmBlocks()
    measured = PrefillSchedulerStats()
    observer = tell_all(measured, PushSpans())
    admission = TicketAdmission(peers.hosts, peers.secret)
    listener = _ticket_listener(setup, admission)
    held = needs = None
    if listener is not None:
        needs = _needs(setup, groups)
        hold_timeout_s = setup.config.hold_timeout_s or HOLD_TIMEOUT_S
        held = HeldPrompts(
            listener,
            setup.started_as,
            hold_timeout_s,
            requests,
            blocks,
            needs,
            left_to_decode(groups),
            peers.secret,
        )
    if any(group.windowed for group in groups):
        vllm_0_23_to_0_33_window_holds.install()
    scheduler = VllmPrefillScheduler(
        groups,
        requests,
        blocks,
        _idle_wait(setup),
        admission,
        observer,
        held,
        awaits_outputs=is_being_built(),
        survives_faults=survives_faults(setup.vllm_config),
    )
    closing = ExitStack()
    if listener is not None:
        closing.callback(listener.close, CLOSE_TIMEOUT_S)
        if (bootstrap := _bootstrap_server(setup, listener)) is not None:
            closing.callback(bootstrap.close, CLOSE_TIMEOUT_S)
    gauges = {PREFILL_FIRST_TOKENS: _first_tokens(setup, groups, needs)}
    return Connected(scheduler, lambda: measured.take(lambda: gauges) or None, closing)


def _first_tokens(setup: EngineSetup, groups: list[CacheGroup], needs: BlockNeeds | None) -> int:
    """Returns how many tokens a step has: longer prompts may be computed before decode gives them memory. 0: none may
    by default, because this engine might not be able to hold one until its ticket comes.

    `needs`: None if it holds none at all.
    """
    tokens: int = setup.vllm_config.scheduler_config.max_num_batched_tokens
    why = None
    if needs is None or is_being_built():
        why = "the connectors beside this one may have layers use a few buffers in turn"
    elif any(group.windowed for group in groups):
        why = "decode's blocks of a sliding window may be longer"
    elif needs.beside_longest < needs.longest:
        why = "the KV cache has too few blocks for two prompts of --max-model-len tokens"
    if why is not None:
        logger.info(
            "decode gives all prompts memory before they are computed, unless it is configured otherwise: %s", why
        )
        return 0
    logger.info("prompts of more than %d tokens may be computed before decode gives them memory", tokens)
    return tokens


def _needs(setup: EngineSetup, groups: list[CacheGroup]) -> BlockNeeds:
    """Returns how many blocks requests take. Warns if the pool has too few for two of the longest."""
    needs = block_needs(setup.vllm_config, setup.caches, groups)
    if needs.beside_longest < needs.longest:
        logger.warning(
            "the KV cache has %d blocks, and a request of --max-model-len %d tokens takes %d: behind a router that "
            "asks prefill first, prompts that wait for decode share %d blocks, and a longer one waits until it is the "
            "only one, and may fail. Lower --max-model-len, or give the cache more memory",
            needs.pool,
            setup.vllm_config.model_config.max_model_len,
            needs.longest,
            needs.beside_longest,
        )
    return needs


def _ticket_listener(setup: EngineSetup, admission: TicketAdmission) -> TicketListener | None:
    """Takes tickets for prompts of routers that ask prefill first. None if such a request may be for a connector that
    pulls."""
    if setup.config.hold_timeout_s is None and is_being_built():
        return None
    # Left at vLLM's default, the port is decode's on the same host. Answers name the port, so any will do.
    wanted = 0 if setup.vllm_config.kv_transfer_config.kv_port == KVTransferConfig.kv_port else setup.port
    parallel = setup.vllm_config.parallel_config
    of_a_stage = parallel.world_size // parallel.pipeline_parallel_size
    ranks = [(stage, rank) for stage in range(parallel.pipeline_parallel_size) for rank in range(of_a_stage)]
    make = partial(
        TicketListener,
        setup.started_as,
        setup.host,
        check=admission.check,
        secret=setup.peers.secret,
        hosts=setup.peers.hosts,
        configured_id=setup.engine_id,
        ranks=ranks,
    )
    try:
        listener = make(wanted)
    except SideChannelError as error:
        if not wanted:
            raise
        listener = make(0)
        logger.warning("%s: tickets of routers that ask prefill first are taken at %s", error, listener.endpoint)
    return listener


def _bootstrap_server(setup: EngineSetup, listener: TicketListener) -> BootstrapServer | None:
    """Tells routers for MooncakeConnector about the data-parallel engines of this host. None if no port is set, or if
    another engine does it."""
    parallel = setup.vllm_config.parallel_config
    port = setup.config.bootstrap_port or port_of_environment()
    if port is None or parallel.data_parallel_rank_local:
        return None
    siblings = parallel.data_parallel_size_local - 1
    if siblings > 0 and listener.port != setup.port:
        raise ConfigError("bootstrap_port: data-parallel engines need a kv_port, with a free port for each engine")
    where = listener.host, listener.port
    answer = answer_of(setup.engine_id, setup.started_as, *where, siblings, setup.peers.secret)
    try:
        server = BootstrapServer(setup.host, port, answer)
    except BootstrapServerError as error:
        raise ConfigError(f"bootstrap_port: {error}") from None
    logger.info("routers for MooncakeConnector find this engine at http://%s/query", authority(setup.host, server.port))
    return server


def _decode(setup: EngineSetup, groups: list[CacheGroup], requests: VllmRequests) -> Connected:
    config, vllm_config, secret = setup.config, setup.vllm_config, setup.peers.secret
    if (
        config.who_computes == "never"
        and "who_computes" not in vllm_config.kv_transfer_config.kv_connector_extra_config
    ):
        logger.info("recompute_scheduler_enable is set: this engine computes no prompts, as with who_computes never")
    parallel = vllm_config.parallel_config
    warn_of_known_faults(parallel.data_parallel_size)
    if setup.recomputes and gives_blocks_away(setup.caches):
        raise ConfigError(
            "kv_load_failure_policy is recompute, for a model with sliding windows or chunked attention: if blocks run "
            "out, vLLM would wait for ever for the further blocks that a recomputed request needs. Set it to fail: the "
            "proxy tries again"
        )
    install_for_decode_scheduler()
    ranks = sharding(vllm_config)
    engine = EngineInfo(
        setup.started_as, setup.host, setup.port, ranks.tp, ranks.parts, ranks.interleave, draft_summary(vllm_config)
    )
    longest = config.prefill_first_tokens
    if longest == "auto" and is_being_built():
        longest = None
        logger.info(
            "all prompts get memory before they are computed, unless prefill_first_tokens is a number: a connector "
            "beside this one may have a part of a prompt, which prefill would compute"
        )
    # On the CPU backend a single rank has a process of its own, too.
    own_processes = parallel.distributed_executor_backend != "uni"
    wakeup = WakeupSocket() if own_processes or longest is not None else None
    idle, waker = _idle_wait(setup, wakeup, BETWEEN_S if own_processes else 0.0), WakeupSender()
    blocks = VllmBlocks(groups)
    measured = DecodeSchedulerStats()
    traced = decode_scheduler_trace(config.trace_dir, setup.started_as)
    observer = tell_all(measured, ReceiveSpans(), traced)
    may_compute = setup.recomputes and config.who_computes != "never"
    wake = partial(waker.wake, idle.wakeup_address)
    metaserver = MetaserverClient(config, setup.host, may_compute, observer, secret, wake)
    prefill = PrefillClient(setup.peers, config, observer)
    logger.info(
        "tickets are posted to proxies at: %s; or offered to prefill engines at: %s; requests that name others are "
        "refused",
        metaserver.admitted,
        prefill.admitted,
    )
    issuer = TicketIssuer(engine, groups, requests, secret, config.queue_timeout_s, config.verified_share)
    recipients = TicketRecipients(metaserver, prefill)
    scheduler = VllmDecodeScheduler(
        setup,
        issuer,
        requests,
        blocks,
        recipients,
        PromptPlacement(requests, blocks, config, _engine_steps(setup), observer),
        idle,
        # A writer whose process has ended counts as one until its bytes have settled. (As over TCP: over `ascend` they
        # may take ten minutes, and no client waits as long.)
        config.lease_s + TransferLimits(timeout_s=config.write_timeout_s).settle_s,
        Intents(longest, issuer, requests, recipients, config.queue_timeout_s),
        may_compute,
        observer,
    )
    closing = ExitStack()
    closing.callback(waker.close)
    closing.callback(scheduler.close)
    return Connected(scheduler, lambda: measured.take() or None, closing)


def _engine_steps(setup: EngineSetup) -> EngineSteps:
    vllm_config = setup.vllm_config
    scheduling = vllm_config.scheduler_config
    tokens, chunked = scheduling.max_num_batched_tokens, scheduling.enable_chunked_prefill
    if not chunked:  # the rest of a step is for requests that generate
        tokens -= scheduling.max_num_seqs * (1 + vllm_config.num_speculative_tokens)
    engines = vllm_config.parallel_config.data_parallel_size
    return EngineSteps(max(0, tokens), chunked, vllm_config.max_concurrent_batches, engines)


def _idle_wait(setup: EngineSetup, wakeup: WakeupSocket | None = None, between_s: float = BETWEEN_S) -> IdleWait:
    # Data-parallel engines step together.
    in_lockstep = setup.vllm_config.parallel_config.data_parallel_size > 1
    longest_s = 0.0 if in_lockstep else setup.config.idle_wait_s
    return IdleWait(longest_s, setup.vllm_config.max_concurrent_batches, wakeup, between_s)


# Builds the connector of a rank, once vLLM has allocated its KV caches.


def connect_worker(setup: EngineSetup, kv_caches: dict[str, KVCache]) -> Connected:
    """Builds this rank's worker and registers its KV caches. `kv_caches`: the tensors of each layer, by its name.

    Raises ConfigError, LayoutError or what Mooncake raises. Nothing stays open then.
    """
    connected = _worker(setup, kv_caches)
    follow_worker(connected.role)
    return connected


def _worker(setup: EngineSetup, kv_caches: dict[str, KVCache]) -> Connected:
    vllm_config, config = setup.vllm_config, setup.config
    if not setup.prefills and (reason := unsupported_weights(vllm_config)) is not None:
        raise ConfigError(reason)
    with ExitStack() as opened:
        device = make_device(device_type())
        opened.callback(device.close)
        form = Form.SUM_64
        if config.verified_share:
            try:
                form = best_form(device)
            except (DeviceError, RuntimeError, TimeoutError) as error:
                raise ConfigError(f"`verify_kv`: the device {device.name} cannot take checksums: {error}") from error
        rank = _rank_info(setup)
        is_first = (rank.pp_rank, rank.rank) == (0, 0)
        specs = layer_specs(setup.caches, vllm_config, rank.share)
        specs, quantize = int8_caches(specs, vllm_config, setup.prefills)
        readers = readers_of_others(vllm_config)
        caches = describe(kv_caches, specs, heads_first=device.name == "cpu", readers=readers, quantize=quantize)
        if not setup.prefills:
            _check_buffers(caches)
        protocol = config.transfer_protocol or device.transfer_protocol
        limits = TransferLimits.over(protocol, config.write_timeout_s)
        shared = shared_engine(protocol)
        if shared is not None and vllm_config.model_config.enable_sleep_mode:
            raise ConfigError("--enable-sleep-mode is set, and other connectors use Mooncake's engine, too")
        engine = TransferEngine(setup.host, protocol, limits, shared)
        opened.callback(engine.close)
        engine.register(caches.regions(), of_caches=True)
        weights = loaded_weights(vllm_config, follow, logs=is_first)
        always_has_stats = not ASKS_SCHEDULER_FOR_STATS and is_first

        def no_stats() -> Data | None:
            return {} if always_has_stats else None

        if setup.prefills:
            step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            measured = PrefillStats(rank)
            observer = tell_all(measured, prefill_trace(config.trace_dir, rank))
            caches_of, in_order = caches_of_layers(specs), layers_in_order(caches.layers)
            if not all(takes_32_bits(geometry.sent) for geometry in caches.description.geometries):
                form = Form.SUM_64
            prefill = PrefillWorker(
                rank,
                config,
                device,
                engine,
                caches,
                step_tokens,
                weights,
                observer,
                caches_of,
                in_order,
                setup.peers,
                form,
            )
            opened.callback(prefill.close, CLOSE_TIMEOUT_S)
            return Connected(prefill, lambda: measured.take(prefill.status) or no_stats(), opened.pop_all())
        traced = tell_all(decode_trace(config.trace_dir, rank))
        # Where lost blocks are named, vLLM computes from the first of them on without asking the scheduler's connector.
        asks_again = config.who_computes == "never" and setup.recomputes
        fails_by_request = HAS_TRANSFER_RESULTS and (asks_again or not lost_blocks_say_all(setup.caches))
        decode = DecodeWorker(rank, config, device, engine, caches, weights, traced, fails_by_request, setup.peers)
        opened.callback(decode.close, CLOSE_TIMEOUT_S)
        return Connected(decode, no_stats, opened.pop_all())


def _rank_info(setup: EngineSetup) -> RankInfo:
    stage = get_pp_group()
    rank, stage_ranks = place_in_stage()
    return RankInfo(
        engine_id=setup.engine_id,
        model=model_summary(setup.vllm_config),
        host=setup.host,
        rank=rank,
        sharding=sharding(setup.vllm_config),
        pp_rank=stage.rank_in_group,
        pp=stage.world_size,
        stage_ranks=stage_ranks,
        draft=draft_summary(setup.vllm_config),
        settings=model_settings(setup.vllm_config),
    )


def _check_buffers(caches: RegisteredCaches) -> None:
    """Raises LayoutError if layers of a decode engine use a buffer in turn: it needs the KV of all of them."""
    for one, other in caches.sharing_buffers:
        raise LayoutError(
            f"{one} and {other} use one buffer in turn, which decode cannot: remove "
            "layerwise_num_shared_buffers from AscendStoreConnector's kv_connector_extra_config"
        )
