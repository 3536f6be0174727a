# SPDX-License-Identifier: Apache-2.0
"""Worker ranks without a model: real processes, real collectives, real Mooncake, our real worker classes.

The test plays both engines' schedulers: it issues tickets, sends steps to the ranks and reads what they report.
Every rank fills its cache from one function of (request, layer, part, token, head), so that the truth about any
byte is known everywhere.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import random
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from harness.ports import reserve_port
from vllm_ascend_pd.core.layout import Order
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import owned_heads
from vllm_ascend_pd.step import ConsumerStep, Expect, ProducerStep, Send

HOST = "127.0.0.1"

# Importing torch and vLLM takes seconds: a server process does it once and every rank is forked from it.
_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["harness.ranks", "vllm_ascend_pd.worker.producer", "vllm_ascend_pd.worker.consumer"])
MODEL = "a model of random numbers"


@dataclass(frozen=True)
class Model:
    """`widths`: bytes-carrying elements per head and token of each part: (head size, head size) for K and V,
    (512, 64) for MLA's latent and rope parts, (2 * head size,) where K and V are packed."""

    layers: int = 3
    heads: int = 4
    widths: tuple[int, ...] = (32, 32)
    dtype: torch.dtype = torch.bfloat16
    order: Order = Order.TOKEN_MAJOR
    replicated: bool = False  # MLA: every rank holds everything

    def heads_of(self, rank: int, tp: int) -> range:
        return range(1) if self.replicated else owned_heads(rank, tp, self.heads)


@dataclass(frozen=True)
class Side:
    """One engine's shape. `stages`: how many layers each pipeline stage has; empty for one stage."""

    tp: int
    num_blocks: int = 64
    block_size: int = 16
    stages: tuple[int, ...] = ()

    def layers_of(self, pp_rank: int, model: Model) -> range:
        stages = self.stages or (model.layers,)
        first = sum(stages[:pp_rank])
        return range(first, first + stages[pp_rank])

    @property
    def pp(self) -> int:
        return max(1, len(self.stages))


@dataclass(frozen=True)
class Prompt:
    """A request: its seed makes its KV."""

    request_id: str
    seed: int
    num_tokens: int
    p_blocks: list[int]
    d_blocks: list[int]
    cached: int = 0


def layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def truth(model: Model, seed: int, layer: int, part: int, num_tokens: int) -> torch.Tensor:
    """KV of one request: `[num_tokens, heads, width]`."""
    generator = torch.Generator().manual_seed(seed * 1009 + layer * 31 + part)
    heads = 1 if model.replicated else model.heads
    return torch.randn(num_tokens, heads, model.widths[part], generator=generator).to(model.dtype)


def make_caches(
    model: Model, side: Side, tp_rank: int, pp_rank: int, device: str
) -> dict[str, tuple[torch.Tensor, ...]]:
    """vllm-ascend's shape: per layer a tuple of `[num_blocks, block_size, heads, width]`, each with an offset into
    its allocation; head-major: `[num_blocks, heads, block_size, width]`."""
    heads = len(model.heads_of(tp_rank, side.tp))
    caches = {}
    for layer in side.layers_of(pp_rank, model):
        parts = []
        for width in model.widths:
            shape = (
                (side.num_blocks, side.block_size, heads, width)
                if model.order is Order.TOKEN_MAJOR
                else (side.num_blocks, heads, side.block_size, width)
            )
            skip = 64
            numel = torch.Size(shape).numel()
            parts.append(torch.zeros(numel + skip, dtype=model.dtype, device=device)[skip:].view(shape))
        caches[layer_name(layer)] = tuple(parts)
    return caches


def by_token(model: Model, cache: torch.Tensor) -> torch.Tensor:
    """A view `[num_blocks, tokens, heads, width]`, whatever the order."""
    return cache if model.order is Order.TOKEN_MAJOR else cache.transpose(1, 2)


