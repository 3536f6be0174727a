# SPDX-License-Identifier: Apache-2.0
"""The programs of ranks' processes: our real worker classes, over caches without a model."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import psutil
import torch

from harness.kv import Model, Prompt, Side, by_token, from_nz, layer_name, make_caches, quantized, truth
from harness.states import LAYER
from vllm_ascend_pd.core.caches import Quantize, StateSpec, describe
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.layout import LayerSpec, Order, Packing
from vllm_ascend_pd.core.observer import tell_all
from vllm_ascend_pd.core.step import Send
from vllm_ascend_pd.core.topology import RankInfo, sharding
from vllm_ascend_pd.core.weights import LoadedWeights
from vllm_ascend_pd.decode.worker import DecodeWorker
from vllm_ascend_pd.device.event import DeviceError, Event
from vllm_ascend_pd.device.packing import quantize_c8
from vllm_ascend_pd.observe.stats import PrefillStats
from vllm_ascend_pd.observe.traces import decode_trace, prefill_trace
from vllm_ascend_pd.prefill.worker import PrefillWorker
from vllm_ascend_pd.transport.batches import Batch, TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.peers import read_peers
from vllm_ascend_pd.transport.writer import Flight, TransferError

HOST = "127.0.0.1"
MODEL = "a model of random numbers"
DRAFT = "a draft of random numbers"


@dataclass(frozen=True)
class Hooks:
    """What a model runner tells the connector in a step: layers it saves, in this order and as often (None: each
    once), and whether that the step has ended."""

    saved: tuple[int, ...] | None = None
    ended: bool = True


ONCE = Hooks()
"""Each layer as it is computed, then the step's end."""


def _make_device(name: str, index: int) -> Any:
    if name == "cpu":
        from vllm_ascend_pd.device.cpu import CpuDevice

        return CpuDevice()
    from vllm_ascend_pd.device.npu import NpuDevice

    torch.npu.set_device(index)
    return NpuDevice()


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _of_one_head(cache: torch.Tensor) -> torch.Tensor:
    return cache.squeeze(2)


