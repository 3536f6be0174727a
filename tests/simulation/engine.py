# SPDX-License-Identifier: Apache-2.0
"""An engine: vLLM's scheduler in a core, and ranks that run its steps with the connector's real workers.

Each is a process. A step goes from the core to the ranks and back by messages, and several may be on their way.
"""

import copy
import functools
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import KVTransferConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from harness.connectors import caches_of
from harness.models import TINY, make_model
from harness.real_scheduler import TOKEN, cache_specs, engine_config, make_scheduler, model_config
from harness.scheduling import aggregated, block_hasher, make_request, model_output
from harness.taken_back import POOL
from simulation.kernel import kernel
from simulation.memory import Array, Caches, Layer, Places, groups_of, layers_of
from simulation.scenario import BLOCK, MAX_MODEL_LEN, Shape
from simulation.stand_ins import Event, SimpleQueue
from vllm_ascend_pd.connector.caches import lost_blocks_say_all
from vllm_ascend_pd.connector.metrics import HandshakeMetadata, ReportMetadata
from vllm_ascend_pd.connector.model import model_summary
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS
from vllm_ascend_pd.core.step import WorkerReport
from vllm_ascend_pd.core.topology import RankInfo, sharding
from vllm_ascend_pd.core.weights import LoadedWeights
from vllm_ascend_pd.decode.worker import DecodeWorker
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.observe.stats import PREFILL_FIRST_TOKENS
from vllm_ascend_pd.prefill.worker import PrefillWorker
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.wakeup import PAUSE_S

if TYPE_CHECKING:
    from simulation.world import World

_LAYER_S = 0.001
# As `ConnectorConfig.idle_wait_s`, but longer: each step of an idle engine costs real time.
_IDLE_WAIT_S = 0.3
_PREFILL_STEP_TOKENS = 64
_DECODE_STEP_TOKENS = 512
_DECODE_PORT = 19000
_PREFILL_PORT = 14579


def _caches(shape: Shape, blocks: int) -> KVCacheConfig:
    """Returns vLLM's caches of the model."""
    caches = caches_of(*cache_specs(shape.windows, int(shape.states)), blocks=blocks)
    for number, group in enumerate(caches.kv_cache_groups):
        group.layer_names = [name for name, of in layers_of(shape) if of == number]
    return caches


class Configurations:
    """vLLM's configurations, each of which takes a long time to make."""

    def __init__(self, folder: Path) -> None:
        """`folder`: gets a model's configuration."""
        self._model = model_config(make_model(TINY, folder), MAX_MODEL_LEN)
        # By the number of ranks that share a block.
        self.hashers = {n: block_hasher(BLOCK * n) for n in (1, 2, 4)}
        self._known: dict[tuple[bool, bool], VllmConfig] = {}

    def of(self, prefills: bool, number: int, world: "World") -> VllmConfig:
        """Returns the configuration of one of the engines."""
        shape = world.scenario.shape
        transfer: dict[str, Any] = {
            "kv_connector": "LayerwisePushConnector",
            "kv_role": "kv_producer" if prefills else "kv_consumer",
            "kv_connector_extra_config": world.extra_config(prefills),
        }
        if prefills and shape.pool:
            pool = {"kv_role": "kv_producer", **POOL}
            transfer |= {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {"connectors": [dict(transfer), pool]},
            }
        transfer |= {
            "engine_id": f"{'prefill' if prefills else 'decode'}{number}",
            "kv_port": (_PREFILL_PORT if prefills else _DECODE_PORT) + number,
            "kv_load_failure_policy": shape.prefill_policy if prefills else shape.decode_policy,
        }
        key = prefills, shape.pool
        if key not in self._known:
            step_tokens = _PREFILL_STEP_TOKENS if prefills else _DECODE_STEP_TOKENS
            self._known[key] = engine_config(self._model, transfer, step_tokens)
        made = copy.copy(self._known[key])
        made.kv_transfer_config = KVTransferConfig(**transfer)
        made.parallel_config = copy.copy(made.parallel_config)
        parallel = made.parallel_config
        parallel.tensor_parallel_size = shape.prefill_tp if prefills else shape.decode_tp
        parallel.pipeline_parallel_size = shape.prefill_pp if prefills else shape.decode_pp
        parallel.world_size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if shape.survives_faults:
            parallel.enable_fault_tolerance = True
        if not prefills and shape.decode_dcp > 1:
            parallel.decode_context_parallel_size = shape.decode_dcp
            parallel.cp_kv_cache_interleave_size = BLOCK
        made.cache_config = copy.copy(made.cache_config)
        made.cache_config.num_gpu_blocks = shape.prefill_blocks if prefills else shape.decode_blocks
        made.cache_config.enable_prefix_caching = shape.prefix_caching
        if shape.states:
            made.cache_config.mamba_cache_mode = "align"
        made.scheduler_config = copy.copy(made.scheduler_config)
        made.scheduler_config.async_scheduling = not prefills and shape.decode_steps > 1
        if not prefills and shape.drafts:
            made.speculative_config = self._drafting(shape.drafts)
        return made

    @functools.cache  # noqa: B019 - there is one for each process
    def _drafting(self, tokens: int) -> SpeculativeConfig:
        return SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=tokens,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
            target_model_config=self._model,
            target_parallel_config=ParallelConfig(),
        )


