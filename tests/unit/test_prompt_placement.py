# SPDX-License-Identifier: Apache-2.0
"""Who computes a prompt: decisions from figures, without an engine."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.engine_view import EngineSteps
from vllm_ascend_pd.core.observer import Observer
from vllm_ascend_pd.core.reasons import Decision, Reason
from vllm_ascend_pd.core.ticket_params import prefill_wait_s
from vllm_ascend_pd.decode.who_computes import CostLine, PromptPlacement, StepTimes, TimeBudget

STEP = 2048


@dataclass
class Prompt:
    """A request, as far as the placement looks at it."""

    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] = field(default_factory=dict)
    request_id: str = "r"
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    is_text: bool = True
    max_tokens: int = 16

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class World:
    """A decode engine that does as it is told, and a clock."""

    def __init__(self, who_computes: Any = "auto", steps: EngineSteps | None = None, **settings: Any) -> None:
        self.now = 1000.0
        self.requests: Any = SimpleNamespace(
            token_ids=lambda request: [] if request.is_text else None, external_id=lambda request: request.request_id
        )
        blocks: Any = SimpleNamespace(have_prompt=lambda request, cached: request.num_prompt_tokens - cached <= 1)
        self.placement = PromptPlacement(
            self.requests,
            blocks,
            ConnectorConfig(who_computes=who_computes, **settings),
            steps or EngineSteps(STEP),
            Observer(),
            lambda: self.now,
        )

    def computes_here(self, tokens: int, seconds: float, times: int = 4) -> None:
        """Nothing else is computed meanwhile."""
        for _ in range(times):
            self.begins("measured", tokens)
            self.now += seconds
            self.placement.step_built({"measured": 1})
            self.placement.forget("measured")
            self.placement.step_built({})

    def begins(self, name: str, tokens: int) -> None:
        prompt = Prompt(tokens, request_id=name)
        self.placement.allocated(prompt, by_decode=True)
        self.placement.step_built({name: tokens})

    def generates(self) -> None:
        """For another request, which goes on."""
        for _ in range(4):
            self.placement.step_built({"other": 1})
            self.now += 0.01

    def prefill_takes(self, seconds: float, tokens: int = 100, waited_s: float = 0.0, times: int = 4) -> None:
        for _ in range(times):
            self.placement.delivered(tokens, seconds, waited_s)

    def decides(self, tokens: int, cached: int = 0, **params: Any) -> Decision:
        return self.placement.decide(Prompt(tokens + cached, params), cached)


def here(reason: Reason) -> Decision:
    return Decision(True, reason)


def there(reason: Reason) -> Decision:
    return Decision(False, reason)


def measured(**settings: Any) -> World:
    """Decode takes 20 ms and 1 ms for each token, prefill 120 ms whatever the prompt: as much as 100 tokens here."""
    world = World(**settings)
    for tokens in (8, 200, 400):
        world.computes_here(tokens, 0.02 + 0.001 * tokens)
    world.prefill_takes(0.12)
    return world


@pytest.mark.parametrize("side", [None, "computes_here", "prefill_takes"])
def test_before_both_sides_were_measured_short_prompts_are_cheap(side):
    world = World()
    if side == "prefill_takes":
        world.prefill_takes(10.0)
    elif side == "computes_here":
        world.computes_here(500, 0.001)
    else:
        assert world.placement.threshold() == 64
    assert (world.decides(64), world.decides(65)) == (here(Reason.CHEAP), there(Reason.LONG))


def test_what_is_computed_sooner_here_is_cheap():
    world = measured()
    assert (world.decides(99), world.decides(101)) == (here(Reason.CHEAP), there(Reason.LONG))
    assert world.decides(99, cached=1600) == here(Reason.CHEAP)
    assert world.placement.threshold() == pytest.approx(100, abs=1)


def test_time_in_prefills_queue_counts():
    world = measured()
    assert (world.decides(290, prefill_wait_s=0.2), world.decides(310, prefill_wait_s=0.2)) == (
        here(Reason.CHEAP),
        there(Reason.LONG),
    )


def test_the_queue_of_then_is_not_the_queue_of_now():
    world = measured()
    world.prefill_takes(5.12, waited_s=5.0, times=100)
    assert world.placement.threshold() < 1300  # not all of it is believed to have been a wait
    world = measured()
    world.prefill_takes(0.2, waited_s=0.08, times=100)
    assert world.placement.threshold() == pytest.approx(100, abs=1)


def test_a_slow_engine_leaves_all_to_prefill():
    world = World()
    world.computes_here(32, 1.0)
    world.prefill_takes(0.05)
    assert world.decides(8) == there(Reason.LONG)
    assert world.placement.threshold() == 0


def test_long_prompts_on_prefill_do_not_make_short_ones_look_cheap_there():
    world = World()
    for tokens in (8, 32, 64):
        world.computes_here(tokens, 0.02 + 0.0003 * tokens)
    for tokens in (1000, 2000, 4000):
        world.prefill_takes(0.001 * tokens - 0.5, tokens)
    assert world.decides(64) == here(Reason.CHEAP)


def test_what_is_no_longer_measured_is_forgotten():
    world = World()
    world.computes_here(32, 1.0)
    world.prefill_takes(0.05)
    world.now += 3600.0
    assert world.decides(64) == here(Reason.CHEAP)


def test_a_prompt_that_is_computed_in_parts_counts_for_what_is_left():
    world = measured()
    world.placement.allocated(prompt := Prompt(90, request_id="before"), by_decode=True)
    assert (world.decides(9), world.decides(11)) == (here(Reason.CHEAP), there(Reason.LONG))
    world.placement.step_built({"before": 50})
    prompt.num_computed_tokens = 50
    assert (world.decides(59), world.decides(61)) == (here(Reason.CHEAP), there(Reason.LONG))
    world.placement.forget("before")
    assert world.decides(99) == here(Reason.CHEAP)


@pytest.mark.parametrize("tokens", [0, 200])
def test_a_threshold_that_is_set(tokens):
    world = World(decode_prompt_tokens=tokens)
    assert world.decides(tokens + 2) == there(Reason.LONG)
    if tokens:
        assert world.decides(tokens) == here(Reason.CHEAP)
    assert world.placement.threshold() == tokens


def test_others_have_nearly_all_of_the_time():
    world = measured()
    world.generates()
    assert world.decides(64) == here(Reason.CHEAP)
    for _ in range(4):  # 84 ms each
        world.placement._spend(64)
    assert world.decides(64) == there(Reason.BUSY)
    assert world.decides(500) == there(Reason.LONG)
    world.now += 3.0
    assert world.decides(64) == here(Reason.CHEAP)


def test_an_engine_that_generates_for_nobody_has_all_the_time():
    world = measured(decode_prompt_share=0.0)
    assert world.decides(64) == here(Reason.CHEAP)
    world.generates()
    assert world.decides(64) == there(Reason.BUSY)
    world.placement.forget("other")
    assert world.decides(64) == here(Reason.CHEAP)


def test_engines_that_step_together_always_share_their_time():
    world = World(steps=EngineSteps(STEP, engines=4), decode_prompt_share=0.4)
    for _ in range(10):
        world.placement._spend(64)
    assert world.decides(64) == there(Reason.BUSY)
    world.now += 0.6
    assert world.decides(64) == there(Reason.BUSY)  # 0.32 s of 0.25 are spent: 0.07 s take 0.7 s at a tenth of time
    world.now += 9.0
    assert world.decides(64) == here(Reason.CHEAP)


def test_prefill_computes_all_unless_a_request_asks_for_decode():
    world = World("prefill", max_decode_prompt_tokens=100)
    assert world.decides(8, prefill_available=False) == there(Reason.POLICY)
    assert world.decides(100, who_computes="decode") == here(Reason.REQUESTED)
    assert world.decides(101, who_computes="decode") == there(Reason.POLICY)
    assert world.placement.threshold() == 0


def test_what_the_request_asks_for():
    world = measured(max_decode_prompt_tokens=1000)
    assert world.decides(8, who_computes="prefill") == there(Reason.REQUESTED)
    assert world.decides(1000, who_computes="decode") == here(Reason.REQUESTED)
    assert world.decides(1001, who_computes="decode") == there(Reason.LONG)
    assert world.decides(1, who_computes="prefill") == here(Reason.CACHED)


def test_without_a_prefill_engine_decode_computes_what_it_may():
    world = measured(max_decode_prompt_tokens=1000)
    assert world.decides(1000, prefill_available=False) == here(Reason.NO_PREFILL)
    assert world.decides(1000, prefill_available=False, who_computes="prefill") == here(Reason.NO_PREFILL)
    assert world.decides(1001, prefill_available=False) == there(Reason.LONG)
    assert measured(max_decode_prompt_tokens=0).decides(200, prefill_available=False) == there(Reason.LONG)


def test_a_prompt_that_has_to_fit_a_step_is_no_longer_whoever_asks():
    world = World(steps=EngineSteps(100, chunked=False))
    assert world.decides(101, prefill_available=False) == there(Reason.LONG)
    assert world.decides(101, who_computes="decode") == there(Reason.LONG)
    assert world.decides(100, who_computes="decode") == here(Reason.REQUESTED)


def test_a_prompt_with_images_is_prefills_unless_there_is_no_prefill():
    world, prompt = measured(), Prompt(40, is_text=False)
    assert world.placement.decide(prompt, 0) == there(Reason.POLICY)
    prompt.kv_transfer_params = {"prefill_available": False}
    assert world.placement.decide(prompt, 0) == here(Reason.NO_PREFILL)


NONSENSE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers())


@given(NONSENSE, NONSENSE, NONSENSE)
def test_nonsense_from_a_client_is_ignored(who, available, wait):
    params = {"who_computes": who, "prefill_available": available, "prefill_wait_s": wait}
    assert 0.0 <= prefill_wait_s(params) <= 86400.0
    decision = World().decides(65, **params)
    if who not in ("decode", "prefill") and available is not False:
        assert decision == there(Reason.LONG)


FIGURES = st.tuples(st.integers(1, 600), st.floats(0.0005, 2.0))


@given(
    st.lists(FIGURES, max_size=6),
    st.lists(FIGURES, max_size=6),
    st.integers(2, 3000),
    st.integers(0, 300),
    st.floats(0.0, 100.0),
    st.floats(0.0, 100.0),
)
def test_no_figures_exceed_the_bounds_and_a_longer_queue_never_speaks_for_prefill(
    steps, transfers, tokens, backlog, wait, more
):
    world = World(steps=EngineSteps(1000))
    for measured_tokens, seconds in steps:
        world.computes_here(measured_tokens, seconds, times=1)
    for measured_tokens, seconds in transfers:
        world.prefill_takes(seconds, measured_tokens, times=1)
    if backlog:
        world.placement.allocated(Prompt(backlog, request_id="before"), by_decode=True)
    largest = max((measured_tokens for measured_tokens, _ in steps), default=0)
    decision = world.decides(tokens, prefill_wait_s=wait)
    if decision.by_decode:
        assert tokens + backlog <= min(1000, max(64, 2 * largest))
        assert world.decides(tokens, prefill_wait_s=wait + more).by_decode
    assert 0 <= world.placement.threshold() <= min(1000, max(64, 2 * largest))


# --- what prompts cost, as measured ------------------------------------------------------------------------------


SAMPLES = st.lists(st.tuples(st.integers(0, 4096), st.floats(0.0, 1e4), st.floats(0.0, 1000.0)), max_size=40)


def line_of(*samples: tuple[float, float]) -> CostLine:
    line = CostLine()
    for tokens, seconds in samples:
        line.add(0.0, tokens, seconds)
    return line


@pytest.mark.parametrize("at", [0, 10, 30])
def test_one_step_that_compiles_does_not_count(at):
    samples = [(8 * (i % 4 + 1), 0.02) for i in range(31)]
    samples.insert(at, (64, 30.0))
    fixed, per_token = line_of(*samples).fit(0.0)
    assert 0.02 <= fixed + 32 * per_token < 0.04


def test_with_two_steps_in_flight_a_step_is_over_when_the_second_one_after_it_is_built():
    steps = StepTimes(in_flight=2)
    assert steps.built(1.0, {"a"}, 40) is None
    assert steps.built(1.0, {"a"}, 0) is None  # at once: the queue is not full
    assert steps.built(1.5, {"a"}, 0) == (40, 0.5)
    assert steps.built(1.75, {"a"}, 8) == (0, 0.75)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_pause_does_not_count(in_flight):
    steps = StepTimes(in_flight)
    for now in range(in_flight + 1):
        steps.built(float(now), {"a"}, 5)
    steps.alive.discard("a")
    assert steps.built(100.0, {"b"}, 7) is None
    measured = [steps.built(101.0 + now, {"b"}, 0) for now in range(in_flight)]
    assert measured[-1] == (7, float(in_flight))


def test_a_step_that_computes_nothing_does_not_count():
    steps = StepTimes(in_flight=1)
    steps.built(1.0, {"a"}, 5)
    assert steps.built(2.0, set(), 0) is None
    assert steps.built(3.0, {"a"}, 5) is None
    assert steps.built(4.0, {"a"}, 5) == (5, 1.0)


def test_samples_are_forgotten():
    line = line_of(*[(8, 0.1)] * 32)
    assert line.fit(600.0) is not None
    assert line.fit(900.0) is None


@given(SAMPLES, st.floats(0.0, 2000.0), st.none() | st.tuples(st.floats(1e-4, 100.0), st.just(0.0)))
def test_a_fit_is_finite_and_never_negative(samples, later, at_zero):
    line = CostLine()
    now = 0.0
    for tokens, seconds, after in samples:
        now += after
        line.add(now, tokens, seconds)
    if (fit := line.fit(now + later, at_zero)) is not None:
        assert all(0.0 <= value < 1e12 for value in fit)


@given(st.lists(st.tuples(st.floats(0.0, 400.0), st.integers(0, 1000)), min_size=1, max_size=60))
def test_the_largest_sample_fades(samples):
    line, seen, now = CostLine(), [], 0.0
    for after, tokens in samples:
        now += after
        line.add(now, tokens, 0.1)
        seen.append((now, tokens))
        lately = [tokens for at, tokens in seen if now - at <= 900.0]
        assert max(lately) // 2 <= line.largest(now) <= max(tokens for _, tokens in seen)
    assert line.largest(now + 9000.0) <= 1


@given(st.floats(0.0, 1.0), st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 0.5)), min_size=1, max_size=60))
def test_no_more_is_spent_than_the_share_a_burst_and_the_last_prompt(share, wishes):
    budget, now, spent = TimeBudget(share, 0.0), 0.0, 0.0
    for after, seconds in wishes:
        now += after
        if budget.has_any(now):
            budget.spend(now, seconds)
            spent += seconds
        assert spent <= share * now + 0.25 + 0.5 + 1e-6
