# SPDX-License-Identifier: Apache-2.0
"""The simulator of benchmarks/simulate.py: plans, requests and clusters."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.documented import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))

from simulation.clock import Clock
from simulation.cluster import Cluster, Costs, Setup
from simulation.engines import DecodeSpeed, PrefillSpeed
from simulation.exchange import make_exchange
from simulation.figures import Spread, advise, run, simulated
from simulation.links import Link
from simulation.presets import find_model
from simulation.traffic import Arrival, Lengths, poisson
from simulation.validation import Compared

from vllm_ascend_pd.core.topology import writers_to
from vllm_ascend_pd.tools.plan.engine import Layout, PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.timing import make_timing

LLAMA = make_exchange(find_model("llama-3.1-70b"), 8, 4, 1)
MLA = make_exchange(find_model("deepseek-r1"), 16, 4, 2)
PREFILL = PrefillSpeed(token_s=20e-6, step_s=0.0, step_tokens=8192)
DECODE = DecodeSpeed(step_s=0.02, request_s=1e-4, slots=100, tokens=1 << 20)
FREE = Costs(nic=10e9, write_s=0.0, descriptor_s=0.0, control_s=0.0, http_s=0.0)


def cluster_of(prefill: int = 1, decode: int = 1, **changed: Any) -> Setup:
    return replace(Setup(LLAMA, prefill, decode, 1, PREFILL, DECODE, FREE), **changed)


def play(setup: Setup, arrivals: Sequence[Arrival]) -> Cluster:
    clock = Clock()
    cluster = Cluster(clock, setup)
    for arrival in arrivals:
        clock.at(arrival.at, cluster.arrive, arrival)
    clock.run()
    return cluster


def links_of(cluster: Cluster) -> list[Link]:
    return [link for side in (cluster.p_links, cluster.d_links) for links in side.values() for link in links]


TRAFFIC = poisson(40.0, 20.0, Lengths("lognormal", 1500, 0.8), Lengths("fixed", 50), seed=3)


# --- plans -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "p_tp", "d_tp"), [("llama-3.1-70b", 8, 4), ("deepseek-r1", 16, 4)])
def test_plans_grow_by_whole_units(name: str, p_tp: int, d_tp: int) -> None:
    """Which is why one of a single unit serves all requests."""
    model = find_model(name)
    exchange = make_exchange(model, p_tp, d_tp, 1)
    sides = PlannedEngine("prefill", p_tp, 1, 1, 128), PlannedEngine("decode", d_tp, 1, 1, 128)
    plan = make_plan(model, Layout.VLLM_ASCEND, *sides, step_tokens=8192, staging_slots=4, tokens=700)
    units = exchange.units(0, 700, True)
    assert units == plan.prompt.units
    assert units * exchange.unit_bytes == plan.prompt.nbytes
    assert units * exchange.rank_bytes == plan.prompt.busiest_sender


@given(st.lists(st.integers(1, 700), min_size=1, max_size=6))
def test_steps_of_a_prompt_have_all_its_units(steps: list[int]) -> None:
    ends = np.cumsum(steps).tolist()
    pairs = list(zip([0, *ends], ends, strict=False))
    found = [LLAMA.units(start, stop, stop == ends[-1]) for start, stop in pairs]
    assert sum(found) == -(-ends[-1] // LLAMA.unit)
    assert min(found) >= 0


@pytest.mark.parametrize("exchange", [LLAMA, MLA], ids=["llama", "mla"])
def test_ranks_of_a_lane_are_those_that_decode_waits_for(exchange: Any) -> None:
    prefill, decode = exchange.prefill.sharding, exchange.decode.sharding
    total = exchange.d_caches.geometries[0].total_heads
    assert exchange.writers == tuple(writers_to(0, decode, prefill, total, lane) for lane in range(exchange.lanes))


def test_ranks_share_nics() -> None:
    """With MLA one rank of prefill serves a request, on a NIC that it shares; decode's four ranks have two."""
    assert MLA.lanes == 16
    assert MLA.p_nics == 8
    assert all(parts == ((lane // 2, 1.0),) for lane, parts in enumerate(MLA.p_loads))
    assert set(MLA.d_loads) == {((0, 0.5),)}
    assert LLAMA.p_loads == (((0, 1 / 8),),)


def test_engines_share_nics() -> None:
    """Three of one rank on NICs for two ranks: the third has one to itself."""
    small = make_exchange(find_model("llama-3.1-8b"), 1, 1, 2)
    cluster = play(cluster_of(3, 3, exchange=small), TRAFFIC)
    [first], [second], [third] = cluster.p_links.values()
    assert first is second
    assert third is not first
    passed = sum(link.carried for link in {first, third})
    assert passed == pytest.approx(sum(-(-a.prompt // small.unit) * small.unit_bytes for a in TRAFFIC))
    assert advise(cluster.setup, 1000, 10).p_links == pytest.approx(1.5 * FREE.nic / (8 * small.unit_bytes))


# --- a request by itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [128, 1000, 4096])
@pytest.mark.parametrize("nic", [100e9, 3e9, 0.05e9])
def test_alone_it_takes_what_the_plan_command_says(tokens: int, nic: float) -> None:
    model = find_model("llama-3.1-70b")
    sides = PlannedEngine("prefill", 8, 1, 1, 128), PlannedEngine("decode", 4, 1, 1, 128)
    plan = make_plan(model, Layout.VLLM_ASCEND, *sides, step_tokens=8192, staging_slots=4, tokens=tokens)
    compute_s = tokens * PREFILL.token_s
    timing = make_timing(plan, nic * 8 / 1e9, 1000 * compute_s)
    assert timing.after_prefill_ms is not None
    [(kv, after_s)] = simulated(cluster_of(costs=replace(FREE, nic=nic)), [Arrival(1.0, tokens, 10, 5)])
    assert after_s == pytest.approx(timing.after_prefill_ms / 1000)
    assert kv == pytest.approx(compute_s + after_s)


def test_every_message_takes_its_time() -> None:
    """Four between proxy and engines until the client has a token; a report at the end; the first token's step. Grants
    are asked for while the first layer is computed."""
    costs = replace(FREE, control_s=0.0005, http_s=0.002)
    [request] = play(cluster_of(costs=costs), [Arrival(0.0, 1024, 10, 0)]).requests
    compute_s = 1024 * PREFILL.token_s
    transfer_s = request.received_at - request.prefilled_at - costs.control_s
    rank_bytes = 2 * 8 * LLAMA.rank_bytes  # eight units, on a decode rank, which has twice the heads of a prefill rank
    assert transfer_s == pytest.approx(rank_bytes / LLAMA.layers / costs.nic)
    step_s = DECODE.seconds(1)
    assert request.token_at == pytest.approx(4 * 0.002 + compute_s + transfer_s + 0.0005 + step_s)
    assert request.ended_at == pytest.approx(request.token_at - 0.002 + 9 * step_s)


def test_grants_that_take_long_delay_the_first_write() -> None:
    """A layer of a short prompt is computed before its grant is there."""
    fast = replace(PREFILL, token_s=1e-9)
    slow = cluster_of(prefill_speed=fast, costs=replace(FREE, nic=1e15, control_s=0.01))
    [(kv, _)] = simulated(slow, [Arrival(0.0, 128, 1, 0)])
    assert kv == pytest.approx(3 * 0.01, rel=1e-3)


# --- clusters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [LLAMA, MLA], ids=["llama", "mla"])
@pytest.mark.parametrize("nic", [20e9, 2e9])
def test_all_bytes_of_all_requests_arrive_once(exchange: Any, nic: float) -> None:
    cluster = play(cluster_of(2, 2, exchange=exchange, costs=replace(FREE, nic=nic, control_s=0.001)), TRAFFIC)
    assert len(cluster.requests) == len(TRAFFIC)
    nbytes = 0
    for request in cluster.requests:
        units = -(-request.arrival.prompt // exchange.unit)
        assert not request.failed
        assert request.nbytes == pytest.approx(units * exchange.unit_bytes, rel=1e-6)
        assert 0 <= request.early < request.nbytes
        nbytes += units * exchange.unit_bytes
        arrival, seen = request.arrival, request
        assert arrival.at <= seen.ticket_at <= seen.step_at < seen.prefilled_at < seen.received_at < seen.token_at
        assert seen.token_at < seen.ended_at
    kinds = len(cluster.p_links["p0"]), len(cluster.d_links["d0"])
    assert kinds == (exchange.p_nics, exchange.d_nics)
    for link in links_of(cluster):
        assert link.peak <= link.capacity * (1 + 1e-6)
        assert not link.flows
    passed = sum(link.carried for links in cluster.d_links.values() for link in links)
    [(_, part)] = exchange.d_loads[0]
    assert passed == pytest.approx(nbytes * part)
    for engine in (*cluster.prefill.values(), *cluster.decode.values()):
        assert engine.queue.value == 0
    assert all(engine.held.value == engine.running.value == 0 for engine in cluster.decode.values())


def test_the_same_seed_gives_the_same_figures() -> None:
    def figures(seed: int) -> Any:
        arrivals = poisson(20.0, 5.0, Lengths("uniform", 100, 4000), Lengths("fixed", 20), seed)
        return replace(run(cluster_of(2, 1), arrivals, 1.0, 5.0, cells=2), took_s=0.0)

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_more_prefill_engines_shorten_the_queue() -> None:
    found = [run(cluster_of(count, 2), TRAFFIC, 4.0, 20.0) for count in (1, 2, 4)]
    queues = [figures.prefill_queue.mean * count for figures, count in zip(found, (1, 2, 4), strict=True)]
    assert queues[0] > queues[1] > queues[2]
    assert found[0].ttft.p90 > found[1].ttft.p90 > found[2].ttft.p90
    assert found[0].prefill_busy > found[1].prefill_busy > found[2].prefill_busy


def test_decode_admits_what_it_has_room_for() -> None:
    few = replace(DECODE, slots=4)
    cluster = play(cluster_of(4, 1, decode_speed=few), TRAFFIC)
    [engine] = cluster.decode.values()
    assert engine.held.maximum == 4
    assert engine.queue.maximum > 10
    small = replace(DECODE, tokens=5000)
    [engine] = play(cluster_of(4, 1, decode_speed=small), TRAFFIC).decode.values()
    assert engine.queue.maximum > 10


def test_tickets_that_wait_too_long_fail() -> None:
    """Decode's own deadline, as its state machine has it: here prefill has more than an hour of work before them."""
    slow = replace(PREFILL, token_s=0.1)
    cluster = play(cluster_of(1, 1, prefill_speed=slow), [Arrival(0.0, 4000, 1, salt) for salt in range(12)])
    failed = [request.failed for request in cluster.requests]
    assert (failed[0], failed[-1]) == (False, True)
    assert all(engine.held.value == 0 for engine in cluster.decode.values())


def test_advice_is_what_clusters_can_do() -> None:
    """Asked for more than the side that is full first can serve, it serves that much."""
    setup = cluster_of(1, 2)
    advice = advise(setup, 2000, 20)
    assert advice.full_first == "prefill"
    arrivals = poisson(1.5 * advice.prefill, 60.0, Lengths("fixed", 2000), Lengths("fixed", 20), seed=1)
    cluster = play(setup, arrivals)
    computed = sum(request.prefilled_at < 60.0 for request in cluster.requests)
    assert computed / 60.0 == pytest.approx(advice.prefill, rel=0.05)
    narrow = advise(replace(setup, costs=replace(FREE, nic=1e8)), 2000, 20)
    assert narrow.full_first == "p_links"


def test_a_comparison_that_is_off_after_prefill_does_not_hold() -> None:
    """However near the percentiles are, most of which is computing."""
    spread = Spread(1.0, 2.0, 3.0)
    near = Compared("row", 0.5, 60, spread, Spread(1.1, 2.1, 2.9), 0.004, 0.0033, 0.001)
    assert near.off == pytest.approx({"p50": 0.1, "p90": 0.05, "p99": -1 / 30, "after_prefill": -0.175})
    assert near.holds
    off = replace(near, simulated_after=0.003)
    assert not off.holds
    assert "-25%" in off.text()
    assert off.text().endswith("<- off")
    assert not replace(near, measured=Spread(0.9, 2.0, 3.0)).holds


@pytest.mark.parametrize("text", ["fixed", "fixed:0", "uniform:5:2", "normal:1:2", "fixed:x"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"fixed:4096|no such lengths|could not convert"):
        Lengths.parse(text)


def test_lengths_have_their_mean() -> None:
    generator = np.random.default_rng(1)
    for text in ("fixed:700", "uniform:1:999", "lognormal:500:0.6"):
        lengths = Lengths.parse(text)
        assert np.mean(lengths.draw(generator, 20000)) == pytest.approx(lengths.mean, rel=0.03)
