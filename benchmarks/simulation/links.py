# SPDX-License-Identifier: Apache-2.0
"""KV on its way: flows over links that they share fairly (max-min).

A flow is what one step of prefill sends one decode engine over one lane of ranks. Its bytes become available as layers
are computed, evenly from the first layer's end on, the last layer's when prefill ends. So over idle links it ends when

    max(compute + one layer's transfer, one layer's compute + whole transfer)

has passed since its step began, as `planning.timing` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .clock import Clock

_NEGLIGIBLE = 1e-9  # relative


class Link:
    """A NIC in one direction, or all NICs of an engine that always carry the same. `capacity`: bytes per second."""

    __slots__ = ("capacity", "carried", "flows", "peak")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.flows: dict[Flow, float] = {}  # and what part of the flow's bytes passes here
        self.carried = 0.0
        self.peak = 0.0  # of all rates together

    @property
    def tight(self) -> bool:
        """Whether flows want more than there is."""
        wanted = sum(flow.limit * weight for flow, weight in self.flows.items())
        return wanted > self.capacity * (1 + _NEGLIGIBLE)


class Flow:
    """`nbytes` of all ranks together; `loads`: what part of them passes each link; `fastest`: what its sender manages
    by itself, bytes per second; `step_at`, `compute_s`, `layers`: of the step that computes it. `early`: bytes that had
    left when that ended. `done` is called once all have."""

    __slots__ = (
        *("at", "catching", "demand", "done", "early", "end", "fastest", "first", "limit", "loads", "nbytes", "order"),
        *("rate", "sent"),
    )

    def __init__(
        self,
        nbytes: float,
        loads: tuple[tuple[Link, float], ...],
        fastest: float,
        step_at: float,
        compute_s: float,
        layers: int,
        done: Callable[[], None],
    ) -> None:
        self.nbytes, self.loads, self.done = nbytes, loads, done
        self.first, self.end = step_at + compute_s / layers, step_at + compute_s
        self.demand = nbytes / compute_s if compute_s > 0 else float("inf")  # while it computes
        self.fastest = min([fastest, *(link.capacity / weight for link, weight in loads)])
        self.limit = self.rate = self.sent = self.early = self.at = 0.0
        self.catching = False  # more is available than has left
        self.order = 0  # of its next event: those made before count no more


class Network:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def start(self, flow: Flow) -> None:
        """From now on it sends what is available; not before its first layer is."""
        now = flow.at = self._clock.now
        for link, weight in flow.loads:
            link.flows[flow] = weight
        if now >= flow.end:
            flow.limit = flow.fastest
        else:
            flow.catching = self._backlog(flow) > 0
            flow.limit = flow.fastest if flow.catching else min(flow.demand, flow.fastest)
            self._clock.at(flow.end, self._computed, flow)
        self._share(flow)

    def settle(self, links: Iterable[Link]) -> None:
        """Counts what has passed `links` by now."""
        for flow in {flow: None for link in links for flow in link.flows}:
            self._settle(flow)

    def _backlog(self, flow: Flow) -> float:
        """Available, and not sent. While the step computes."""
        return flow.demand * (self._clock.now - flow.first) - flow.sent

    def _settle(self, flow: Flow) -> None:
        now = self._clock.now
        moved = flow.rate * (now - flow.at)
        flow.at = now
        if moved > 0:
            flow.sent += moved
            for link, weight in flow.loads:
                link.carried += moved * weight

    def _computed(self, flow: Flow) -> None:
        """The step is over: all is available."""
        self._settle(flow)
        flow.early = flow.sent
        flow.limit = flow.fastest
        self._share(flow)

    def _milestone(self, flow: Flow, order: int) -> None:
        """It has caught up, or sent everything."""
        if order != flow.order:
            return
        self._settle(flow)
        if self._clock.now < flow.end:
            flow.catching = False
            flow.limit = min(flow.demand, flow.fastest)
            self._share(flow)
            return
        rest = flow.nbytes - flow.sent  # of rounding
        for link, weight in flow.loads:
            link.carried += rest * weight
            del link.flows[flow]
        flow.sent = flow.nbytes
        self._share(flow)
        flow.done()

    def _share(self, changed: Flow) -> None:
        """New rates for all whose rates may depend on what has changed."""
        flows: dict[Flow, None] = dict.fromkeys(f for link, _ in changed.loads for f in link.flows)
        tight: dict[Link, float] = {}
        waiting = list(flows)
        known: set[Link] = set()
        while waiting:
            for link, _ in waiting.pop().loads:
                if link in known:
                    continue
                known.add(link)
                if link.tight:
                    tight[link] = link.capacity
                    fresh = [flow for flow in link.flows if flow not in flows]
                    flows.update(dict.fromkeys(fresh))
                    waiting += fresh
        for flow, rate in _fair(flows, tight).items():
            behind = self._clock.now < flow.end and not flow.catching and rate < flow.limit * (1 - _NEGLIGIBLE)
            if flow is changed or behind or rate != flow.rate:
                self._set_rate(flow, rate, behind)
        for link in known:
            link.peak = max(link.peak, sum(flow.rate * weight for flow, weight in link.flows.items()))

    def _set_rate(self, flow: Flow, rate: float, behind: bool) -> None:
        now = self._clock.now
        self._settle(flow)
        if behind:  # it gets less than is computed, and will want more once it can have it
            flow.catching, flow.limit = True, flow.fastest
        flow.rate = rate
        flow.order += 1
        if now >= flow.end:
            self._clock.after((flow.nbytes - flow.sent) / rate, self._milestone, flow, flow.order)
        elif flow.catching and rate > flow.demand * (1 + _NEGLIGIBLE):
            then = now + max(0.0, self._backlog(flow)) / (rate - flow.demand)
            if then < flow.end:
                self._clock.at(then, self._milestone, flow, flow.order)


def _fair(flows: Iterable[Flow], room: dict[Link, float]) -> dict[Flow, float]:
    """Max-min fair rates; `room` has the links that cannot give all what they want, with all of their flows among
    `flows`, and is used up."""
    rates: dict[Flow, float] = {}
    by_limit = sorted(flows, key=lambda flow: flow.limit)
    for flow in [flow for flow in by_limit if not any(link in room for link, _ in flow.loads)]:
        rates[flow] = flow.limit
    waiting = [flow for flow in by_limit if flow not in rates]
    shares = dict.fromkeys(room, 0.0)
    for flow in waiting:
        for link, weight in flow.loads:
            if link in shares:
                shares[link] += weight

    def freeze(flow: Flow, rate: float) -> None:
        rates[flow] = rate
        for link, weight in flow.loads:
            if link in room:
                room[link] -= rate * weight
                shares[link] -= weight

    while waiting:
        narrowest = min(
            (link for link in room if shares[link] > _NEGLIGIBLE), key=lambda link: room[link] / shares[link]
        )
        level = max(1.0, room[narrowest] / shares[narrowest])  # rounding must not stop anything
        modest = [flow for flow in waiting if flow.limit <= level]
        for flow in modest:
            freeze(flow, flow.limit)
        if not modest:
            for flow in [flow for flow in waiting if flow in narrowest.flows]:
                freeze(flow, level)
        waiting = [flow for flow in waiting if flow not in rates]
    return rates
