# SPDX-License-Identifier: Apache-2.0
"""Requests through real workers: a prefill and a decode rank of ours in processes, Mooncake over TCP between them. In
place of a model, prefill sleeps as long as its layers would compute."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.kv import Model, Prompt, Side, layer_name
from harness.rank_programs import DecodeRank, PrefillRank
from harness.ranks import Pair
from vllm_ascend_pd.core.step import DecodeStep, PrefillStep, Send
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.transport.batches import Batch
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import Flight

BLOCK = 128
HEADS, HEAD_SIZE = 1, 128  # K and V, bfloat16: 512 bytes of a token's KV per layer, as processors move them
_BLOCKS = 64
_START_S = 0.05
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Speed:
    """What is slept: a step of `n` tokens takes `n * token_s`, each of its layers as long; and has `step_tokens` at
    most, of as many prompts as fit. `link`: bytes per second that writes are held to; None: as fast as they go."""

    token_s: float
    link: float | None = None
    step_tokens: int = 2048


@dataclass
class Job:
    """A request that prefill gets at `at`, seconds from the beginning; and how much of it has been computed."""

    request_id: str
    at: float
    tokens: int
    ticket: Ticket
    blocks: list[int]
    computed: int = 0


@dataclass
class Times:
    """Of a request, seconds: `ticket_at`, of the machine's clock; from then to its first step, to the end of its last
    step, to the arrival of all KV; how long its steps took; and how much longer than was to be slept, at most."""

    ticket_at: float
    begun: float = 0.0
    computed: float = 0.0
    received: float = 0.0
    steps: list[float] = field(default_factory=list)
    overslept: float = 0.0


class Workers:
    def __init__(self, layers: int) -> None:
        self._layers = layers
        model = Model(layers, HEADS, (HEAD_SIZE, HEAD_SIZE))
        side = Side(1, _BLOCKS, BLOCK)
        self._pair = Pair(model, side, side)
        self._random = random.Random(layers)

    def serve(self, requests: Sequence[tuple[float, int]], speed: Speed) -> list[Times]:
        """`requests`: (when, seconds from the beginning; tokens). Raises RuntimeError where one fails."""
        pair = self._pair
        [p_rank], [d_rank] = pair.p_ranks, pair.d_ranks
        jobs: list[Job] = []
        prompts: list[Prompt] = []
        for i, (at, tokens) in enumerate(requests):
            prompt = Prompt(f"request-{i}", i, tokens, self._blocks(tokens), self._blocks(tokens))
            prompts.append(prompt)
            jobs.append(Job(prompt.request_id, at, tokens, pair.ticket(prompt), prompt.p_blocks))
        wait_s = requests[-1][0] + _TIMEOUT_S
        # All at once, so that no grant is asked for too early.
        pair.expect(prompts, {job.request_id: job.ticket for job in jobs})
        p_rank.call("do", pace, speed.link)
        d_rank.send("do", receive, len(prompts), wait_s)
        p_rank.send("do", prefill, jobs, self._layers, speed)
        times = p_rank.receive(wait_s)
        arrived = d_rank.receive(wait_s)
        for job in jobs:
            found = times[job.request_id]
            found.received = arrived[job.request_id] - found.ticket_at
        return [times[job.request_id] for job in jobs]

    def _blocks(self, tokens: int) -> list[int]:
        """At random places; requests may have the same, as nobody reads what arrives."""
        return self._random.sample(range(1, _BLOCKS), -(-tokens // BLOCK))

    def close(self) -> None:
        if left := self._pair.close():
            raise RuntimeError(f"ranks did not clean up: {left}")


# --- in the ranks' processes -------------------------------------------------------------------------------


def pace(rank: PrefillRank, link: float | None) -> None:
    """From now on writes take at least as long as their bytes on such a link."""
    begin = TransferEngine.begin

    def paced(session: str, batch: Batch, *others: Any) -> Flight | None:
        begun = time.monotonic()
        flight = begin(rank.engine, session, batch, *others)
        if link is not None:
            time.sleep(max(0.0, begun + sum(batch[2]) / link - time.monotonic()))
        return flight

    rank.engine.begin = paced


def receive(rank: DecodeRank, count: int, wait_s: float) -> dict[str, float]:
    """When each request's KV had arrived."""
    worker = rank.worker
    worker.start_step(DecodeStep(wait_s=0.002))
    arrived: dict[str, float] = {}
    deadline = time.monotonic() + wait_s
    while len(arrived) < count:
        arrivals, now = worker.take_arrivals(), time.monotonic()
        if arrivals.failed or now > deadline:
            raise RuntimeError(f"failed: {arrivals.failed}; {len(arrived)} of {count} arrived")
        arrived |= dict.fromkeys(arrivals.finished, now)
    worker.take_report()
    return arrived


def prefill(rank: PrefillRank, jobs: list[Job], layers: int, speed: Speed) -> dict[str, Times]:
    """First come, first served, as a scheduler would."""
    worker = rank.worker
    begins = time.monotonic() + _START_S
    times = {job.request_id: Times(begins + job.at) for job in jobs}
    coming, waiting, over = deque(jobs), deque[Job](), []
    sent: set[str] = set()
    while coming or waiting:
        if not waiting:
            time.sleep(max(0.0, begins + coming[0].at - time.monotonic()))
        begun = time.monotonic()
        while coming and begins + coming[0].at <= begun:
            waiting.append(coming.popleft())
        room, step, ended = speed.step_tokens, PrefillStep(finished=dict.fromkeys(over)), []
        chosen: list[Job] = []
        while room and waiting:
            job = waiting[0]
            start, stop = job.computed, min(job.tokens, job.computed + room)
            if start == 0:
                step.tickets[job.request_id] = job.ticket
                times[job.request_id].begun = begun - begins - job.at
            complete = stop if stop == job.tokens else stop - stop % BLOCK
            first = start - start % BLOCK
            if complete > first:
                blocks = job.blocks[first // BLOCK : -(-complete // BLOCK)]
                step.sends.append(Send(job.request_id, first, complete, (blocks,), last=stop == job.tokens))
            job.computed, room = stop, room - (stop - start)
            chosen.append(job)
            if stop == job.tokens:
                ended.append(waiting.popleft())
        worker.start_step(step)
        seconds = (speed.step_tokens - room) * speed.token_s
        for layer in range(layers):
            time.sleep(max(0.0, begun + seconds * (layer + 1) / layers - time.monotonic()))
            worker.layer_computed(layer_name(layer))
        worker.end_step()
        now = time.monotonic()
        for job in chosen:
            found = times[job.request_id]
            found.steps.append(now - begun)
            found.overslept = max(found.overslept, now - begun - seconds)
        for job in ended:
            times[job.request_id].computed = now - begins - job.at
        over = [job.request_id for job in ended]
        sent |= worker.take_sent()
    worker.start_step(PrefillStep(finished=dict.fromkeys(over)))
    worker.end_step()
    deadline = time.monotonic() + _TIMEOUT_S
    while len(sent) < len(jobs):
        if (report := worker.take_report()) is not None or time.monotonic() > deadline:
            raise RuntimeError(f"failed: {report}; {len(sent)} of {len(jobs)} were sent")
        sent |= worker.take_sent()
        time.sleep(0.002)
    return times