class Rank:
    """A rank's process, driven by calls: `rank.call("name", ...)` runs the method of its program and returns.

    Processes are reused: starting one means importing torch and vLLM, and on an NPU initialising it.
    """

    def __init__(self, program: Callable[..., Any], *args: Any, device: str) -> None:
        self._host = _hosts.acquire(device)
        self._reusable = True
        self.send("load", program, args)

    def send(self, name: str, *args: Any) -> None:
        self._host.pipe.send((name, args))

    def receive(self, timeout_s: float = 60.0) -> Any:
        if not self._host.pipe.poll(timeout_s):
            self._reusable = False
            raise TimeoutError("the rank did not answer")
        try:
            ok, value = self._host.pipe.recv()
        except EOFError:
            self._reusable = False
            raise RuntimeError("the rank's process died") from None
        if not ok:
            raise RuntimeError(f"in the rank's process: {value}")
        return value

    def call(self, name: str, *args: Any) -> Any:
        self.send(name, *args)
        return self.receive()

    @property
    def process(self) -> Any:
        return self._host.process

    def spoil(self) -> None:
        """Something was done to the process that the next user must not see."""
        self._reusable = False

    def stopped(self) -> list[str]:
        """After `send("stop")`: ends the rank; returns what it could not clean up itself."""
        left: list[str] = []
        try:
            left = self.receive()
        except (OSError, RuntimeError, TimeoutError) as error:
            self._reusable = False
            left.append(f"did not stop: {error}")
        if self._reusable:
            _hosts.release(self._host)
        else:
            self._host.end()
        return left


class _Host:
    """A process that runs one rank at a time."""

    def __init__(self, device: str) -> None:
        # An NPU's runtime has threads, which do not survive a fork.
        processes = _forked if device == "cpu" else multiprocessing.get_context("spawn")
        self.settings = _settings(device)
        self.pipe, child = processes.Pipe()
        self.process = processes.Process(target=_serve, args=(child,), daemon=True)
        self.process.start()
        child.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


class _Hosts:
    """Idle processes, all started with the same settings: those of others end when settings change."""

    def __init__(self) -> None:
        self._idle: list[_Host] = []
        atexit.register(self.close)

    def acquire(self, device: str) -> _Host:
        for host in [h for h in self._idle if h.settings != _settings(device)]:
            self._idle.remove(host)
            host.end()
        return self._idle.pop() if self._idle else _Host(device)

    def release(self, host: _Host) -> None:
        self._idle.append(host)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()


def _settings(device: str) -> tuple[object, ...]:
    """What a process reads only when it starts."""
    return device, tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("CANN_ON_HOST")))


_hosts = _Hosts()


