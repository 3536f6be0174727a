# SPDX-License-Identifier: Apache-2.0
"""The ranks of a prefill and a decode engine without a model: real processes, real collectives, real Mooncake."""

import contextlib
import math
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.ascend import whole_cards
from harness.kv import Model, Prompt, Side, layer_name
from harness.pool import long
from harness.ports import reserve_port
from harness.rank_hosts import Rank, start_afresh
from harness.rank_programs import DRAFT, HOST, MODEL, ONCE, DecodeRank, Hooks, PrefillRank
from vllm_ascend_pd.core.checksum import Form, column_tokens
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.hosts import authority
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.step import DecodeStep, Expect, PrefillStep, Send, VerifiedBlocks
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.decode.listener import DescriptionListener
from vllm_ascend_pd.transport.peers import read_peers

START_TIMEOUT_S = 240.0
"""How long a rank may take to start. On busy cores, importing vllm-ascend in several ranks takes minutes."""


def run(pair: "Pair", requests: list[Prompt], chunk: int | None = None, hooks: Hooks = ONCE) -> dict[str, Ticket]:
    """Prefills all requests at once, each step computing up to `chunk` tokens of each; returns their tickets."""
    tickets = pair.announce(requests)
    prefill(pair, requests, tickets, chunk, hooks)
    return tickets