@dataclass
class Part:
    """One request's part of a step."""

    request_id: str
    # By cache group: the slots of tokens that the step computes.
    written: list[Places]
    # By cache group: those of earlier tokens, whose KV it reads.
    read: list[Places]
    # The blocks in which it writes, with the prefix hash of the first token in each.
    blocks: list[tuple[int, int]]
    # If its KV has just been received: how often the weights of each rank had been updated when the ticket was issued.
    updates: list[int] | None
    # How many tokens it samples: none before the prompt's end, one more than the drafted ones that are right.
    sampled: int


@dataclass
class Load:
    """What a pool beside ours loads in a step."""

    blocks: set[int]
    places: Places
    fails: bool


@dataclass
class LostStep:
    """What comes of a rank whose step has failed."""

    # What it reports with the failure, if vLLM has that.
    told: KVConnectorOutput | None = None


class StepFailedError(RuntimeError):
    """A step has failed on a rank."""


@dataclass
class EngineStep:
    """A step on its way from the core to the ranks and back."""

    output: SchedulerOutput
    # The connector's part.
    step: Any
    parts: list[Part] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    # On prefill: the blocks that preempted requests had.
    vacated: dict[str, set[int]] = field(default_factory=dict)
    # On decode: `Engine._rejected` of each request, and by how many drafted tokens this step has raised it.
    rejected: list[tuple[list[int], int]] = field(default_factory=list)
    # The ranks' results, in order.
    results: list[SimpleQueue] = field(default_factory=list)
    # By pipeline stage: how many of its ranks have computed the step, and what says that all have.
    computed: list[int] = field(default_factory=list)
    passed_on: list[Event] = field(default_factory=list)
    # See `places`.
    _places: dict[tuple[str, int], Places] = field(default_factory=dict)
    # How it fails on each rank, as `LOSSES` has it.
    failing: Sequence[str] = ()
    # Whether it, or a step that it follows, fails: its KV is wrong, and vLLM drops what the model answers.
    is_spoilt: bool = False

    @property
    def computes(self) -> bool:
        return bool(self.output.total_num_scheduled_tokens)

    def places(self, kind: str, group: int) -> Places:
        """Returns the slots of a cache group that all parts have written, or have read. `kind`: which."""
        if (kind, group) not in self._places:
            self._places[kind, group] = Places.joined([getattr(part, kind)[group] for part in self.parts])
        return self._places[kind, group]


class _Device(CpuDevice):
    """A CPU whose ranks exchange bytes in memory."""

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank
        self._calls: dict[int, int] = {}
        # What the collective that comes next is for.
        self.purpose: object = None
        super().__init__()

    def new_groups(self, rank_lists: Sequence[tuple[int, ...]], timeout_s: float) -> dict[tuple[int, ...], Any]:
        groups = self._rank.engine.groups
        return {
            ranks: groups.setdefault(ranks, _ExchangeGroup(ranks)) for ranks in rank_lists if self._rank.index in ranks
        }

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, group: Any) -> None:
        if group.is_closed:
            raise RuntimeError("another rank has closed its connections")
        number = self._calls[id(group)] = self._calls.get(id(group), 0) + 1
        world = self._rank.engine.world
        call = group.calls.setdefault(number, _Exchange())
        call.parts[self._rank.index] = (out, inp)
        call.purposes.append((len(inp), self.purpose))
        if not self._rank.engine.is_faulty:
            world.oracle.exchange(self._rank, call.purposes)
        if len(call.parts) < len(group.ranks):
            if not call.over.wait(world.config.collective_timeout_s):
                group.is_closed = world.scenario.shape.survives_faults  # a rank may have missed this exchange
                raise RuntimeError("timed out")
            return
        size = len(inp) // len(group.ranks)
        for to, receiver in enumerate(group.ranks):
            for of, sender in enumerate(group.ranks):
                sent = call.parts[sender][1][to * size : (to + 1) * size]
                call.parts[receiver][0][of * size : (of + 1) * size] = sent
        del group.calls[number]
        call.over.set()


class _ExchangeGroup:
    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.calls: dict[int, _Exchange] = {}
        self.is_closed = False


@dataclass
class _Exchange:
    """One collective: what each rank receives into and sends."""

    parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    purposes: list[tuple[int, object]] = field(default_factory=list)
    over: Event = field(default_factory=Event)


