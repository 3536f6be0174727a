# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/plan.py: steps of prefill, what one costs, and what both sides are given: decode, and a transfer
engine that does nothing."""

import argparse
import random
import re
import secrets
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from helpers import vllm_ascend_producer

BLOCK = 128
KV_HEADS, HEAD_SIZE = 8, 128  # of the model, which decode's one rank has all of
DTYPE_BYTES = 2
PARTS = 2  # K and V
CONTIGUOUS_BAR, SCATTERED_BAR = 5.0, 20.0
TIMEOUT_S = 60.0
START_TIMEOUT_S = 240.0
POLL_S, QUIET_S = 1e-4, 0.1


@dataclass(frozen=True)
class Case:
    """A step of `requests` prompts of `blocks` blocks each; `ratio`: prefill's TP size to decode's, which is 1."""

    requests: int
    blocks: int
    scattered: bool
    ratio: int = 1

    @classmethod
    def parse(cls, text: str) -> "Case":
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)-(scattered|contiguous)(-tp2)?", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not like 32x32-scattered or 8x256-contiguous-tp2")
        return cls(int(match[1]), int(match[2]), match[3] == "scattered", 2 if match[4] else 1)

    def __str__(self) -> str:
        placed = "scattered" if self.scattered else "contiguous"
        return f"{self.requests}x{self.blocks}-{placed}{'-tp2' if self.ratio == 2 else ''}"

    @property
    def heads(self) -> int:
        """Of a prefill rank."""
        return KV_HEADS // self.ratio

    @property
    def block_bytes(self) -> int:
        """On a prefill rank, of K or V."""
        return BLOCK * self.heads * HEAD_SIZE * DTYPE_BYTES

    @property
    def bar(self) -> float | None:
        """None: a step of one prompt is there to be seen."""
        if self.requests == 1:
            return None
        return SCATTERED_BAR if self.scattered or self.ratio > 1 else CONTIGUOUS_BAR

    @property
    def cache_blocks(self) -> int:
        """Scattered blocks are every other one on average, or fewer; block 0 is nobody's. So many at least that the
        emulated CANN libraries do not fill the memory when it is allocated."""
        return max(2 * self.requests * self.blocks + 1, 1024)

    @property
    def tokens(self) -> int:
        return self.requests * self.blocks * BLOCK

    def block_ids(self, seed: int) -> list[list[int]]:
        """Returns the block ids of each request on one of the sides."""
        if self.scattered:
            drawn = random.Random(seed).sample(range(1, self.cache_blocks), self.requests * self.blocks)
            return [drawn[i : i + self.blocks] for i in range(0, len(drawn), self.blocks)]
        # One block between two requests: what they write does not merge.
        return [list(range(first, first + self.blocks)) for first in range(1, self.cache_blocks, self.blocks + 1)][
            : self.requests
        ]


@dataclass(frozen=True)
class Cost:
    """Milliseconds per layer."""

    plan: float
    save: float
    send: float
    control: float
    wall: float

    @property
    def model(self) -> float:
        return self.plan + self.save

    @property
    def cpu(self) -> float:
        return self.model + self.send

    @classmethod
    def median(cls, costs: list["Cost"]) -> "Cost":
        return cls(
            *(statistics.median(column) for column in zip(*(asdict(cost).values() for cost in costs), strict=True))
        )


class Handed(vllm_ascend_producer.NoTransfer):
    """Counts the descriptors that it is handed.

    A waiting thread looks from time to time: being woken would cost the sending thread more than some layers do.
    """

    def __init__(self) -> None:
        self.count = 0
        self.per_layer: list[int] = []  # found out in the first step
        self.writes: list[tuple[list[int], list[int], list[int]]] | None = []

    def batch_transfer_sync_write(self, session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        if self.writes is not None:
            self.writes.append((list(src), list(dst), lengths))  # the addresses change for the next layer
        self.count += len(lengths)
        return 0

    def wait(self, layer: int) -> None:
        """Waits until that layer has been handed over, counted from 0. In the first step: until nothing more comes."""
        deadline = time.monotonic() + TIMEOUT_S
        if self.writes is None:
            while self.count < self.per_layer[layer]:
                self._look(deadline)
            if self.count != self.per_layer[layer]:
                raise RuntimeError(f"layer {layer}: {self.count} descriptors, not {self.per_layer[layer]}")
            return
        seen, since = self.count, time.monotonic()
        while seen == 0 or time.monotonic() - since < QUIET_S:
            self._look(deadline)
            if self.count != seen:
                seen, since = self.count, time.monotonic()
        self.per_layer.append(seen)

    def _look(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{self.count} descriptors of a layer were handed to Mooncake, and no more")
        time.sleep(POLL_S)


def our_ticket(request_id: str, blocks: list[int], tp: int, port: int) -> Any:
    """Returns a decode engine's ticket for a prompt that fills `blocks`."""
    from vllm_ascend_pd.core.ticket import Ticket

    return Ticket(
        request_id=request_id,
        remote_block_ids=[blocks],
        remote_block_size=[BLOCK],
        remote_engine_id="decode",
        remote_host="127.0.0.1",
        remote_port=port,
        remote_tp_size=tp,
        remote_cached_tokens=0,
        ticket_id=secrets.token_hex(16),
        num_tokens=len(blocks) * BLOCK,
    )


