# SPDX-License-Identifier: Apache-2.0
"""A cluster: a proxy, prefill and decode engines, the links between them, and the way of a request through all of it.

proxy -> decode: admitted, ticket -> proxy -> prefill: queue, steps, KV layer by layer -> decode: received, first token
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.proxy.routing.balance import STRATEGIES, EngineLoad, decode_costs, prefill_costs
from vllm_ascend_pd.proxy.routing.prompts import PromptEstimate
from vllm_ascend_pd.transport.batches import TransferLimits

from .clock import Clock
from .engines import DecodeEngine, DecodeSpeed, Piece, PrefillEngine, PrefillSpeed, Request
from .exchange import Exchange
from .links import Flow, Link, Network
from .tickets import Tickets, Transfer
from .traffic import Arrival


@dataclass(frozen=True)
class Costs:
    """Of moving things. `nic`: bytes per second in either direction; `write_s`: of a write of one layer to one decode
    rank, besides its bytes, `descriptor_s` of each of its descriptors; `control_s`: a message of the side channel, one
    way; `http_s`: a request or answer between proxy and engine."""

    nic: float
    write_s: float
    descriptor_s: float
    control_s: float
    http_s: float


@dataclass(frozen=True)
class Setup:
    """`decode_dp`: data-parallel engines of each decode deployment, which the proxy knows apart."""

    exchange: Exchange
    prefill: int
    decode: int
    decode_dp: int
    prefill_speed: PrefillSpeed
    decode_speed: DecodeSpeed
    costs: Costs
    strategy: str = "prefix-affinity"

    @property
    def decode_engines(self) -> int:
        return self.decode * self.decode_dp


class _Lane(NamedTuple):
    """Where flows are sent one after the other: the senders of one lane's ranks for one decode engine."""

    prefill: str
    decode: str
    lane: int


@dataclass(eq=False)
class _Push:
    """What a step sends on a lane: pieces, bytes, and the flow once it has begun."""

    pieces: list[Piece]
    nbytes: float
    step_at: float
    seconds: float
    flow: Flow | None = None
    early: float = 0.0


class _Side:
    """What the proxy knows of the engines of one role: what it has sent there and had no answer to."""

    def __init__(self, strategy: str, prefill: bool, urls: list[str], capacity: int | None) -> None:
        self._strategy = STRATEGIES[strategy](prefill_costs if prefill else decode_costs)
        self._loads = {url: EngineLoad(url, capacity=capacity) for url in urls}

    def choose(self, tokens: int) -> str:
        prompt = PromptEstimate(tokens)
        url = self._strategy.order(prompt, [*self._loads.values()])[0]
        self._strategy.sent(prompt, url)
        self.count(url, 1, tokens)
        return url

    def count(self, url: str, requests: int, tokens: int) -> None:
        load = self._loads[url]
        self._loads[url] = EngineLoad(url, load.requests + requests, load.tokens + tokens, load.capacity)


def _nics(engines: list[str], kinds: int, sharing: int, capacity: float) -> dict[str, list[Link]]:
    """Of each engine; neighbours share theirs, so many."""
    links: dict[str, list[Link]] = {}
    for i, name in enumerate(engines):
        links[name] = links[engines[i - 1]] if i % sharing else [Link(capacity) for _ in range(kinds)]
    return links