class Rank:
    """A rank's process: the model's thread, whose steps call the connector's worker as vLLM does."""

    worker: Any

    def __init__(self, engine: "Engine", index: int) -> None:
        self.engine = engine
        self.index = index
        self.name = f"{engine.name}/{index}"
        self.process = kernel().process(self.name)
        self._inbox = SimpleQueue()
        self._heard_at = 0.0
        # Which prefix each block is for, by the prefix hash of its first token.
        self.content: dict[int, int] = {}
        # How often each block was taken from a preempted request whose transfer has failed. Its writes that began
        # before may read anything there.
        self.taken: Counter[int] = Counter()
        # What happens when the stopped process goes on.
        self.when_it_goes_on: list[Callable[[], None]] = []
        self.stage, self._of_stage = divmod(index, engine.tp)
        shape = engine.world.scenario.shape
        self.caches = Caches(shape, engine.blocks, engine.tp, self._of_stage, self.stage, engine.pp, engine.dcp)
        self.loaded = LoadedWeights()
        self._draw = kernel().draws(f"steps of {self.name}")
        kernel().spawn(self._run, f"{self.name}/model", self.process)

    def hear(self, step: EngineStep | Callable[[], None]) -> None:
        """The core sends a step, or something else to do. They arrive in order."""
        self._heard_at = max(self._heard_at + 1e-6, kernel().now + self._message_s())
        kernel().at(self._heard_at - kernel().now, self._inbox.put, step)

    def _message_s(self) -> float:
        return 0.00005 + 0.0003 * self._draw.random()

    def _run(self) -> None:
        self._start()
        while True:
            step = self._inbox.get()
            if not isinstance(step, EngineStep):
                step()
                continue
            result = self._run_or_fail(step)
            kernel().at(self._message_s(), step.results[self.index].put, result)

    def _run_or_fail(self, step: EngineStep) -> KVConnectorOutput | LostStep:
        how = step.failing[self.index] if step.failing else ""
        if how == "before":
            return LostStep()
        try:
            told = (self._prefill if self.engine.prefills else self._decode)(step, how == "during")
        except (StepFailedError, KeyError) as error:
            # KeyError: the step sends KV of a request that the rank has not heard of, because it has lost a step.
            if isinstance(error, KeyError) and not self.engine.world.scenario.shape.survives_faults:
                raise
            # As vLLM ends a step in which an exception comes up.
            self.worker.end_forward(error)
            self.worker.end_step()
            self.worker.take_results()
            self.worker.take_lost_blocks()
            self.worker.take_report()
            return LostStep()
        return LostStep(told if how == "reported" else None) if how else told

    def _start(self) -> None:
        engine, world = self.engine, self.engine.world
        device = self.device = _Device(self)
        limits = TransferLimits.over("tcp", world.config.write_timeout_s)
        transfer = self.transfer = TransferEngine("127.0.0.1", "tcp", limits)
        world.settle_s = transfer.limits.settle_s
        registered = self.caches.registered
        transfer.register(registered.regions(), of_caches=True)
        info = RankInfo(
            engine_id=engine.started_as,
            model=engine.model,
            host="127.0.0.1",
            rank=self._of_stage,
            sharding=sharding(engine.tp, engine.dcp, BLOCK),
            pp_rank=self.stage,
            pp=engine.pp,
            stage_ranks=tuple(range(self.stage * engine.tp, (self.stage + 1) * engine.tp)),
            draft="",
            settings={},
        )
        common = (info, world.config, device, transfer, registered)
        if engine.prefills:
            self.worker = PrefillWorker(*common, _PREFILL_STEP_TOKENS, self.loaded, peers=engine.peers)
        else:
            self.worker = DecodeWorker(*common, self.loaded, None, engine.fails_by_request, engine.peers)
        engine.rank_is_ready()

    def _layer(self) -> None:
        kernel().park(_LAYER_S * (0.5 + self._draw.random()))

    def _await_stage(self, step: EngineStep) -> None:
        """Waits for what the pipeline stage before computes."""
        if self.stage:
            step.passed_on[self.stage - 1].wait()

    def _pass_on(self, step: EngineStep) -> None:
        step.computed[self.stage] += 1
        if step.computed[self.stage] == self.engine.tp:
            step.passed_on[self.stage].set()

    # What vLLM has all ranks do between steps.

    def update_weights(self) -> None:
        with self.loaded.changing("update_weights"):
            kernel().park(0.002 * self._draw.random())
            self.caches.updates += 1

    def sleep(self) -> None:
        self.worker.sleep()
        self.caches.forget()

    def wake(self) -> None:
        self.worker.wake()

    def _fill(self, layer: Layer, step: EngineStep, wrong: Array | None = None) -> None:
        written = step.places("written", layer.group)
        self.caches.fill(layer, written, np.ones(len(written.slots), bool) if step.is_spoilt else wrong)

    def clean(self) -> None:
        """vLLM's own `handle_ft_command` cleans its runner, which this rank has none of."""

    def _prefill(self, step: EngineStep, fails: bool) -> KVConnectorOutput:
        worker, oracle = self.worker, self.engine.world.oracle
        worker.preempted(step.step)
        for request_id, blocks in step.vacated.items():
            if (transfer := worker._transfers.get(request_id)) is not None and transfer.state.failure is not None:
                self.taken.update(blocks)
        worker.start_step(step.step)
        invalid: set[int] = set()
        if step.computes:
            self._await_stage(step)
            wrong = self._load(step, invalid) if step.loads or self.engine.pool else None
            for part in step.parts:
                self.content.update(part.blocks)
            if not step.is_spoilt:
                oracle.reads(self, step, states=True)
            for layer in self.caches.layers:
                self._layer()
                self._fill(layer, step, wrong)
                with oracle.hook(self.process, "push_layer", oracle.backpressure_s):
                    worker.push_layer(layer.name)
                if fails:
                    raise StepFailedError
            if not (self.engine.pool or step.is_spoilt):
                oracle.reads(self, step, states=False)
            self._pass_on(step)
        if fails:
            raise StepFailedError
        worker.end_forward()
        if step.computes:
            worker.end_step()
        with oracle.hook(self.process, "take_results", step.step.wait_s):
            results = worker.take_results()
        return KVConnectorOutput(
            finished_sending=results.sent or None,
            invalid_block_ids=invalid,
            kv_connector_worker_meta=self._meta(worker.take_report()),
        )

    def _meta(self, report: WorkerReport | None) -> Any:
        if report is None:
            return None
        ours = ReportMetadata(report)
        return MultiKVConnectorWorkerMetadata((ours, None)) if self.engine.pool else ours

    def _load(self, step: EngineStep, invalid: set[int]) -> Array | None:
        """Loads what a pool has. Returns which of the step's tokens are computed from wrong KV, as a mask."""
        for load in step.loads:
            for slot, prefix in zip(load.places.slots.tolist(), load.places.hashes.tolist(), strict=True):
                if slot % BLOCK == 0:
                    self.content[slot // BLOCK] = prefix
            if load.fails:
                invalid |= load.blocks
                continue
            for layer in self.caches.layers:
                self.caches.fill(layer, load.places)
        computed = step.places("written", 0).slots
        masks = []
        for part in step.parts:
            read = part.read[0]
            others = ~np.isin(read.slots, computed)  # what this step computes itself is right
            read = Places(read.slots[others], read.hashes[others])
            differ = any(self.caches.wrong_slots(each, read) for each in self.caches.layers)
            masks.append(np.full(len(part.written[0].slots), differ))
        mask = np.concatenate(masks)
        return mask if mask.any() else None

    def _decode(self, step: EngineStep, fails: bool) -> KVConnectorOutput:
        worker, oracle = self.worker, self.engine.world.oracle
        with oracle.hook(self.process, "start_step", 0.0):
            worker.start_step(step.step)
        if fails:
            raise StepFailedError
        if step.computes:
            self._await_stage(step)
            self._layer()
            if not step.is_spoilt:
                oracle.reads(self, step, states=True)
            for layer in self.caches.layers:
                self._fill(layer, step)
            if not step.is_spoilt:
                oracle.reads(self, step, states=False)
                oracle.starts(self, step)
            self._pass_on(step)
        with oracle.hook(self.process, "take_results", step.step.wait_s):
            results = worker.take_results()
        lost, report = worker.take_lost_blocks(), worker.take_report()
        return KVConnectorOutput(
            finished_recving=results.received or None,
            invalid_block_ids=lost,
            kv_connector_worker_meta=None if report is None else ReportMetadata(report),
            **({"failed_recving": results.failed} if HAS_TRANSFER_RESULTS else {}),
        )


class Engine:
    """An engine's core process, with vLLM's scheduler."""

    def __init__(self, world: "World", prefills: bool, number: int) -> None:
        shape = world.scenario.shape
        self.world = world
        self.prefills = prefills
        self.number = number
        self.name = f"{'prefill' if prefills else 'decode'}{number}"
        self.tp = shape.prefill_tp if prefills else shape.decode_tp
        self.pp = shape.prefill_pp if prefills else shape.decode_pp
        self.dcp = 1 if prefills else shape.decode_dcp
        self.cache_groups = groups_of(shape, self.dcp)
        self.blocks = shape.prefill_blocks if prefills else shape.decode_blocks
        self.pool: Any = None
        self._steps = shape.prefill_steps if prefills else shape.decode_steps
        self._drafts = 0 if prefills else shape.drafts
        self.process = kernel().process(self.name)
        self.inbox = SimpleQueue()
        self.api = world.api_for(self)
        # Collectives of its ranks, by the ranks in them.
        self.groups: dict[tuple[int, ...], Any] = {}
        self.is_up = False
        self.started_as = ""
        # On prefill: what its metric of that name says.
        self.first_tokens = 0
        self.is_asleep = False
        # It goes to sleep for so many seconds before its next step. 0: it does not.
        self._to_sleep_s = 0.0
        # The blocks that tickets name and that ranks have not given back, by ticket.
        self.open_blocks: dict[int, str] = {}
        self.ranks: list[Rank] = []
        self._in_flight: deque[EngineStep] = deque()
        # Block tables, and up to which token KV was checked, by request.
        self._tables: dict[str, list[list[int]]] = {}
        self._checked: dict[str, int] = {}
        # Requests whose KV is awaited, and then received: how often the weights of each rank had been updated when the
        # ticket was issued.
        self._awaited: dict[str, list[int]] = {}
        self._received: dict[str, list[int]] = {}
        # Drafted tokens that steps in flight reject. vLLM counts them as computed until it has these steps' outputs.
        self._rejected: dict[str, list[int]] = {}
        # Prefix hashes of all tokens that a request has or will have.
        self.hashes: dict[str, Array] = {}
        self._draw = kernel().draws(f"pool beside {self.name}")
        self._draw_drafts = kernel().draws(f"drafts of {self.name}")
        # How a step fails, and how long the engine then stands still: the next one, and the last one that did.
        self._next_loss: tuple[Sequence[str], float] | None = None
        self._stands_still_s = 0.0
        # Whether a step that fails is on its way, or has failed.
        self.is_faulty = False
        kernel().spawn(self._run, f"{self.name}/core", self.process)

    @property
    def processes(self) -> list[Any]:
        apis = [] if self.api is None else [self.api.process]
        return [self.process, *(rank.process for rank in self.ranks), *apis]

    def _run(self) -> None:
        self._start()
        while True:
            while not self.vllm.has_requests() and not self._in_flight and not self._to_sleep_s:
                self._handle(self.inbox.get())
            self._handle_all()
            if self._to_sleep_s:
                self._sleep(self._to_sleep_s)
            else:
                self._step()

    def _start(self) -> None:
        config = self.world.configurations.of(self.prefills, self.number, self.world)
        shape = self.world.scenario.shape
        caches = _caches(shape, self.blocks)
        block, scheduler = BLOCK * self.dcp, AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        self.vllm: Any = make_scheduler(config, caches, scheduler, block_size=block, hash_block_size=block)
        connectors = getattr(self.vllm.connector, "_connectors", [self.vllm.connector])
        self.connector = connectors[0]
        if len(connectors) > 1:
            self.pool = connectors[1]
        self.role = self.connector._role
        self.role._idle._longest_s = _IDLE_WAIT_S
        self.model = model_summary(config)
        stats = self.connector.get_kv_connector_stats()
        gauges = {} if stats is None else stats.data["gauges"]
        self.first_tokens = gauges.get(PREFILL_FIRST_TOKENS.name, {"": 0})[""]
        self.started_as = self.connector._setup.started_as
        self.peers = self.connector._setup.peers
        asks_again = shape.never and shape.decode_policy == "recompute"
        self.fails_by_request = HAS_TRANSFER_RESULTS and (asks_again or not lost_blocks_say_all(caches))
        self.all_free = self.free_blocks
        if not self.prefills and self.api is None:
            self.role._recipients._metaserver.engine = self
        self._ready = Event()
        for index in range(self.tp * self.pp):
            self.ranks.append(Rank(self, index))
        self._ready.wait()
        self._shake_hands()
        self._aggregator = KVOutputAggregator(self.tp * self.pp)
        self.is_up = True
        kernel().tell("{} has started", self.name)

    def _shake_hands(self) -> None:
        if not self.prefills:
            ranks = {(each.stage, n): HandshakeMetadata(*each.worker.handshake()) for n, each in enumerate(self.ranks)}
            self.role.take_handshakes(ranks)

    def rank_is_ready(self) -> None:
        if len(self.ranks) == self.tp * self.pp and all(hasattr(rank, "worker") for rank in self.ranks):
            self._ready.set()

    @property
    def free_blocks(self) -> int:
        return int(self.vllm.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def load(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        return len(self.vllm.running), len(self.vllm.waiting)

    @property
    def is_idle(self) -> bool:
        has_work = self.vllm.has_requests() or self._in_flight or self._to_sleep_s
        return not has_work and self.inbox.empty()

    def request(self, name: str, tokens: Sequence[int], params: dict[str, Any], max_tokens: int) -> Request:
        """Returns a request to add."""
        fields = {"block_hasher": self.world.configurations.hashers[self.dcp]}
        return make_request(name, tokens, params, fields, max_tokens=max_tokens)

    # What others ask for.

    def add(self, request: Request, hashes: Array, pooled: int = 0) -> None:
        """`hashes`: of the tokens that the request has or will have. `pooled`: tokens that the pool has."""
        if self.prefills:
            self.world.oracle.prefill_asked(request.prompt_token_ids or ())
        self.inbox.put(("add", request, hashes, pooled))

    def abort(self, request_id: str) -> None:
        self.inbox.put(("abort", request_id))

    def reset(self) -> None:
        """Resets the prefix cache, which preempts all running requests."""
        self.inbox.put(("reset",))

    def update_weights(self) -> None:
        """Gives all ranks other weights."""
        self.inbox.put(("weights",))

    def sleep(self, seconds: float) -> None:
        """Frees the memory of the caches for a while, without requests."""
        self.inbox.put(("sleep", seconds))

    def lose_step(self, failing: Sequence[str], seconds: float) -> None:
        """Has the next step fail. `failing`: how on each rank. An operator has the engine go on after some seconds."""
        self._next_loss = failing, seconds

    def _handle_all(self) -> None:
        while not self.inbox.empty():
            self._handle(self.inbox.get_nowait())

    def _handle(self, message: tuple[Any, ...]) -> None:
        what, *args = message
        if what == "add":
            request, self.hashes[request.request_id], pooled = args
            if self.pool is not None and pooled:
                self.pool.has[request.request_id] = pooled
            self.vllm.add_request(request)
        elif what == "abort":
            self.vllm.finish_requests(args[0], RequestStatus.FINISHED_ABORTED)
        elif what == "weights":
            kernel().tell("{} gets other weights", self.name)
            self._on_all_ranks("update_weights")
        elif what == "sleep":
            self._to_sleep_s = args[0]
        else:
            try:
                self.vllm.reset_prefix_cache(reset_running_requests=True)
            except RuntimeError as error:  # vLLM refuses it while a connector has blocks
                kernel().tell("the prefix cache is not reset: {}", str(error)[:60])

    def _on_all_ranks(self, what: str) -> None:
        """Has all ranks do something after the steps that are on their way. Returns when they have done it."""
        done: list[Event] = []
        for rank in self.ranks:
            done.append(over := Event())

            def do(rank: Rank = rank, over: Event = over) -> None:
                getattr(rank, what)()
                over.set()

            rank.hear(do)
        for each in done:
            each.wait()

    def _sleep(self, seconds: float) -> None:
        """As vLLM's `/sleep`: aborts all requests, goes on until nothing is left of them, and frees memory.

        It frees none if its prefix cache cannot be emptied. 0.23 does not wait until blocks are free.
        """
        kernel().tell("{} sleeps for {} s", self.name, seconds)
        self.is_asleep = True
        running = [name for name, request in self.vllm.requests.items() if not request.is_finished()]
        for request_id in running:  # ranks may still send the others' KV
            self.vllm.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            self._forget(request_id)
            self._say(request_id, [], FinishReason.ABORT, None)
        self.vllm.set_pause_state(PauseState.PAUSED_NEW)
        while self.vllm.has_requests() or self._in_flight:
            self._step()
        try:
            self.vllm.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError as error:
            kernel().tell("{} does not sleep: {}", self.name, str(error)[:60])
        else:
            self._on_all_ranks("sleep")
            self.open_blocks.clear()
            kernel().park(seconds)
            self._on_all_ranks("wake")
            self._shake_hands()
            kernel().tell("{} is awake", self.name)
        self.vllm.set_pause_state(PauseState.UNPAUSED)
        self._to_sleep_s, self.is_asleep = 0.0, False

    # Steps.

    def _step(self) -> None:
        if self.vllm.has_requests():
            step = self._schedule()
            for rank in self.ranks:
                rank.hear(step)
            self._in_flight.append(step)
            if len(self._in_flight) < self._steps and self.vllm.has_requests():
                if not step.computes:
                    kernel().park(0.001)
                return
        step = self._in_flight.popleft()
        try:
            self._end_step(step, handles=True)
        except StepFailedError as error:
            self._recover(error)
        if not step.computes and self.vllm.has_requests():
            kernel().park(0.001)

    def _end_step(self, step: EngineStep, handles: bool = False) -> None:
        answers = self._answers(step)
        if handles:
            self._handle_all()
        self._update(step, aggregated(self._aggregator, answers).kv_connector_output)

    def _answers(self, step: EngineStep) -> list[KVConnectorOutput]:
        """Returns the ranks' answers. Keeps what they say and raises StepFailedError if one has failed, as vLLM's
        executor does."""
        answers = [result.get() for result in step.results]
        if any(isinstance(each, LostStep) for each in answers):
            told = [each.told if isinstance(each, LostStep) else each for each in answers]
            self._aggregator.ft_defer_kv_connector_outputs([each for each in told if each and not each.is_empty()])
            raise StepFailedError
        return answers

    def _recover(self, error: StepFailedError) -> None:
        """vLLM's own sentinel aborts all requests, ends the steps on their way, and goes on, or is killed."""
        from vllm.v1.fault_tolerance import EngineCoreSentinel

        kernel().tell("a step of {} has failed", self.name)
        said: list[tuple[int, Any]] = []
        core = SimpleNamespace(
            engine_index=0,
            scheduler=self.vllm,
            model_executor=self,
            batch_queue=deque((_Pending(self, step), None, None) for step in reversed(self._in_flight)),
            output_queue=SimpleNamespace(put_nowait=said.append),
            _send_abort_outputs=self._say_aborted,
        )
        self._in_flight.clear()
        sentinel = EngineCoreSentinel(core, self.vllm.vllm_config.parallel_config)
        sentinel.on_fault(error)
        kernel().park(self._stands_still_s)
        sentinel.handle_command(0, 1, {"instruction": "retry", "params": {}, "request_id": "of-an-operator"})
        answer = said[-1][1].utility_output.result.result
        kernel().tell("{} goes on: {}", self.name, answer)
        works = not any(rank.worker.failure for rank in self.ranks)
        works = works and len({rank.worker.exchanged_steps for rank in self.ranks}) == 1
        if answer["success"] != works:
            self.world.oracle.violated(f"{self.name} answers {answer}, although it {'works' if works else 'is broken'}")
        self.is_faulty = False
        if not works:
            kernel().at(0.0, self.world.restart, self, 0.1)
            kernel().park()

    def _say_aborted(self, requests: Sequence[Request]) -> None:
        for request in requests:
            for known in (self._tables, self._checked):
                known.pop(request.request_id, None)
            self._say(request.request_id, [], FinishReason.ABORT, None)

    # What the sentinel asks of vLLM's executor.

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        if isinstance(method, str):
            self._on_all_ranks("clean")
            return []
        answers = []
        for rank in self.ranks:
            kv_transfer_state._KV_CONNECTOR_AGENT = SimpleNamespace(role=rank.worker)
            answers.append(method(rank))
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        return answers

    def init_kv_output_aggregator(self, connector: Any) -> None:
        self._aggregator = KVOutputAggregator.from_connector(connector, self.tp * self.pp)

    def _schedule(self) -> EngineStep:
        oracle = self.world.oracle
        # A step without tokens may sleep until a rank wakes it (`IdleWait.pause`).
        with oracle.hook(self.process, "schedule", 0.0 if self.prefills else PAUSE_S):
            output = self.vllm.schedule()
        metadata: Any = output.kv_connector_metadata
        step = EngineStep(output, getattr(metadata, "metadata", (metadata,))[0].step)
        step.results = [SimpleQueue() for _ in self.ranks]
        step.computed, step.passed_on = [0] * self.pp, [Event() for _ in range(self.pp)]
        if self._next_loss is not None:
            (step.failing, self._stands_still_s), self._next_loss = self._next_loss, None
        self.is_faulty = step.is_spoilt = self.is_faulty or any(step.failing[: len(self.ranks)])
        if self.prefills:
            step.vacated = {name: set().union(*self._tables.get(name, ())) for name in step.step.preempted}
            oracle.prefill_scheduled(self)
        else:
            for expect in step.step.expects:
                kernel().tell("issues a ticket for {}: blocks {}", expect.request_id, expect.blocks)
                self.open_blocks.update(dict.fromkeys(expect.blocks, expect.request_id))
                oracle.ticket_issued(self, expect.request_id)
                self._awaited[expect.request_id] = [rank.caches.updates for rank in self.ranks]
        for request_id, computed in self._take_tables(output).items():
            step.parts.append(self._part(step, request_id, computed))
            if self.pool is not None and request_id in self.pool.loads:
                step.loads.append(self._load(request_id))
        said = self._words(step.step)
        if step.computes or said:
            kernel().tell("step: {}{}", dict(output.num_scheduled_tokens), said)
        return step

    def _forget(self, request_id: str) -> None:
        for known in (self._tables, self._checked, self._rejected):
            known.pop(request_id, None)

    def _take_tables(self, output: SchedulerOutput) -> dict[str, int]:
        """Takes the step's block tables. Returns how many tokens each of its requests had computed before."""
        computed = {}
        for new in output.scheduled_new_reqs:
            self._forget(new.req_id)
            self._tables[new.req_id] = [list(each) for each in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, blocks, before in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._forget(request_id)
                self._tables[request_id] = [[] for _ in self.cache_groups]
            for known, more in zip(self._tables[request_id], blocks or (), strict=False):
                known += more
            computed[request_id] = before
        return computed

    def _part(self, step: EngineStep, request_id: str, computed: int) -> Part:
        tokens = step.output.num_scheduled_tokens[request_id]
        drafted = len(step.output.scheduled_spec_decode_tokens.get(request_id, ()))
        rejected = self._draw_drafts.randint(0, drafted) if drafted else 0
        hashes = self.hashes[request_id]
        if self._drafts:
            ahead = self._rejected.setdefault(request_id, [0])
            computed = min(computed - ahead[0], len(hashes))  # more may be drafted than the answer has
            ahead[0] += rejected
            step.rejected.append((ahead, rejected))
        stop = min(computed + tokens, len(hashes))
        right = computed + tokens - rejected
        first = 0 if self.pool is not None else min(computed, self._checked.get(request_id, 0))
        self._checked[request_id] = computed
        written, read, blocks = [], [], []
        for group, ids in zip(self.cache_groups, self._tables[request_id], strict=True):
            table = np.asarray(ids)
            slots, at = group.written(table, computed, stop)
            written.append(Places(slots, np.where(at < right, hashes[at], ~hashes[at]) if rejected else hashes[at]))
            slots, at = group.read(table, first, computed)
            read.append(Places(slots, hashes[at]))
            numbers = range(computed // group.span, -(-stop // group.span))
            blocks += [(ids[number], int(hashes[number * group.span])) for number in numbers if ids[number]]
        samples = not self.vllm.requests[request_id].is_prefill_chunk
        sampled = 1 + drafted - rejected if samples else 0
        return Part(request_id, written, read, blocks, self._received.pop(request_id, None), sampled)

    def _load(self, request_id: str) -> Load:
        tokens, _ = self.pool.loads.pop(request_id)
        at = np.asarray(tokens)
        slots = np.asarray(self._tables[request_id][0])[at // BLOCK] * BLOCK + at % BLOCK
        fails = self._draw.random() < self.world.scenario.faults.load_fails
        blocks = set((slots // BLOCK).tolist())
        if fails:
            kernel().tell("the pool will not load tokens {} to {} of {}", at[0], at[-1], request_id)
        return Load(blocks, Places(slots, self.hashes[request_id][at]), fails)

    def _words(self, step: Any) -> str:
        if not self.prefills:
            return "".join(f", cancels the ticket: {reason}" for reason in step.cancelled.values())
        sends = (f", sends {s.request_id}[{s.start}:{s.stop}]{' the last' * s.last}" for s in step.sends)
        return "".join([*sends, *(f", {name} has ended" for name in step.finished)])

    def note(self, told: KVConnectorOutput | None) -> None:
        """Requests that all ranks report have no open ticket any more."""
        lost = {self.open_blocks.get(block) for block in told.invalid_block_ids} if told else set()
        for request_id in (told.finished_recving or ()) if told else ():
            failed = told is not None and request_id in getattr(told, "failed_recving", ())
            kernel().tell("has {} {}", "failed to receive" if failed else "received, or failed to,", request_id)
            awaited = self._awaited.pop(request_id, None)
            if awaited is not None and not failed and request_id not in lost:
                self._received[request_id] = awaited
            self.open_blocks = {block: owner for block, owner in self.open_blocks.items() if owner != request_id}

    def _update(self, step: EngineStep, told: KVConnectorOutput | None) -> None:
        self.note(told)
        names = list(step.output.num_scheduled_tokens)
        sampled = {part.request_id: part.sampled for part in step.parts}
        for ahead, rejected in step.rejected:
            ahead[0] -= rejected
        output = model_output(step.output, [[TOKEN] * sampled[name] for name in names], told)
        with self.world.oracle.hook(self.process, "update_from_output", 0.0):
            by_client = self.vllm.update_from_output(step.output, output)
            if self._drafts and not isinstance(self.vllm, AsyncScheduler):
                drafting = [name for name in names if sampled[name]]
                self.vllm.update_draft_token_ids(DraftTokenIds(drafting, [[TOKEN] * self._drafts for _ in drafting]))
        for outputs in by_client.values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self._forget(each.request_id)
                self._say(each.request_id, each.new_token_ids, each.finish_reason, each.kv_transfer_params)

    def _say(self, request_id: str, tokens: list[int], reason: FinishReason | None, params: Any) -> None:
        """Tells whoever has asked what was generated, and how the request has ended."""
        if self.api is not None and self.api.answered(request_id, len(tokens), reason, params):
            return
        if reason is not None:
            self.world.router.answered(self, request_id, reason, params)


@dataclass
class _Pending:
    """As vLLM's future of a step that was on its way when another one failed."""

    engine: Engine
    step: EngineStep

    def result(self) -> ModelRunnerOutput:
        whole = aggregated(self.engine._aggregator, self.engine._answers(self.step))
        self.engine.note(whole.kv_connector_output)
        return whole


os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