def layer_names(layers: int) -> list[str]:
    from harness.kv import layer_name

    return [layer_name(i) for i in range(layers)]


class Decode:
    """A decode rank with TP 1 in a process of its own, and the listener that describes it."""

    def __init__(self, layers: int, case: Case) -> None:
        from harness.kv import Model, Side
        from harness.ports import reserve_port
        from harness.rank_hosts import Rank
        from harness.rank_programs import HOST, MODEL
        from helpers.plan_decode import UntouchedDecodeRank
        from vllm_ascend_pd.core.protocol import EngineDescription, TransportInfo
        from vllm_ascend_pd.decode.listener import DescriptionListener

        model = Model(layers, KV_HEADS, (HEAD_SIZE,) * PARTS)
        init = f"tcp://{HOST}:{reserve_port()}"
        side = Side(1, case.cache_blocks, BLOCK)
        self._rank = Rank(UntouchedDecodeRank, model, side, 0, 0, init, "decode", {}, "cpu", HOST, 0, device="cpu")
        self._rank.receive(START_TIMEOUT_S)
        # No byte moves: that this rank would be written to over TCP is nobody's concern.
        self.description = msgspec.structs.replace(self._rank.call("description"), transport=TransportInfo())
        self._listener = DescriptionListener(EngineDescription("decode", MODEL, 1, 1, (self.description,)), HOST, 0)
        self.port = int(self._listener.endpoint.rpartition(":")[2])

    def expect(self, tickets: dict[str, Any]) -> None:
        from vllm_ascend_pd.core.step import DecodeStep, Expect

        expects = [Expect(name, t.ticket_id, t.digest(), []) for name, t in tickets.items()]
        self._rank.call("step", DecodeStep(expects))

    def bases(self, layer: str) -> list[int]:
        return [tensor.base for tensor in self.description.caches.tensors if tensor.layer == layer]

    @property
    def mooncake_port(self) -> int:
        return int(self.description.session.rpartition(":")[2])

    def close(self) -> None:
        self._listener.close(5.0)
        self._rank.kill()


def thread_cpu_s(name: str) -> float:
    """Returns the CPU time of the running threads whose names begin so; 0.0 if there are none yet."""
    found = [thread for thread in threading.enumerate() if thread.name.startswith(name)]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in found if thread.ident)


class Stopwatch:
    """What a step costs one side, whose threads are so named."""

    def __init__(self, sender: str, control: str | None) -> None:
        self._others = (sender, control)
        self._before = self._read()
        self._model_s = {"plan": 0.0, "save": 0.0}
        self._begun = time.perf_counter()
        self._wall_s = 0.0

    @contextmanager
    def model(self, part: str) -> Iterator[None]:
        begun = time.thread_time()
        yield
        self._model_s[part] += time.thread_time() - begun

    def all_written(self) -> None:
        self._wall_s = time.perf_counter() - self._begun

    def cost(self, layers: int) -> Cost:
        """Returns the cost once all threads are idle."""
        send, control = (now - before for now, before in zip(self._read(), self._before, strict=True))
        seconds = (*self._model_s.values(), send, control, self._wall_s)
        return Cost(*(1e3 * value / layers for value in seconds))

    def _read(self) -> list[float]:
        return [0.0 if name is None else thread_cpu_s(name) for name in self._others]
