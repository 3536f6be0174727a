# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/push.py and overlap.py: prefill's ranks and one of decode, our real workers in a process each over
real Mooncake, without a model; and what runs in their processes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.kv import Model, Prompt, Side, layer_name
from harness.rank_programs import DecodeRank, PrefillRank
from harness.ranks import Pair, prompts
from vllm_ascend_pd.core.step import DecodeStep, PrefillStep, Send

BLOCK, HEAD_SIZE, DTYPE_BYTES = 128, 128, 2
PATIENCE_S = 60.0
FIRST_LAYER_S = 0.02
"""What the first layer takes to be computed: longer than grants for a ticket take."""


@dataclass(frozen=True)
class Cache:
    """What decode's rank caches: `heads` KV heads of 128 bfloat16 in each of `layers` layers."""

    layers: int
    heads: int

    @property
    def block_bytes(self) -> int:
        """Of K or of V, in one layer."""
        return BLOCK * self.heads * HEAD_SIZE * DTYPE_BYTES

    def blocks_for(self, num_bytes: int) -> int:
        """How many blocks hold that much, K, V and all layers together. Raises ValueError where none do."""
        blocks, rest = divmod(num_bytes, 2 * self.layers * self.block_bytes)
        if rest or not blocks:
            raise ValueError(f"{num_bytes} bytes are not whole blocks of {self.layers} layers")
        return blocks


@dataclass(frozen=True)
class Times:
    """Seconds on the machine's clock: prefill's step began, its first layer was there, the model's thread was done with
    all of them (an NPU computes what was queued there), the last one was computed, decode knew that all had arrived.
    `num_bytes` arrived, `early` of them before the last layer had ended, as decode was told."""

    begun: float
    first: float
    queued: float
    computed: float
    arrived: float
    num_bytes: int
    early: int