def _serve(pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    rank: Any = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        if name == "load":
            program, program_arguments = arguments
            rank = _answer(pipe, functools.partial(program, *program_arguments), keep=True)
        else:
            _answer(pipe, functools.partial(getattr(rank, name), *arguments))


def _answer(pipe: Connection, action: Callable[[], Any], keep: bool = False) -> Any:
    """Sends (True, what `action` returned) or (False, its traceback); with `keep`, keeps the value here."""
    try:
        value = action()
    except Exception:  # noqa: BLE001 - the caller raises it in the test's process
        pipe.send((False, traceback.format_exc()))
        return None
    pipe.send((True, None if keep else value))
    return value


def _make_device(name: str, rank: int) -> Any:
    if name == "cpu":
        from vllm_ascend_pd.device.cpu import CpuDevice

        return CpuDevice()
    from vllm_ascend_pd.device.npu import NpuDevice

    torch.npu.set_device(rank % torch.npu.device_count())
    return NpuDevice()


@dataclass
class _RankBase:
    model: Model
    side: Side
    tp_rank: int
    pp_rank: int
    init: str
    config: dict[str, Any]
    on: str  # "cpu" or "npu"

    def __post_init__(self) -> None:
        from vllm_ascend_pd.config import parse_config
        from vllm_ascend_pd.transport.engine import TransferEngine, TransferLimits
        from vllm_ascend_pd.worker.caches import LayerSpec, describe
        from vllm_ascend_pd.worker.identity import Identity

        world = self.side.tp * self.side.pp
        rank = self.pp_rank * self.side.tp + self.tp_rank
        self.device = _make_device(self.on, rank)
        backend = self.device.collective_backend
        torch.distributed.init_process_group(backend, init_method=self.init, world_size=world, rank=rank)
        self.parsed = parse_config(self.config)
        self.caches = make_caches(self.model, self.side, self.tp_rank, self.pp_rank, self.on)
        heads = len(self.model.heads_of(self.tp_rank, self.side.tp))
        total = 1 if self.model.replicated else self.model.heads
        specs = {name: LayerSpec(0, self.side.block_size, heads, total) for name in self.caches}
        self.registered = describe(self.caches, specs, heads_first=self.model.order is Order.HEAD_MAJOR)
        self.engine = TransferEngine(HOST, "tcp", TransferLimits(timeout_s=self.parsed.write_timeout_s))
        self.engine.register(self.registered.regions())
        first = self.pp_rank * self.side.tp
        self.identity = Identity(
            engine_id=self.engine_id,
            model=MODEL,
            host=HOST,
            tp_rank=self.tp_rank,
            tp=self.side.tp,
            pp_rank=self.pp_rank,
            pp=self.side.pp,
            tp_ranks=tuple(range(first, first + self.side.tp)),
        )

    def stop(self) -> list[str]:
        """Closes everything; returns our threads and listening sockets that are left."""
        self.worker.close(5.0)
        self.device.close()
        self.engine.close()
        torch.distributed.destroy_process_group()
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("pd-")]
        listening = {c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
        # Mooncake and gloo have listeners of their own, which live as long as the process.
        return threads + [f"port {port}" for port in self.own_ports() & listening]

    def own_ports(self) -> set[int]:
        return set()


class PrefillRank(_RankBase):
    engine_id = "prefill"

    def __post_init__(self) -> None:
        super().__post_init__()
        from vllm_ascend_pd.worker.producer import ProducerWorker

        self.worker = ProducerWorker(
            self.identity, self.parsed, self.device, self.engine, self.registered, step_tokens=128
        )

    def step(self, step: Any, prompts: dict[str, Prompt], skip_save: frozenset[int] = frozenset()) -> None:
        """One forward pass: each layer's KV is computed (copied from the truth), then announced."""
        self.worker.preempted(step.preempted)
        self.worker.start_step(step)
        for layer in self.side.layers_of(self.pp_rank, self.model):
            for send in step.sends:
                self._compute(layer, prompts[send.request_id], send.start, send.stop)
            if layer not in skip_save:
                self.worker.layer_computed(layer_name(layer))
        self.worker.end_step()

    def _compute(self, layer: int, prompt: Prompt, start: int, stop: int) -> None:
        own = self.model.heads_of(self.tp_rank, self.side.tp)
        for part, cache in enumerate(self.caches[layer_name(layer)]):
            values = truth(self.model, prompt.seed, layer, part, prompt.num_tokens)
            view = by_token(self.model, cache)
            for token in range(start, stop):
                block = prompt.p_blocks[token // self.side.block_size]
                view[block, token % self.side.block_size] = values[token, own.start : own.stop].to(self.on)

    def sent(self) -> tuple[set[str], dict[str, str]]:
        report = self.worker.take_report()
        return self.worker.take_sent(), report.failed if report else {}

    def open_transfers(self) -> int:
        return len(self.worker._transfers)

    def forget_to_wait(self, where: str) -> None:
        """Breaks the product on purpose: what follows must then be seen to go wrong. `where`: "for-compute" (pushes
        do not wait until the layer is computed), "for-regroup" (writes do not wait until it is regrouped)."""
        import vllm_ascend_pd.worker.sender as sender
        from vllm_ascend_pd.device.base import Event

        class Passed(Event):
            def wait(self, timeout_s: float) -> None:
                pass

        if where == "for-compute":
            # An event of the past: of the stream as it is now, not as it will be when a layer has run.
            past = self.device.record_event()
            past.wait(10.0)
            self.device.record_event = lambda: past
        elif where == "for-regroup":
            push_ready = sender.Sender._push_ready

            def hasty(self: Any, task: Any) -> None:
                while task.shipment.route.regroup.value != "none" and task.slot is None:
                    time.sleep(0.001)
                task.ready = Passed()
                push_ready(self, task)

            sender.Sender._push_ready = hasty
        else:
            raise ValueError(where)

    def poison(self, ranges: list[tuple[int, int]]) -> None:
        """From now on the transfer engine fails every write into one of `ranges` (address, bytes) of decode's."""
        from vllm_ascend_pd.transport.engine import TransferError

        healthy = self.engine.write

        def write(session: str, sources: list[int], destinations: list[int], lengths: list[int]) -> None:
            if any(begin <= d < begin + size for d in destinations for begin, size in ranges):
                raise TransferError(session, "injected by the test", retryable=True)
            healthy(session, sources, destinations, lengths)

        self.engine.write = write


class DecodeRank(_RankBase):
    engine_id = "decode"

    def __post_init__(self) -> None:
        super().__post_init__()
        from vllm_ascend_pd.worker.consumer import ConsumerWorker

        self.worker = ConsumerWorker(self.identity, self.parsed, self.engine, self.registered)

    def own_ports(self) -> set[int]:
        return {int(self.worker.description.control.rpartition(":")[2])}

    def description(self) -> Any:
        return self.worker.description

    def step(self, step: Any) -> None:
        self.worker.start_step(step)

    def clear(self) -> None:
        for parts in self.caches.values():
            for cache in parts:
                cache.zero_()

    def arrivals(self) -> tuple[set[str], set[str], dict[str, str]]:
        report = self.worker.take_report()
        arrivals = self.worker.take_arrivals()
        return arrivals.finished, arrivals.failed, report.failed if report else {}

    def differences(self, prompts: list[Prompt]) -> list[str]:
        """Every place where the cache is not what it must be: the prompts' KV from their first uncached token on,
        zeros in all blocks that belong to nobody."""
        found = []
        own = self.model.heads_of(self.tp_rank, self.side.tp)
        for layer in self.side.layers_of(self.pp_rank, self.model):
            for part, cache in enumerate(self.caches[layer_name(layer)]):
                view = by_token(self.model, cache).cpu()
                used = set()
                for prompt in prompts:
                    values = truth(self.model, prompt.seed, layer, part, prompt.num_tokens)
                    first = prompt.cached // self.side.block_size
                    used |= set(prompt.d_blocks[first:])
                    for token in range(prompt.cached, prompt.num_tokens):
                        block = prompt.d_blocks[token // self.side.block_size]
                        got = view[block, token % self.side.block_size]
                        if not torch.equal(got, values[token, own.start : own.stop]):
                            found.append(f"{prompt.request_id} layer {layer} part {part} token {token}")
                            break
                for block in range(self.side.num_blocks):
                    if block not in used and view[block].any():
                        found.append(f"layer {layer} part {part}: block {block} belongs to nobody")
        return found


def run(
    pair: "Pair", requests: list[Prompt], chunk: int | None = None, skip_save: frozenset[int] = frozenset()
) -> dict[str, Ticket]:
    """Prefills all requests at once, each step computing up to `chunk` tokens of each; returns their tickets."""
    tickets = {prompt.request_id: pair.ticket(prompt) for prompt in requests}
    pair.expect(requests, tickets)
    prefill(pair, requests, tickets, chunk, skip_save)
    return tickets


def prefill(
    pair: "Pair",
    requests: list[Prompt],
    tickets: dict[str, Ticket],
    chunk: int | None = None,
    skip_save: frozenset[int] = frozenset(),
) -> None:
    by_id = {prompt.request_id: prompt for prompt in requests}
    cursor = {prompt.request_id: prompt.cached for prompt in requests}
    align = max(pair.prefill.block_size, pair.decode.block_size)
    size = pair.prefill.block_size
    announced: dict[str, Ticket] = tickets
    while any(cursor[p.request_id] < p.num_tokens for p in requests):
        step = ProducerStep(tickets=announced)
        announced = {}
        for p in requests:
            start = cursor[p.request_id]
            if start == p.num_tokens:
                continue
            done = min(p.num_tokens, start + (chunk or p.num_tokens))
            stop = done if done == p.num_tokens else done - done % align
            blocks = (p.p_blocks[start // size : -(-stop // size)],)
            step.sends.append(Send(p.request_id, start, stop, blocks, last=stop == p.num_tokens))
            cursor[p.request_id] = stop
        pair.each(pair.p_ranks, "step", step, by_id, skip_save)
    pair.each(pair.p_ranks, "step", ProducerStep(finished=dict.fromkeys(by_id)), by_id)


def prompts(pair: "Pair", lengths: list[int], cached: int = 0) -> list[Prompt]:
    """Requests with random, disjoint blocks on either side. `cached`: tokens decode has already."""
    chance = random.Random(7)
    p_free = chance.sample(range(pair.prefill.num_blocks), pair.prefill.num_blocks)
    d_free = chance.sample(range(pair.decode.num_blocks), pair.decode.num_blocks)
    made = []
    for i, length in enumerate(lengths):
        p_blocks = [p_free.pop() for _ in range(-(-length // pair.prefill.block_size))]
        d_blocks = [d_free.pop() for _ in range(-(-length // pair.decode.block_size))]
        held = min(cached, length - 1)
        held -= held % pair.decode.block_size
        made.append(Prompt(f"request-{i}", i, length, p_blocks, d_blocks, held))
    return made


class Pair:
    """A prefill and a decode engine's ranks, and the test's own listener for decode's description."""

    def __init__(
        self,
        model: Model,
        prefill: Side,
        decode: Side,
        config: dict[str, Any] | None = None,
        p_model: Model | None = None,
        device: str = "cpu",
    ) -> None:
        from vllm_ascend_pd.scheduler.listener import DescriptionListener

        self.model, self.prefill, self.decode = model, prefill, decode
        self._request_of: dict[str, str] = {}
        config = config or {}
        self.p_ranks = _start(PrefillRank, p_model or model, prefill, config, device)
        self.d_ranks = _start(DecodeRank, model, decode, config, device)
        for rank in self.p_ranks + self.d_ranks:
            rank.receive(120.0)
        self.descriptions = tuple(rank.call("description") for rank in self.d_ranks)
        description = EngineDescription("decode", MODEL, decode.tp, decode.pp, self.descriptions)
        self.listener = DescriptionListener(description, HOST, 0)
        self.port = int(self.listener.endpoint.rpartition(":")[2])

    def ticket(self, prompt: Prompt) -> Ticket:
        return Ticket(
            request_id=prompt.request_id,
            remote_block_ids=[prompt.d_blocks],
            remote_block_size=[self.decode.block_size],
            remote_engine_id="decode",
            remote_host=HOST,
            remote_port=self.port,
            remote_tp_size=self.decode.tp,
            remote_cached_tokens=prompt.cached,
            ticket_id=secrets.token_hex(16),
            num_tokens=prompt.num_tokens,
        )

    def expect(self, requests: list[Prompt], tickets: dict[str, Ticket]) -> None:
        """Tells decode's ranks about the tickets."""
        self._request_of |= {ticket.ticket_id: request_id for request_id, ticket in tickets.items()}
        expects = [
            Expect(p.request_id, t.ticket_id, t.attempt, t.digest(), p.d_blocks)
            for p in requests
            for t in [tickets[p.request_id]]
        ]
        self.each(self.d_ranks, "step", ConsumerStep(expects))

    def addresses(self, layer: int, blocks: list[int]) -> list[tuple[int, int]]:
        """(address, bytes) of blocks of a layer on all decode ranks."""
        found = []
        for rank in self.descriptions:
            for tensor in rank.caches.tensors:
                geometry = rank.caches.geometry_of(tensor)
                if tensor.layer == layer_name(layer):
                    found += [(tensor.base + b * geometry.block_stride, geometry.block_bytes) for b in blocks]
        return found

    def each(self, ranks: list[Rank], name: str, *args: Any) -> list[Any]:
        for rank in ranks:
            rank.send(name, *args)
        return [rank.receive() for rank in ranks]

    def wait_arrivals(self, count: int, timeout_s: float = 30.0) -> tuple[set[str], dict[str, str]]:
        """Until every decode rank has ended `count` requests: (received by all, failed -> reason)."""
        finished: list[set[str]] = [set() for _ in self.d_ranks]
        lost: set[str] = set()
        reasons: dict[str, str] = {}
        deadline = time.monotonic() + timeout_s
        while any(len(f) < count for f in finished):
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {finished} ended, {reasons}")
            for mine, (ended, failed, why) in zip(finished, self.each(self.d_ranks, "arrivals"), strict=True):
                mine |= ended
                lost |= failed
                reasons |= {self._request_of[ticket_id]: reason for ticket_id, reason in why.items()}
            time.sleep(0.01)
        return set.intersection(*finished) - lost, {request: reasons[request] for request in lost}

    def wait_sent(self, count: int, timeout_s: float = 30.0) -> dict[str, str]:
        """Until every prefill rank has let go of `count` requests; returns failures."""
        done: list[set[str]] = [set() for _ in self.p_ranks]
        failed: dict[str, str] = {}
        deadline = time.monotonic() + timeout_s
        while any(len(d) < count for d in done):
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {done} were sent")
            for mine, (sent, reasons) in zip(done, self.each(self.p_ranks, "sent"), strict=True):
                mine |= sent
                failed.update(reasons)
            time.sleep(0.01)
        return failed

    def differences(self, prompts: list[Prompt]) -> list[str]:
        return [
            f"decode rank {i}: {what}"
            for i, found in enumerate(self.each(self.d_ranks, "differences", prompts))
            for what in found
        ]

    def close(self) -> list[str]:
        ranks = self.p_ranks + self.d_ranks
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.send("stop")
        left = [what for rank in ranks for what in rank.stopped()]
        self.listener.close(5.0)
        return left


def _start(program: Any, model: Model, side: Side, config: dict[str, Any], device: str) -> list[Rank]:
    init = f"tcp://{HOST}:{reserve_port()}"
    return [
        Rank(program, model, side, tp_rank, pp_rank, init, config, device, device=device)
        for pp_rank in range(side.pp)
        for tp_rank in range(side.tp)
    ]