class Cluster:
    """`links`: those of prefill's engines, then decode's, by engine."""

    def __init__(self, clock: Clock, setup: Setup) -> None:
        self.clock, self.setup = clock, setup
        exchange, costs = setup.exchange, setup.costs
        self.network = Network(clock)
        self.tickets = Tickets(clock, exchange, ConnectorConfig(), costs.control_s, TransferLimits().settle_s)
        self.requests: list[Request] = []
        self.prefill = {
            name: PrefillEngine(name, clock, setup.prefill_speed, self._begun, self._computed)
            for name in (f"p{i}" for i in range(setup.prefill))
        }
        self.decode = {
            name: DecodeEngine(name, clock, setup.decode_speed, self._admitted, self._token, self._ended)
            for name in (f"d{i}" for i in range(setup.decode_engines))
        }
        self._sides = {
            "prefill": _Side(setup.strategy, True, [*self.prefill], None),
            "decode": _Side(setup.strategy, False, [*self.decode], setup.decode_speed.tokens),
        }
        self.p_links = _nics([*self.prefill], exchange.p_nics, exchange.engines_per_nic(exchange.prefill), costs.nic)
        self.d_links = _nics([*self.decode], exchange.d_nics, exchange.engines_per_nic(exchange.decode), costs.nic)
        self._pushes: dict[_Lane, deque[_Push]] = {}

    # The proxy.

    def arrive(self, arrival: Arrival) -> None:
        request = Request(arrival)
        self.requests.append(request)
        request.decode = self.decode[self._sides["decode"].choose(arrival.prompt)]
        self.clock.after(self.setup.costs.http_s, request.decode.add, request)

    def _admitted(self, request: Request) -> None:
        """Decode has blocks for it, and issues the ticket."""
        request.ticket_at = self.clock.now
        lane = request.arrival.salt % self.setup.exchange.lanes
        request.transfer = Transfer(self.tickets, lane, partial(self._received, request))
        self.clock.after(self.setup.costs.http_s, self._ticket, request)

    def _ticket(self, request: Request) -> None:
        """The ticket is at the proxy."""
        engine = self.prefill[self._sides["prefill"].choose(request.arrival.prompt)]
        self.clock.after(self.setup.costs.http_s, engine.add, request)

    # Prefill.

    def _begun(self, engine: PrefillEngine, pieces: list[Piece], seconds: float) -> None:
        now, exchange = self.clock.now, self.setup.exchange
        fused: dict[_Lane, list[Piece]] = {}
        for piece in pieces:
            request = piece.request
            if piece.first:
                request.step_at = now
                request.transfer.open(engine.name)
            if exchange.units(piece.start, piece.stop, piece.last):
                lane = _Lane(engine.name, request.decode.name, request.arrival.salt % exchange.lanes)
                fused.setdefault(lane, []).append(piece)
        for lane, together in fused.items():
            units = sum(exchange.units(piece.start, piece.stop, piece.last) for piece in together)
            push = _Push(together, float(units * exchange.unit_bytes), now, seconds)
            queue = self._pushes.setdefault(lane, deque())
            queue.append(push)
            if len(queue) == 1:
                self._next(lane)

    def _next(self, lane: _Lane) -> None:
        """The push at the head of the lane's queue has its turn: once all of its requests have their grants."""
        push = self._pushes[lane][0]
        waits = [piece.request.transfer for piece in push.pieces if not piece.request.transfer.is_granted]
        if waits:
            waits[0].when_granted(partial(self._next, lane))
            return
        begins = push.step_at + push.seconds / self.setup.exchange.layers
        if begins > self.clock.now:
            self.clock.at(begins, self._send, lane)
        else:
            self._send(lane)

    def _send(self, lane: _Lane) -> None:
        exchange, costs = self.setup.exchange, self.setup.costs
        push = self._pushes[lane][0]
        live = [piece for piece in push.pieces if piece.request.transfer.may_write]
        if len(live) < len(push.pieces):  # a lease that ran out, or a refusal
            units = sum(exchange.units(piece.start, piece.stop, piece.last) for piece in live)
            push.nbytes = float(units * exchange.unit_bytes)
        if not push.nbytes:
            self._sent(lane)
            return
        loads = [(self.p_links[lane.prefill][kind], part) for kind, part in exchange.p_loads[lane.lane]]
        loads += [(self.d_links[lane.decode][kind], part) for kind, part in exchange.d_loads[lane.lane]]
        units = push.nbytes / exchange.unit_bytes
        # A rank's sender writes layer by layer, to one decode rank after the other.
        overhead = (
            exchange.layers * exchange.targets * costs.write_s + units * exchange.descriptors * costs.descriptor_s
        )
        alone = units * exchange.rank_bytes / costs.nic + overhead
        push.flow = Flow(
            push.nbytes,
            tuple(loads),
            push.nbytes / alone,
            push.step_at,
            push.seconds,
            exchange.layers,
            partial(self._sent, lane),
        )
        self.network.start(push.flow)

    def _sent(self, lane: _Lane) -> None:
        queue = self._pushes[lane]
        push = queue.popleft()
        early = 0.0 if push.flow is None else push.flow.early / push.flow.nbytes
        for piece in push.pieces:
            units = self.setup.exchange.units(piece.start, piece.stop, piece.last)
            nbytes = float(units * self.setup.exchange.unit_bytes)
            request = piece.request
            request.nbytes += nbytes
            # What earlier steps computed counts as early if it has all left by the prompt's end.
            in_time = not piece.last and not request.prefilled_at <= self.clock.now
            request.early += nbytes if in_time else nbytes * early
            if piece.last:
                request.transfer.finish(request.nbytes, request.early)
        if queue:
            self._next(lane)

    def _computed(self, engine: PrefillEngine, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.last:
                piece.request.prefilled_at = self.clock.now
                prompt = piece.request.arrival.prompt
                self.clock.after(self.setup.costs.http_s, self._sides["prefill"].count, engine.name, -1, -prompt)

    # Decode.

    def _received(self, request: Request, received: bool, nbytes: int, early: int) -> None:
        request.received_at = self.clock.now
        request.nbytes, request.early = float(nbytes), float(early)
        if received:
            request.decode.run(request)
        else:
            request.failed = True
            self._ended(request)
            request.decode.leave(request)

    def _token(self, request: Request) -> None:
        request.token_at = self.clock.now + self.setup.costs.http_s

    def _ended(self, request: Request) -> None:
        request.ended_at = self.clock.now
        url, prompt = request.decode.name, request.arrival.prompt
        self.clock.after(self.setup.costs.http_s, self._sides["decode"].count, url, -1, -prompt)
