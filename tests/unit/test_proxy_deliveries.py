# SPDX-License-Identifier: Apache-2.0
"""Failed transfers: which of the two engines they count against, by what the others deliver."""

import random
import time

import pytest
from proxied import settings_with

from vllm_ascend_pd.proxy.rendezvous.deliveries import Deliveries
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole, at_fault
from vllm_ascend_pd.proxy.routing.dispatch import EnginePool
from vllm_ascend_pd.transport.names import HostNames

P, D = EngineRole.PREFILL, EngineRole.DECODE
LIMIT = 3


@pytest.mark.parametrize(
    ("to_decode", "from_prefill", "role"),
    [
        ([], [], None),
        ([True], [], P),
        ([], [True], D),
        ([False], [], None),
        ([], [False], None),
        ([True], [True], None),
        ([False], [False], None),
        ([True, False], [], P),
        ([True, False], [False], P),
        ([True, False], [True], D),
        ([True] * 3, [True, True, False], P),
        ([False, False], [True, False], D),
    ],
)
def test_the_results_of_others_say_who_is_at_fault(
    to_decode: list[bool], from_prefill: list[bool], role: EngineRole | None
) -> None:
    assert at_fault(to_decode, from_prefill) is role


class World:
    """Engines named by one letter. Transfers of the pairs in `broken` fail."""

    def __init__(self, prefill: str, decode: str, broken: set[str]) -> None:
        self.pools = tuple(EnginePool(role, settings_with(eject_after=LIMIT), HostNames()) for role in EngineRole)
        for pool, urls in zip(self.pools, (prefill, decode), strict=True):
            for url in urls:
                pool.engines.add(url, "test").gate.checked(None)
        self.deliveries = Deliveries(*self.pools, ProxyObserver(RequestTable(1), ()), LIMIT)
        self.broken = broken

    def transfer(self, pair: str, begun: float | None = None) -> None:
        """`begun`: when; None: now, so that no other is under way."""
        if pair in self.broken:
            self.deliveries.failed(*pair, "it broke")
        else:
            self.deliveries.delivered(*pair, time.monotonic() if begun is None else begun)

    @property
    def shunned(self) -> str:
        now = time.monotonic()
        return "".join(each.url for pool in self.pools for each in pool.engines if each.gate.doubtful(now))


def pairs(prefill: str, decode: str) -> set[str]:
    return {p + d for p in prefill for d in decode}


@pytest.mark.parametrize(
    ("prefill", "decode", "broken", "shunned"),
    [
        ("ab", "x", pairs("a", "x"), "a"),
        ("abc", "x", pairs("ab", "x"), "ab"),
        ("abc", "xy", pairs("ab", "xy"), "ab"),
        ("ab", "xyz", pairs("a", "xyz"), "a"),
        ("ab", "xy", pairs("ab", "x"), "x"),
        ("a", "xy", {"ax"}, "x"),
        ("abc", "xyz", pairs("abc", "x") | pairs("a", "xyz"), "ax"),
        # Nobody can tell.
        ("a", "x", {"ax"}, ""),
        ("ab", "x", pairs("ab", "x"), ""),
        ("ab", "xy", pairs("ab", "xy"), ""),
        # Engines that do not fit each other, and fit others.
        ("ab", "xy", {"ax", "by"}, ""),
        ("abc", "xyz", {"ax"}, ""),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_engines_that_are_at_fault_are_passed_over_and_no_others(
    prefill: str, decode: str, broken: set[str], shunned: str, seed: int
) -> None:
    world, order = World(prefill, decode, broken), random.Random(seed)
    everything = sorted(pairs(prefill, decode))
    for pair in everything:
        world.transfer(pair)
    for _ in range(60):
        world.transfer(order.choice(everything))
    for pair in sorted(everything, key=lambda pair: pair not in broken) * LIMIT:  # those that succeed come last
        world.transfer(pair)
    assert set(world.shunned) == set(shunned)
    assert len(world.deliveries.problems()) == len(broken)


def test_an_outage_of_the_only_decode_engine_passes_no_prefill_engine_over() -> None:
    world = World("abc", "x", set())
    for _ in range(3):
        for broken in (set[str](), pairs("abc", "x")):
            world.broken = broken
            for pair in ("ax", "bx", "cx") * 4:
                world.transfer(pair)
            assert world.shunned == ""
    assert world.deliveries.passed_over(["x"]) == frozenset("abc")


@pytest.mark.parametrize(("decode", "later", "shunned"), [("x", "bx", "a"), ("xy", "ay", "x"), ("xy", "by", "")])
@pytest.mark.parametrize("beside", [True, False])
def test_failures_before_any_success_count_if_a_success_was_under_way(
    decode: str, later: str, shunned: str, beside: bool
) -> None:
    """Of clients that come all at once. Otherwise it may have been an outage that is over."""
    world, begun = World("ab", decode, {"ax"}), time.monotonic()
    for _ in range(LIMIT):
        world.transfer("ax")
    assert world.shunned == ""
    world.transfer(later, begun if beside else None)
    assert world.shunned == (shunned if beside else "")


def test_a_pair_is_passed_over_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    world = World("ab", "xy", {"ax"})
    for pair in ("ay", "bx", *["ax"] * LIMIT):
        world.transfer(pair)
    over = world.deliveries.passed_over
    assert [set(over(urls)) for urls in (["x"], ["y"], ["x", "y"], [])] == [{"a"}, set(), set(), set()]
    [(where, why)] = world.deliveries.problems().items()
    assert (where, why) == (
        "prefill engine a to decode engine x",
        "no KV arrives: the last 3 transfers failed: it broke",
    )
    now += 11
    assert over(["x"]) == frozenset()
    world.transfer("ax")
    assert over(["x"]) == frozenset("a")
    world.broken.clear()
    world.transfer("ax")
    assert over(["x"]) == frozenset()
    assert world.deliveries.problems() == {}


def test_removed_engines_are_forgotten() -> None:
    world = World("ab", "x", {"ax"})
    for _ in range(LIMIT):
        world.transfer("ax")
    engines = world.pools[0].engines
    removed = engines.get("a")
    assert removed is not None
    engines.remove(removed)
    assert world.deliveries.problems() == {}
    world.transfer("ax")
    assert world.deliveries.passed_over(["x"]) == frozenset()


def test_a_removed_decode_engine_passes_no_prefill_engine_over() -> None:
    world = World("ab", "xy", {"ax"})
    for pair in ("by", *["ax"] * LIMIT):
        world.transfer(pair)
    engines = world.pools[1].engines
    removed = engines.get("x")
    assert removed is not None
    engines.remove(removed)
    assert [set(world.deliveries.passed_over(urls)) for urls in (["x"], ["x", "y"])] == [set(), set()]


def test_short_prompts_that_decode_computes_do_not_hide_that_it_gets_no_kv() -> None:
    world = World("a", "xy", {"ax"})
    world.transfer("ay")
    for _ in range(LIMIT):
        world.transfer("ax")
        world.pools[1].note_request_result("x", None)
    assert world.shunned == "x"