class PushPair:
    """Decode has TP 1. Caches hold `blocks` blocks of requests, all of which one step of prefill may compute.
    `kernels`: a library with the NPU's regroup ops, in place of those installed."""

    def __init__(
        self, cache: Cache, blocks: int, prefill_tp: int = 1, device: str = "cpu", kernels: Path | None = None
    ) -> None:
        self.cache = cache
        model = Model(cache.layers, cache.heads, (HEAD_SIZE, HEAD_SIZE))
        # Scattered blocks are every other one, and block 0 is nobody's.
        prefill, decode = (Side(tp, 2 * blocks + 8, BLOCK, step_tokens=blocks * BLOCK) for tp in (prefill_tp, 1))
        self.pair = Pair(model, prefill, decode, device=device, kernels=kernels)
        self.p_ranks = self.pair.p_ranks
        [self.d] = self.pair.d_ranks
        self.pair.each(self.p_ranks, "do", fill)

    def requests(self, count: int, blocks: int, scattered: bool) -> list[Prompt]:
        """Returns `count` requests with `blocks` blocks in all."""
        lengths = [(blocks // count + (i < blocks % count)) * BLOCK for i in range(count)]
        if scattered:
            return prompts(self.pair, lengths)
        made, first = [], 1
        for i, length in enumerate(lengths):
            own = list(range(first, first + length // BLOCK))
            made.append(Prompt(f"request-{i}", i, length, own, own))
            first = own[-1] + 2  # what two requests write does not merge
        return made

    def push(
        self,
        requests: Sequence[Prompt],
        compute_s: float = 0.0,
        layerwise: bool = True,
        first_s: float | None = None,
    ) -> Times:
        """Takes one step with all of all prompts, whose tickets come with it.

        Its layers take `compute_s` each, the first one `first_s` if it is given. They are pushed as they end, or all at
        the step's end.
        """
        first_s = compute_s if first_s is None else first_s
        tickets = self.pair.announce(requests)
        self.d.send("do", await_arrivals, len(requests))
        step = PrefillStep(
            tickets, sends=[Send(p.request_id, 0, p.num_tokens, (p.p_blocks,), last=True) for p in requests]
        )
        steps = self.pair.each(self.p_ranks, "do", prefill, step, first_s, compute_s, layerwise)
        begun, first, queued, computed = map(max, zip(*steps, strict=True))
        arrived, num_bytes, early = self.d.receive(PATIENCE_S)
        self.pair.each(self.p_ranks, "do", release, list(tickets))
        return Times(begun, first, queued, computed, arrived, num_bytes, early)

    def check(self, requests: Sequence[Prompt]) -> None:
        """Raises RuntimeError unless decode's blocks hold what prefill's do; then clears them."""
        if wrong := self.d.call("do", differences, list(requests)):
            raise RuntimeError(f"decode has other bytes than prefill: {wrong[0]}")
        self.d.call("clear")

    def close(self) -> None:
        if left := self.pair.close():
            raise RuntimeError(f"the ranks left {left}")


# --- in the ranks' processes -------------------------------------------------------------------------------


def fill(rank: PrefillRank) -> None:
    for layer in range(rank.model.layers):
        for part, cache in enumerate(rank.caches[layer_name(layer)]):
            cache.copy_(contents(rank, layer, part))


def contents(rank: PrefillRank | DecodeRank, layer: int, part: int) -> torch.Tensor:
    """Returns the content of prefill's cache of a layer, of the rank's own heads. Decode's is as large."""
    generator = torch.Generator().manual_seed(1009 * layer + part)
    shape = (rank.side.num_blocks, BLOCK, rank.model.heads, HEAD_SIZE)
    values = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
    own = rank.model.heads_of(rank.rank, rank.side.tp)
    return values[:, :, own.start : own.stop].view(torch.bfloat16)


def prefill(
    rank: PrefillRank, step: PrefillStep, first_s: float, compute_s: float, layerwise: bool
) -> tuple[float, float, float, float]:
    """Returns the first four of `Times`."""
    compute = queue_kernels if rank.on == "npu" else sleep
    begun = time.monotonic()
    rank.worker.start_step(step)
    first = 0.0
    for number, layer in enumerate(rank.registered.layers):
        if seconds := compute_s if number else first_s:
            compute(rank, layer, seconds)
        first = first or time.monotonic()
        if layerwise:
            rank.worker.push_layer(layer)
    rank.worker.end_step()
    queued = time.monotonic()
    rank.drain()
    return begun, first, queued, time.monotonic()


def sleep(_rank: PrefillRank, _layer: str, seconds: float) -> None:
    """Sleeps like a host that waits for a layer's computation on a device."""
    time.sleep(seconds)


KERNELS = 4


def queue_kernels(rank: PrefillRank, layer: str, seconds: float) -> None:
    """Computes a layer on an emulated NPU, which takes as long for each kernel, and for the event behind them."""
    import cann_on_host

    cann_on_host.set_delays(round(seconds * 1e6 / (KERNELS + 1)), 0)
    row = rank.caches[layer][0][0]  # block 0, which is nobody's
    for _ in range(KERNELS):
        row.add_(1)


def release(rank: PrefillRank, request_ids: list[str]) -> None:
    """Ends the requests, as vLLM does. Waits until nothing reads them any more."""
    rank.worker.start_step(PrefillStep(finished=dict.fromkeys(request_ids), wait_s=0.002))
    sent: set[str] = set()
    deadline = time.monotonic() + PATIENCE_S
    while len(sent) < len(request_ids):
        sent |= rank.worker.take_results().sent
        if report := rank.worker.take_report():
            raise RuntimeError(f"not delivered: {report.failed}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {sent} were sent")


def await_arrivals(rank: DecodeRank, count: int) -> tuple[float, int, int]:
    """Returns when the last of `count` requests had arrived, the bytes in all, and those before prefill's last layer
    ended.
    """
    rank.worker.start_step(DecodeStep(wait_s=0.002))
    ended, num_bytes, early = 0, 0, 0
    deadline = time.monotonic() + PATIENCE_S
    while True:
        arrivals = rank.worker.take_arrivals()
        now = time.monotonic()
        ended += len(arrivals.closed)
        if report := rank.worker.take_report():
            num_bytes += sum(total for total, _ in report.received.values())
            early += sum(before for _, before in report.received.values())
        if arrivals.failed:
            raise RuntimeError(f"not received: {report.failed if report else arrivals.failed}")
        if ended >= count:
            return now, num_bytes, early
        if now > deadline:
            raise TimeoutError(f"{ended} of {count} requests arrived")


def differences(rank: DecodeRank, requests: list[Prompt]) -> list[str]:
    found = []
    for layer in range(rank.model.layers):
        for part, cache in enumerate(rank.caches[layer_name(layer)]):
            wanted, got = (kv.view(torch.int16) for kv in (contents(rank, layer, part), cache.cpu()))
            for prompt in requests:
                if not torch.equal(got[prompt.d_blocks], wanted[prompt.p_blocks]):
                    found.append(f"{prompt.request_id} layer {layer} part {part}")
    return found