@dataclass
class _RankBase:
    model: Model
    side: Side
    rank: int  # of its pipeline stage
    pp_rank: int
    init: str
    engine_id: str
    config: dict[str, Any]
    on: str  # "cpu" or "npu"
    host: str = HOST
    first_device: int = 0
    """The NPU of the engine's first rank."""
    is_packed: ClassVar[bool] = False
    """Whether caches are as decode keeps them."""

    def __post_init__(self) -> None:
        self.states: list[torch.Tensor] = []
        self._warnings = _Warnings()
        logging.getLogger("vllm_ascend_pd").handlers = [self._warnings]  # the last rank of this process had its own
        side = self.side
        first = self.pp_rank * side.ranks
        world, rank = side.ranks * side.pp, first + self.rank
        self.device = _make_device(self.on, self.first_device + rank)
        backend = "hccl" if self.on == "npu" else "gloo"
        torch.distributed.init_process_group(backend, init_method=self.init, world_size=world, rank=rank)
        self.parsed = ConnectorConfig(**self.config)
        dealt = sharding(side.tp, side.dcp, side.interleave, side.pcp)
        self.caches, specs = self.make()
        self.registered = describe(
            self.by_name(),
            specs,
            heads_first=self.model.order is Order.HEAD_MAJOR,
            readers=() if self.side.buffers else None,
            quantize=self.quantize(),
        )
        protocol = self.device.transfer_protocol
        limits = TransferLimits.over(protocol, timeout_s=self.parsed.write_timeout_s)
        self.engine = TransferEngine(self.host, protocol, limits)
        self.engine.register(self.registered.regions())
        self.loaded = LoadedWeights()
        self.rank_info = RankInfo(
            engine_id=self.engine_id,
            model=MODEL,
            host=self.host,
            rank=self.rank,
            sharding=dealt,
            pp_rank=self.pp_rank,
            pp=side.pp,
            stage_ranks=tuple(range(first, first + side.ranks)),
            draft=DRAFT if self.model.draft_layers else "",
        )

    def make(self) -> tuple[dict[str, tuple[torch.Tensor, ...]], dict[str, LayerSpec | StateSpec]]:
        """Allocates the rank's caches. Returns them and what they hold, by layer."""
        side = self.side
        caches = make_caches(self.model, side, self.rank, self.pp_rank, self.on, self.is_packed)
        dealt = sharding(side.tp, side.dcp, side.interleave, side.pcp)
        heads = len(self._heads())
        total = 1 if self.model.replicated else self.model.heads
        spec = LayerSpec(0, side.block_size, heads, total, share=dealt.share(self.rank))
        copies = side.dcp if side.pcp == 1 else 1
        spec = replace(spec, copied_from=self.model.copied_from, copies=copies)
        specs: dict[str, Any] = dict.fromkeys(caches, spec)
        for layer in self.model.draft_layers:
            specs[layer_name(layer)] = replace(spec, draft=DRAFT)
        if self.model.whole_from is not None:
            specs |= {f"{layer}.index_cache": replace(spec, heads=1, total_heads=1) for layer in caches}
        specs = self.packed(specs)
        if self.model.states is not None:
            rank = self.rank % side.tp
            memory, self.states, specs[LAYER] = self.model.states.allocate(rank, side.tp, side.num_blocks, 1, self.on)
            caches[LAYER] = (memory,)
        return caches, specs

    def packed_layers(self) -> list[int]:
        """Returns the layers that decode keeps otherwise than prefill."""
        return [n for n in self.side.layers_of(self.pp_rank, self.model) if self.model.is_packed(n)]

    def packed(self, specs: dict[str, Any]) -> dict[str, Any]:
        """Returns the specs with how decode keeps these layers."""
        packings, salt = self.model.packings, self.model.salt
        for layer in self.packed_layers():
            scales = tuple(f"{salt}/{layer}/{part}" if p is Packing.INT8_NZ else "" for part, p in enumerate(packings))
            spec = specs[layer_name(layer)]
            specs[layer_name(layer)] = replace(spec, packings=packings, is_packed=self.is_packed, scales=scales)
        return specs

    def right_states(self, seed: int) -> list[torch.Tensor]:
        """Returns this rank's part of the states of a request with this seed."""
        assert self.model.states is not None
        return [torch.from_numpy(s) for s in self.model.states.of_rank(self.rank % self.side.tp, self.side.tp, 1, seed)]

    def by_name(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Returns the caches as an engine registers them."""
        if (first := self.model.whole_from) is None:
            return self.caches
        # An index has three dimensions, as MiniMax-M3's in vllm-ascend 0.30.
        indices = {f"{name}.index_cache": tuple(map(_of_one_head, c[first:])) for name, c in self.caches.items()}
        return {name: parts[:first] for name, parts in self.caches.items()} | indices

    def quantize(self) -> dict[tuple[str, int], Quantize]:
        """Returns what quantizes tensors on their way to decode, as `describe` takes it."""
        return {}

    def _heads(self, part: int = 0) -> range:
        return self.model.heads_of(self.rank % self.side.tp, self.side.tp, part)

    def do(self, action: Callable[..., Any], *args: Any) -> Any:
        """Runs `action(this rank, *args)`, a function at the top of a test's module."""
        return action(self, *args)

    def warnings(self) -> list[str]:
        """Returns what the product has logged here as a warning or worse."""
        return list(self._warnings.messages)

    def weight_updates(self) -> dict[str, int]:
        """Returns the weight updates in the worker's report."""
        report = self.worker.take_report()
        return report.weight_updates if report else {}

    def load_weights(self, seed: int) -> str:
        """Loads the weights of that seed, as vLLM's reload does; returns their fingerprint."""
        with self.loaded.changing("reload_weights", lambda: f"{seed:032x}"):
            pass
        return self.loaded.current.fingerprint

    def clear(self) -> None:
        for parts in self.caches.values():
            for cache in parts:
                cache.zero_()
        self.drain()

    def drain(self) -> None:
        """Waits until nothing is queued on the device any more."""
        if self.on == "npu":
            torch.npu.synchronize()

    def stop(self, reusable: bool) -> list[str]:
        """Closes everything; returns our threads and listening sockets that are left."""
        self.worker.close(5.0)
        self.device.close()
        self.engine.close()
        if reusable:  # groups of a device that has failed cannot be destroyed
            torch.distributed.destroy_process_group()
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("pd-")]
        listening = {c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
        # Mooncake and gloo have listeners of their own, which live as long as the process.
        return threads + [f"port {port}" for port in self.own_ports() & listening]

    def own_ports(self) -> set[int]:
        return set()


class PrefillRank(_RankBase):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.measured = PrefillStats(self.rank_info)
        self.worker = PrefillWorker(
            self.rank_info,
            self.parsed,
            self.device,
            self.engine,
            self.registered,
            self.side.step_tokens,
            self.loaded,
            tell_all(self.measured, prefill_trace(self.parsed.trace_dir, self.rank_info)),
            peers=read_peers(self.parsed, self.rank_info.host),
        )

    def quantize(self) -> dict[tuple[str, int], Quantize]:
        own = self._heads()

        def function(layer: int, part: int) -> Quantize:
            scale, offset = (each[own.start : own.stop].to(self.on) for each in self.model.scales(layer, part))
            inverse = 1.0 / scale[None]
            return lambda kv: quantize_c8(kv, inverse, offset[None])

        return {
            (layer_name(layer), part): function(layer, part)
            for layer in self.packed_layers()
            for part, packing in enumerate(self.model.packings)
            if packing is Packing.INT8_NZ
        }

    def step(self, step: Any, prompts: dict[str, Prompt], hooks: Hooks = ONCE) -> None:
        """One forward pass: each layer's KV is computed (copied from the truth), then saved as `hooks` says."""
        if self.on == "cpu":
            self._step(step, prompts, hooks)
            return
        import cann_on_host

        with cann_on_host.model_step():
            self._step(step, prompts, hooks)

    def _step(self, step: Any, prompts: dict[str, Prompt], hooks: Hooks) -> None:
        self.worker.preempted(step)
        self.worker.start_step(step)
        if not step.computes:  # vLLM calls neither the layers' hooks nor the step's end
            self.worker.end_forward()
            return
        # All before the first layer: nothing in between may wait for the device, as nothing in a model does.
        values = {layer: self.values(layer, step, prompts) for layer in self.side.layers_of(self.pp_rank, self.model)}
        own = list(values)
        for layer in own if hooks.saved is None else hooks.saved:
            if layer in own:
                self.worker.await_buffer(layer_name(layer))
                self.compute(layer, values.pop(layer, []))
                self.worker.push_layer(layer_name(layer))
                if self.model.whole_from is not None:
                    self.worker.push_layer(f"{layer_name(layer)}.index_cache")
        for layer, copies in values.items():
            self.worker.await_buffer(layer_name(layer))
            self.compute(layer, copies)
        self.worker.end_forward()
        if hooks.ended:
            self.worker.end_step()

    def compute(self, layer: int, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queues a layer's computation: `copies` are (part of the cache, what it must hold)."""
        for part, values in copies:
            part.copy_(values)

    def values(self, layer: int, step: Any, prompts: dict[str, Prompt]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the copies for `compute` of all that a step computes."""
        sends = [send for send in step.sends if not send.was_computed]
        copies = [copy for send in sends for copy in self._values(layer, prompts[send.request_id], send)]
        if layer == 0 and self.model.states is not None:
            for send in sends:  # each step changes a request's state in place
                prompt = prompts[send.request_id]
                right = self.right_states(prompt.seed if send.last else prompt.seed + 1000 + send.stop)
                copies += [(view[prompt.states[0]], state) for view, state in zip(self.states, right, strict=True)]
        return copies

    def _values(self, layer: int, prompt: Prompt, send: Send) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The KV of a send's tokens on the device, cut at the cache's blocks."""
        copies = []
        for part, cache in enumerate(self.caches[layer_name(layer)]):
            own = self._heads(part)
            side = self.side.of_part(self.model, part)
            held = side.places(self.rank, send.start, send.stop)
            values = truth(self.model, prompt.seed, layer, part, prompt.num_tokens)
            order = [token for tokens in held.values() for token, _ in tokens]
            values = values[order, own.start : own.stop].to(self.on)
            view = by_token(self.model, cache, side.block_size)
            done = 0
            for block, tokens in held.items():
                first = tokens[0][1]  # what a block holds of a send lies together
                rows = view[prompt.p_blocks[block], first : first + len(tokens)]
                copies.append((rows, values[done : done + len(tokens)]))
                done += len(tokens)
        return copies

    def begin_step(self, step: Any) -> None:
        """The step begins, and none of its layers is computed."""
        self.worker.start_step(step)

    def compute_unsent(self, sends: list[Any], prompts: dict[str, Prompt]) -> None:
        """Runs a forward pass of an earlier step, which computed these tokens and sent none of them."""
        for layer in self.side.layers_of(self.pp_rank, self.model):
            self.compute(
                layer, [copy for send in sends for copy in self._values(layer, prompts[send.request_id], send)]
            )

    def sent(self) -> tuple[set[str], dict[str, str]]:
        sent, report = self.worker.take_results().sent, self.worker.take_report()
        return sent, report.failed if report else {}

    def stats(self) -> dict[str, Any]:
        """What the worker has counted since the last time."""
        return self.measured.take(self.worker.status)

    def open_transfers(self) -> int:
        return len(self.worker._transfers)

    def is_granted(self) -> bool:
        """Whether decode has described itself and granted every request."""
        contacted = [transfer.state.destinations for transfer in self.worker._transfers.values()]
        return all(d is not None and all(rank.granted for rank in d.values()) for d in contacted)

    def has_grants(self, request_id: str) -> bool:
        """Whether decode has granted this request, or needs nothing of it."""
        destinations = self.worker._transfers[request_id].state.destinations
        return destinations is not None and all(d.granted for d in destinations.values())

    def open_failures(self) -> list[str]:
        """Returns why transfers have failed, of those that have."""
        return [t.state.failure for t in self.worker._transfers.values() if t.state.failure is not None]

    def slow_down(self, seconds: float) -> None:
        """Makes every write take that much longer from now on."""
        begin = TransferEngine.begin

        def late(*args: Any) -> Flight | None:
            time.sleep(seconds)
            return begin(self.engine, *args)

        self.engine.begin = late

    def lose_writes(self, many: float = math.inf, may_arrive: bool = False) -> None:
        """Makes the next batches fail after they have begun."""
        begin = TransferEngine.begin
        self.begun = 0

        class Lost:
            def __init__(self, session: str, flight: Flight | None) -> None:
                self.session, self.flight = session, flight

            def wait(self) -> None:
                if self.flight is not None:
                    self.flight.wait()
                raise TransferError(self.session, "lost by the test", retryable=True, may_arrive=may_arrive)

        def begin_lost(session: str, batch: Batch, *others: Any) -> Any:
            self.begun += 1
            flight = begin(self.engine, session, batch, *others)
            return Lost(session, flight) if self.begun <= many else flight

        self.engine.begin = begin_lost

    def batches_begun(self) -> int:
        return self.begun

    def poison(self, ranges: list[tuple[str, int, int]]) -> None:
        """Makes every write into one of decode's `ranges` (session, address, bytes) fail from now on."""
        healthy = self.engine.begin

        def begin_healthy(session: str, batch: Batch, *others: Any) -> Flight | None:
            theirs = [(begin, begin + size) for owner, begin, size in ranges if owner == session]
            if any(begin <= d < end for d in batch[1] for begin, end in theirs):
                raise TransferError(session, "injected by the test", retryable=True)
            return healthy(session, batch, *others)

        self.engine.begin = begin_healthy


def refuse_work(rank: PrefillRank) -> None:
    """Makes the device refuse the next layer's regrouping."""
    submit = rank.device.submit

    def refuse(work: Callable[[], None], after: Event) -> Event:
        rank.device.submit = submit
        raise DeviceError("refused by the test")

    rank.device.submit = refuse


class DecodeRank(_RankBase):
    is_packed = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.received_bytes = 0
        self.verified: Counter[str] = Counter()
        """Results of `verify_kv`."""
        self.cached_tokens: dict[str, int] = {}
        """By ticket: what prefill had of the prompt, as it says."""
        observer = tell_all(decode_trace(self.parsed.trace_dir, self.rank_info))
        self.worker = DecodeWorker(
            self.rank_info,
            self.parsed,
            self.device,
            self.engine,
            self.registered,
            self.loaded,
            observer,
            peers=read_peers(self.parsed, self.rank_info.host),
        )

    def own_ports(self) -> set[int]:
        return {int(self.worker.description.control.rpartition(":")[2])}

    def description(self) -> Any:
        return self.worker.description

    def step(self, step: Any) -> None:
        self.worker.start_step(step)

    def arrivals(self) -> tuple[set[str], set[str], dict[str, str]]:
        """Returns requests that ended, those of them that failed, and by ticket why tickets failed."""
        arrivals = self.worker.take_arrivals()  # before the report, as vLLM does: it says more of what has ended
        report = self.worker.take_report()
        self.received_bytes += sum(num_bytes for num_bytes, _ in report.received.values()) if report else 0
        self.cached_tokens |= report.cached if report else {}
        self.verified.update(report.verified if report else {})
        return arrivals.closed, arrivals.failed, report.failed if report else {}

    def kept(self, layer: int, part: int, cache: torch.Tensor) -> torch.Tensor:
        """Returns what a cache holds: `[num_blocks, tokens, heads, width]`."""
        if self.model.packing(layer, part) is not Packing.NONE:
            return from_nz(cache.cpu())
        return by_token(self.model, cache, self.side.of_part(self.model, part).block_size)

    def expected(self, layer: int, part: int, prompt: Prompt) -> torch.Tensor:
        """Returns what a cache must hold of a prompt: `[num_tokens, heads of the model, width]`."""
        values = truth(self.model, prompt.seed, layer, part, prompt.num_tokens)
        in_int8 = self.model.packing(layer, part) is Packing.INT8_NZ
        return quantized(values, *self.model.scales(layer, part)) if in_int8 else values

    def differences(self, prompts: list[Prompt]) -> list[str]:
        """Returns every place where the cache is wrong.

        It must hold the prompts' KV from their first uncached token on, and zeros in all blocks that belong to no
        request.
        """
        found = []
        for layer in self.side.layers_of(self.pp_rank, self.model):
            for part, cache in enumerate(self.caches[layer_name(layer)]):
                own = self._heads(part)
                view = self.kept(layer, part, cache).cpu()
                used = set()
                for prompt in prompts:
                    values = self.expected(layer, part, prompt)
                    places = self.side.of_part(self.model, part).places(self.rank, prompt.cached, prompt.num_tokens)
                    used |= {prompt.d_blocks[block] for block in places}
                    for block, tokens in places.items():
                        wrong = [
                            token
                            for token, place in tokens
                            if not torch.equal(view[prompt.d_blocks[block], place], values[token, own.start : own.stop])
                        ]
                        if wrong:
                            found.append(f"{prompt.request_id} layer {layer} part {part} token {wrong[0]}")
                for block in range(self.side.num_blocks):
                    if block not in used and view[block].any():
                        found.append(f"layer {layer} part {part}: block {block} belongs to nobody")
        return found + self._wrong_states(prompts)

    def _wrong_states(self, prompts: list[Prompt]) -> list[str]:
        found = []
        for part, view in enumerate(each.cpu() for each in self.states):
            for prompt in prompts:
                assert prompt.states is not None
                if not torch.equal(view[prompt.states[1]], self.right_states(prompt.seed)[part]):
                    found.append(f"{prompt.request_id} state {part}")
                view[prompt.states[1]] = 0
            found += [f"state {part}: block {n} belongs to nobody" for n, block in enumerate(view) if block.any()]
        return found
