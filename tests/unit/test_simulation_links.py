# SPDX-License-Identifier: Apache-2.0
"""The simulator's links: flows share their capacity and carry every byte once."""

import random
import sys
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.documented import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))

from simulation.clock import Clock
from simulation.links import Flow, Link, Network


class Traffic:
    """Flows over random links; what was true whenever something changed."""

    def __init__(self, chance: random.Random, flows: int) -> None:
        self.clock = Clock()
        self.network = Network(self.clock)
        self.links = [Link(chance.uniform(50, 200)) for _ in range(4)]
        self.flows: list[Flow] = []
        self.over: dict[Flow, float] = {}
        for _ in range(flows):
            loads = tuple((link, chance.choice([0.25, 0.5, 1.0])) for link in chance.sample(self.links, 2))
            at, fastest = chance.uniform(0, 5), chance.choice([40.0, 1e9])
            compute_s = chance.choice([0.0, 0.5, 3.0])
            flow = Flow(chance.uniform(1, 300), loads, fastest, at, compute_s, 4, lambda: None)
            flow.done = partial(self._done, flow)
            self.flows.append(flow)
            self.clock.at(max(flow.first, chance.uniform(0, 6)), self.network.start, flow)

    def _done(self, flow: Flow) -> None:
        self.over[flow] = self.clock.now


@given(st.integers(0, 1 << 30), st.integers(1, 12))
@settings(deadline=None)
def test_links_carry_every_byte_once_and_never_more_than_they_can(seed: int, flows: int) -> None:
    traffic = Traffic(random.Random(seed), flows)
    traffic.clock.run()
    assert len(traffic.over) == flows
    for link in traffic.links:
        passed = sum(flow.nbytes * dict(flow.loads).get(link, 0.0) for flow in traffic.flows)
        assert link.carried == pytest.approx(passed)
        assert link.peak <= link.capacity * (1 + 1e-6)
        assert not link.flows
    for flow, at in traffic.over.items():
        assert at >= flow.end
        assert flow.early <= flow.nbytes * 3 / 4 * (1 + 1e-6)  # not the last of four layers


def test_flows_share_what_others_leave() -> None:
    """Max-min: one that is slow by itself gets what it wants, the others the rest alike."""
    clock = Clock()
    network, link = Network(clock), Link(100.0)
    ends: dict[str, float] = {}

    def start(name: str, nbytes: float, fastest: float) -> None:
        network.start(Flow(nbytes, ((link, 1.0),), fastest, 0.0, 0.0, 1, lambda: ends.update({name: clock.now})))

    start("slow", 100.0, 10.0)
    start("one", 90.0, 1e9)
    start("other", 450.0, 1e9)
    clock.run()
    assert ends["one"] == pytest.approx(2.0)  # at 45 each
    assert ends["other"] == pytest.approx(2.0 + 360.0 / 90.0)
    assert ends["slow"] == pytest.approx(10.0)


def test_a_flow_catches_up_with_what_has_been_computed() -> None:
    """Ten layers of 10 bytes in 10 s over a link of 20: begun at 5.5 s, with 45 bytes available, it has sent them at
    10 s, but for the last layer."""
    clock = Clock()
    network, link = Network(clock), Link(20.0)
    flow = Flow(100.0, ((link, 1.0),), 1e9, 0.0, 10.0, 10, lambda: None)
    clock.at(5.5, network.start, flow)
    clock.run()
    assert flow.early == pytest.approx(90.0)
    assert clock.now == pytest.approx(10.5)