def prefill(
    pair: "Pair",
    requests: list[Prompt],
    tickets: dict[str, Ticket],
    chunk: int | None = None,
    hooks: Hooks = ONCE,
    cached_tokens: int = 0,
    weight_updates: dict[str, int] | None = None,
) -> None:
    """As `run`, for tickets that were announced, or are. `cached_tokens`: what prefill's scheduler says that it had of
    each prompt; `weight_updates`: and of the ranks' weights."""
    by_id = {prompt.request_id: prompt for prompt in requests}
    cursor = {prompt.request_id: prompt.cached for prompt in requests}  # handed to the ranks
    computed = dict(cursor)
    align = math.lcm(pair.prefill.span, pair.decode.span)
    size = pair.prefill.span
    announced: dict[str, Ticket] = tickets
    while any(cursor[p.request_id] < p.num_tokens for p in requests):
        step = PrefillStep(tickets=announced, cached_tokens=dict.fromkeys(announced, cached_tokens))
        step.weight_updates = weight_updates or {}
        announced = {}
        for p in requests:
            start = cursor[p.request_id]
            if start == p.num_tokens:
                continue
            done = computed[p.request_id] = min(p.num_tokens, computed[p.request_id] + (chunk or p.num_tokens))
            stop = done if done == p.num_tokens else done - done % align
            if stop <= start and stop < p.num_tokens:
                continue
            blocks = (p.p_blocks[start // size : -(-stop // size)],)
            last = stop == p.num_tokens
            if p.states is not None:
                blocks = (*blocks, [p.states[0]] if last else [])
            step.sends.append(Send(p.request_id, start, stop, blocks, last=last))
            cursor[p.request_id] = stop
        pair.each(pair.p_ranks, "step", step, by_id, hooks)
    pair.each(pair.p_ranks, "step", PrefillStep(finished=dict.fromkeys(by_id)), by_id)


def send_step(pair: "Pair", requests: list[Prompt]) -> None:
    """One step that prefills all requests: handed to the ranks, which are not waited for."""
    tickets = pair.announce(requests)
    sends = [Send(p.request_id, 0, p.num_tokens, (p.p_blocks,), last=True) for p in requests]
    for rank in pair.p_ranks:
        rank.send("step", PrefillStep(tickets=tickets, sends=sends), {p.request_id: p for p in requests})


def prompts(pair: "Pair", lengths: list[int], cached: int = 0, seed: int = 0) -> list[Prompt]:
    """Returns requests with random, disjoint blocks on either side, never the null block.

    cached: tokens that decode has.
    seed: of the first one's KV.
    """
    chance = random.Random(7)
    p_free = chance.sample(range(1, pair.prefill.num_blocks), pair.prefill.num_blocks - 1)
    d_free = chance.sample(range(1, pair.decode.num_blocks), pair.decode.num_blocks - 1)
    made = []
    for i, length in enumerate(lengths):
        p_blocks = [p_free.pop() for _ in range(-(-length // pair.prefill.span))]
        d_blocks = [d_free.pop() for _ in range(-(-length // pair.decode.span))]
        held = min(cached, length - 1)
        held -= held % pair.decode.span
        states = None if pair.model.states is None else (3 + 2 * i, 2 + 3 * i)
        made.append(Prompt(f"request-{i}", seed + i, length, p_blocks, d_blocks, held, states))
    return made


def deliver(pair: "Pair", chunk: int | None, cached: int) -> None:
    """Sends prompts of several lengths into empty caches, and checks that all arrive and nothing is left open."""
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [1, 15, 16, 17, 64, 100], cached)
    run(pair, requests, chunk)
    expect_delivery(pair, requests)
    assert pair.each(pair.p_ranks, "open_transfers") == [0] * len(pair.p_ranks)


def expect_delivery(pair: "Pair", requests: list[Prompt], timeout_s: float = 30.0) -> None:
    """Checks that every request ends well on all ranks, and that decode has the right bytes."""
    received, failed = pair.wait_arrivals(len(requests), timeout_s)
    assert failed == {}
    assert received == {prompt.request_id for prompt in requests}
    assert pair.differences(requests) == []
    assert pair.wait_sent(len(requests), timeout_s) == {}


def expect_failure(pair: "Pair", *words: str, count: int = 1, timeout_s: float = 30.0) -> None:
    """Checks that `count` requests fail on both sides, each for a reason that has all `words`."""
    received, failed = pair.wait_arrivals(count, timeout_s)
    sent = pair.wait_sent(count, timeout_s)
    assert received == set()
    assert len(failed) == len(sent) == count
    for reason in (*failed.values(), *sent.values()):
        assert all(word in reason for word in words), reason


def first_of_decode(prefill: Side, decode: Side) -> int:
    """Returns the NPU of decode's first rank, after prefill's cards. Skips the test if there are too few NPUs."""
    first = whole_cards(prefill.ranks * prefill.pp)
    needed, here = first + decode.ranks * decode.pp, torch.npu.device_count()
    if here < needed:
        pytest.skip(f"needs {needed} NPUs, as prefill and decode share no card; {here} are here")
    return first


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
        kernels: Path | None = None,
        hosts: tuple[str, str] = (HOST, HOST),
        programs: tuple[type[PrefillRank], type[DecodeRank]] = (PrefillRank, DecodeRank),
    ) -> None:
        """`kernels`: a library with the NPU's regroup ops, in place of those installed. `hosts`: prefill's and
        decode's. `programs`: prefill's and decode's ranks."""
        self.model, self.prefill, self.decode = model, prefill, decode
        self._request_of: dict[str, str] = {}
        self._options: tuple[Any, ...] = (config or {}, device, kernels)
        self._p_host, self._d_host = hosts
        self._d_first = 0 if device == "cpu" else first_of_decode(prefill, decode)
        self.p_ranks = _start(programs[0], "prefill", p_model or model, prefill, *self._options, self._p_host)
        self.d_ranks = _start(programs[1], "decode", model, decode, *self._options, self._d_host, self._d_first)
        for rank in self.p_ranks + self.d_ranks:
            rank.receive(START_TIMEOUT_S)
        self._listen("decode", port=0)

    def _listen(self, engine_id: str, port: int) -> None:
        """Lets prefill find decode's ranks, as decode's engine core does."""
        decode = self.decode
        self.decode_id = engine_id
        self.descriptions = tuple(rank.call("description") for rank in self.d_ranks)
        description = EngineDescription(
            engine_id, MODEL, decode.tp, decode.pp, self.descriptions, decode.dcp, decode.interleave
        )
        peers = read_peers(ConnectorConfig(**self._options[0]), self._d_host)
        self.listener = DescriptionListener(description, self._d_host, port, peers.secret)
        self.port = int(self.listener.endpoint.rpartition(":")[2])

    def restart_decode(self, engine_id: str) -> None:
        """Kills decode's processes, and starts those of another engine at the same port."""
        self.listener.close(5.0)
        for rank in self.d_ranks:
            rank.kill()
        self.d_ranks = _start(
            DecodeRank, engine_id, self.model, self.decode, *self._options, self._d_host, self._d_first
        )
        for rank in self.d_ranks:
            rank.receive(START_TIMEOUT_S)
        self._listen(engine_id, self.port)

    def restart_prefill(self, engine_id: str) -> None:
        """Kills prefill's processes, and starts those of another engine."""
        for rank in self.p_ranks:
            rank.kill()
        self.p_ranks = _start(PrefillRank, engine_id, self.model, self.prefill, *self._options, self._p_host)
        for rank in self.p_ranks:
            rank.receive(START_TIMEOUT_S)

    def ticket(self, prompt: Prompt) -> Ticket:
        of_states = [] if prompt.states is None else [[prompt.states[1]]]
        return Ticket(
            request_id=prompt.request_id,
            remote_block_ids=[prompt.d_blocks, *of_states],
            remote_block_size=[self.decode.block_size, *(1 for _ in of_states)],
            remote_engine_id=self.decode_id,
            remote_host=self._d_host,
            remote_port=self.port,
            remote_tp_size=self.decode.tp,
            remote_dcp_size=self.decode.dcp,
            remote_interleave_size=self.decode.interleave,
            remote_cached_tokens=prompt.cached,
            ticket_id=secrets.token_hex(16),
            checksum_form=max(Form),
            num_tokens=prompt.num_tokens,
            remote_draft=DRAFT if self.model.draft_layers else "",
        )

    def announce(self, requests: Sequence[Prompt]) -> dict[str, Ticket]:
        """Makes tickets for all prompts, by request id, and tells decode's ranks about them."""
        tickets = {prompt.request_id: self.ticket(prompt) for prompt in requests}
        self.expect(requests, tickets)
        return tickets

    def expect(self, requests: Sequence[Prompt], tickets: dict[str, Ticket]) -> None:
        """Tells decode's ranks about the tickets."""
        self._request_of |= {ticket.ticket_id: request_id for request_id, ticket in tickets.items()}
        share = ConnectorConfig(**self._options[0]).verified_share
        span = self.decode.span
        expects = [
            Expect(
                p.request_id,
                t.ticket_id,
                t.digest(),
                p.d_blocks,
                p.cached,
                VerifiedBlocks(
                    (p.d_blocks[p.cached // span :], *map(list, t.remote_block_ids[1:])),
                    p.num_tokens,
                    column_tokens(t.spans, p.num_tokens),
                )
                if share
                else None,
            )
            for p in requests
            for t in [tickets[p.request_id]]
        ]
        self.each(self.d_ranks, "step", DecodeStep(expects))

    def wait_granted(self, timeout_s: float = 30.0) -> None:
        """Waits until every prefill rank may write."""
        deadline = time.monotonic() + timeout_s
        while not all(self.each(self.p_ranks, "is_granted")):
            assert time.monotonic() < deadline, "no grant"
            time.sleep(0.02)

    def cancel(self, tickets: dict[str, str]) -> None:
        """Ends tickets (by id) for a reason, for example because the proxy has no other prefill engine for them."""
        self.each(self.d_ranks, "step", DecodeStep(cancelled=tickets))

    def addresses(self, layer: int, blocks: list[int]) -> list[tuple[str, int, int]]:
        """Returns (session, address, bytes) of blocks of a layer on all decode ranks. Addresses may be equal."""
        found = []
        for rank in self.descriptions:
            for tensor in rank.caches.tensors:
                geometry = rank.caches.geometry_of(tensor)
                if tensor.layer == layer_name(layer):
                    starts = [tensor.base + block * geometry.block_stride for block in blocks]
                    found += [(rank.session, start, geometry.block_bytes) for start in starts]
        return found

    def each(self, ranks: list[Rank], name: str, *args: Any) -> list[Any]:
        for rank in ranks:
            rank.send(name, *args)
        return [rank.receive() for rank in ranks]

    def wait_arrivals(self, count: int, timeout_s: float = 30.0) -> tuple[set[str], dict[str, str]]:
        """Waits until every decode rank has ended `count` requests. Returns (received by all, failed -> reason).

        A ticket that has failed on one rank is cancelled on all, as the scheduler does.
        """
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
                if why:
                    self.cancel(why)
            time.sleep(0.01)
        return set.intersection(*finished) - lost, {request: reasons[request] for request in lost}

    def wait_sent(self, count: int, timeout_s: float = 30.0) -> dict[str, str]:
        """Waits until every prefill rank is done with `count` requests. Returns failures, which must not name
        addresses, since clients read them.
        """
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
        hosts = [f"{HOST}:", authority(self._d_host, 1)[:-1]]
        assert not any(host in reason for reason in failed.values() for host in hosts), failed
        return failed

    def differences(self, prompts: list[Prompt]) -> list[str]:
        return [
            f"decode rank {i}: {what}"
            for i, found in enumerate(self.each(self.d_ranks, "differences", prompts))
            for what in found
        ]

    def kill(self, rank: Rank) -> None:
        """Kills a prefill rank's process. The others are not told."""
        self.p_ranks.remove(rank)
        rank.kill()

    def close(self) -> list[str]:
        ranks = self.p_ranks + self.d_ranks
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.stop()
        left = [what for rank in ranks for what in rank.stopped()]
        self.listener.close(5.0)
        return left


MakePair = Callable[..., Pair]


@contextlib.contextmanager
def made_pairs() -> Iterator[MakePair]:
    """A function that makes pairs. All of them are closed in the end, and must leave nothing behind."""
    made: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    assert [what for pair in made for what in pair.close()] == []


@contextlib.contextmanager
def connected_pair(*args: Any, **options: Any) -> Iterator[Pair]:
    """A pair that has pushed one request of a block already, which must leave nothing behind."""
    pair = Pair(*args, **options)
    try:
        run(pair, prompts(pair, [pair.decode.block_size]))
        assert pair.wait_arrivals(1) == ({"request-0"}, {})
        assert pair.wait_sent(1) == {}
        yield pair
    finally:
        left = pair.close()
    assert left == [], "\n".join(left)


def pair_of_each(
    shapes: Mapping[str, tuple[Any, ...]],
    scope: Any = "module",
    long_ones: Sequence[str] = (),
    afresh: bool = False,
    **options: Any,
) -> Any:
    """Returns a fixture: a pair of each shape in turn, which must leave nothing behind.

    long_ones: shapes of the long forms alone.
    afresh: processes that nothing has run in.
    """

    @pytest.fixture(scope=scope, params=[long(name) if name in long_ones else name for name in shapes])
    def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
        if afresh:
            start_afresh()
        made = Pair(*shapes[request.param], **options)
        yield made
        assert made.close() == []

    return pair


def _start(
    program: Any,
    engine_id: str,
    model: Model,
    side: Side,
    config: dict[str, Any],
    device: str,
    kernels: Path | None,
    host: str,
    first_device: int = 0,
) -> list[Rank]:
    init = f"tcp://{HOST}:{reserve_port()}"
    options = (init, engine_id, config, device, host, first_device)
    return [
        Rank(program, model, side, rank, pp_rank, *options, device=device, kernels=kernels)
        for pp_rank in range(side.pp)
        for rank in range(side.ranks)
    ]
