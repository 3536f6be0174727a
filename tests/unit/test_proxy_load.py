# SPDX-License-Identifier: Apache-2.0
"""Load reports of engines, the load that the proxy computes from them, and engines that are avoided."""

import contextlib
import importlib.util
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxied import RegistryListener, registry

from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.engines import (
    MAX_ENGINES,
    EngineState,
    HealthGate,
    RegisteredEngine,
    TooManyEnginesError,
)
from vllm_ascend_pd.proxy.routing.load import (
    MAX_WAIT_SECONDS,
    EngineLoad,
    InFlightLoad,
    LoadReport,
    LoadSnapshot,
    MetricsReader,
    PrefillPace,
    load_of,
    queue_wait,
    tokens_without_wait,
)
from vllm_ascend_pd.proxy.routing.strategies import PromptEstimate

VLLM_0_32 = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="800",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="800",num_gpu_blocks="100"} 1.0
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{le="0.3"} rubbish that is not looked at
"""
VLLM_0_23 = """\
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="1000",sliding_window="None"} 1.0
"""


def read(text: bytes, at_a_time: int = 1 << 16, metrics: MetricsReader | None = None) -> LoadSnapshot:
    metrics = metrics or MetricsReader()
    for at in range(0, len(text), at_a_time):
        metrics.feed(text[at : at + at_a_time])
    return metrics.end()


@pytest.mark.parametrize(
    ("text", "snapshot"),
    [
        (VLLM_0_32, LoadSnapshot(7, 2, 600, 1600)),
        (VLLM_0_23, LoadSnapshot(1, 0, 64_000, 128_000)),
        ("", LoadSnapshot()),
        ("python_info 1.0\n", LoadSnapshot()),
        ("vllm:num_requests_waiting 5\n", LoadSnapshot(waiting=5)),
        (
            'vllm:prompt_tokens_total{engine="0"} 5\nvllm:generation_tokens_total{engine="0"} 7\n'
            'vllm:generation_tokens_total{engine="1"} 9\nvllm:prompt_tokens_created{engine="0"} 1.7e9\n',
            LoadSnapshot(tokens=21),
        ),
        (
            'vllm:kv_pd_restart_needed{engine="0",rank="0/0"} 1.0\n'
            'vllm:kv_pd_restart_needed{engine="0",rank="0/1"} 0.0\n'
            'vllm:kv_pd_restart_needed{engine="1",rank="0/0"} 1.0\n',
            LoadSnapshot(broken_ranks=2),
        ),
        (
            'vllm:kv_pd_verified_total{rank="0/0",result="wrong"} 2.0\n'
            'vllm:kv_pd_verified_total{rank="0/1",result="overwritten"} 1.0\n'
            'vllm:kv_pd_verified_total{rank="0/1",result="right"} 70.0\n',
            LoadSnapshot(wrong_kv=3),
        ),
        (
            'vllm:kv_pd_waiting_blocks{engine="0"} 6.0\nvllm:kv_pd_waiting_blocks{engine="1"} 2.0\n'
            'vllm:cache_config_info{engine="0",num_gpu_blocks="10",block_size="8"} 1\n'
            'vllm:cache_config_info{engine="1",num_gpu_blocks="10",block_size="8"} 1\n',
            LoadSnapshot(capacity=160, kv_waiting=0.4),
        ),
        ("vllm:kv_pd_waiting_blocks 6.0\n", LoadSnapshot()),
        (
            'vllm:kv_pd_prefill_first_tokens{engine="0"} 512.0\nvllm:kv_pd_prefill_first_tokens{engine="1"} 2048.0\n',
            LoadSnapshot(prefill_first_tokens=2048, ranks=2),
        ),
        (
            'vllm:kv_pd_prefill_first_tokens{engine="0"} 512.0\nvllm:kv_pd_prefill_first_tokens{engine="1"} 0.0\n',
            LoadSnapshot(prefill_first_tokens=0, ranks=2),
        ),
        ("vllm:num_requests_running 1e308\nvllm:num_requests_waiting +Inf\n", LoadSnapshot()),
        ("vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\n", LoadSnapshot()),
        ("vllm:kv_cache_usage_perc 0.5\n", LoadSnapshot()),
        ('vllm:kv_cache_usage_perc 0.5\nvllm:cache_config_info{num_gpu_blocks="None"} 1\n', LoadSnapshot()),
        (
            'vllm:kv_cache_usage_perc 7\nvllm:cache_config_info{num_gpu_blocks="2",block_size="8"} 1\n',
            LoadSnapshot(None, None, 16, 16),
        ),
    ],
)
def test_missing_metrics_are_unknown(text: str, snapshot: LoadSnapshot) -> None:
    assert read(text.encode()) == snapshot
    assert read(text.encode(), 1) == snapshot, "byte by byte"


@settings(max_examples=50)
@given(st.text() | st.text().map(lambda text: f"vllm:num_requests_running{text}"))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        read(text.encode(errors="replace"))


@pytest.mark.parametrize("text", ["{", '{a=""}', " ", " x", "{} 1_", f" {'9' * 40}"])
def test_a_sample_without_a_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a value that is no number|a sample without a value"):
        read(f"vllm:num_requests_running{text}".encode())


RUNNING = b"vllm:num_requests_running"


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        (RUNNING + b"{" + b"a" * (16 << 20), "a line of more than"),
        (RUNNING + b'{a="' + b"a" * 20_000 + b'"} 1\n', "a line of more than"),
        (RUNNING + b" 1\n", "bytes about load"),
        (b"vllm:cache_config_info{" + b'block_size="",' * 1_000 + b"} 1\n", "bytes about load"),
        (b"vllm:cache_config_info{" + b"{," * 8_000 + b"} 1\n", "bytes about load"),
        (b"vllm:e2e_request_latency_seconds_bucket 1\n", "more than 16777216 bytes"),
        (b"vllm:", "a line of more than"),
        (b"\n", "more than 16777216 bytes"),
        (b"\nvllm:num_requests_waiting_", "more than 16777216 bytes"),
    ],
)
def test_no_metrics_hold_the_loop(line: bytes, refused: str) -> None:
    longest = 0.0

    class Timed(MetricsReader):
        def feed(self, piece: bytes) -> None:
            nonlocal longest
            begun = time.thread_time()
            try:
                super().feed(piece)
            finally:
                longest = max(longest, time.thread_time() - begun)

    with pytest.raises(ValueError, match=refused):
        read(line * ((17 << 20) // len(line)), 1 << 17, Timed())
    assert longest < 0.05


def test_installed_vllm_has_these_metrics() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    metrics, cache = (root / "v1/metrics/loggers.py").read_text(), (root / "config/cache.py").read_text()
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prompt_tokens",
        "generation_tokens",
    ):
        assert f'"vllm:{name}"' in metrics
    assert "num_gpu_blocks: int" in cache
    assert "block_size: int" in cache


# --- load -------------------------------------------------------------------------------------------------

numbers = st.integers(0, 10**6)
sents = st.builds(InFlightLoad, numbers, numbers)
snapshots = st.builds(LoadSnapshot, *[st.none() | numbers] * 4)


@given(sents, snapshots, sents, numbers)
def test_load_is_never_less_than_what_was_sent(
    sent: InFlightLoad, snapshot: LoadSnapshot, then: InFlightLoad, mean: int
) -> None:
    for role in EngineRole:
        engine = load_of(role, "u", sent, LoadReport(snapshot, then, 0.0), mean)
        assert engine.requests >= sent.requests
        assert engine.tokens >= sent.tokens


def test_others_requests_count() -> None:
    seen = LoadReport(LoadSnapshot(5, 3, kv_tokens=700, capacity=1000), sent=InFlightLoad(6, 500), at=0.0)
    assert load_of(EngineRole.PREFILL, "u", InFlightLoad(1, 40), seen, 100.0) == EngineLoad("u", 3, 240, 1000)
    assert load_of(EngineRole.DECODE, "u", InFlightLoad(7, 600), seen, 100.0) == EngineLoad("u", 9, 800, 1000)
    assert load_of(EngineRole.DECODE, "u", InFlightLoad(7, 600), None, 100.0) == EngineLoad("u", 7, 600)


def test_old_snapshots_are_ignored() -> None:
    engine = RegisteredEngine(EngineRole.DECODE, "u", HealthGate(1, 1))
    assert engine.load_report(0.0, 3.0) is None
    engine.note(LoadSnapshot(1), InFlightLoad(), 10.0)
    assert engine.load_report(13.0, 3.0) is not None
    assert engine.load_report(13.1, 3.0) is None


def test_an_engine_with_an_unchanged_token_count_computes_nothing() -> None:
    engine = RegisteredEngine(EngineRole.DECODE, "u", HealthGate(1, 1))
    assert engine.computed_nothing(0.0) == 0.0
    for now, tokens in ((10.0, 5), (20.0, 6), (25.0, 6), (30.0, 6)):
        engine.note(LoadSnapshot(tokens=tokens), InFlightLoad(), now)
    assert engine.computed_nothing(0.0) == 10.0
    assert engine.computed_nothing(27.0) == 3.0
    engine.note(LoadSnapshot(tokens=1), InFlightLoad(), 40.0)  # it was restarted
    assert engine.computed_nothing(0.0) == 0.0


def test_an_engine_without_a_token_count_may_be_computing() -> None:
    engine = RegisteredEngine(EngineRole.DECODE, "u", HealthGate(1, 1))
    for now in (10.0, 20.0):
        engine.note(LoadSnapshot(1, 0), InFlightLoad(), now)
    assert engine.computed_nothing(0.0) == 0.0


# --- who is passed over -----------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.booleans()))
def test_ejection_and_return(eject_after: int, return_after: int, results: list[bool]) -> None:
    gate, ejected = HealthGate(eject_after, return_after), False
    for number, good in enumerate(results, 1):
        changed = gate.checked(None if good else "silent")
        last = results[:number]
        if not ejected and not any(last[-eject_after:]) and number >= eject_after:
            ejected = True
        elif ejected and all(last[-return_after:]):
            ejected = False
        else:
            assert not changed
        assert gate.ejected is ejected


def test_an_engine_that_fails_all_requests_is_passed_over_for_a_while() -> None:
    gate = HealthGate(eject_after=3, return_after=1)
    gate.checked(None)
    for now in (0.0, 1.0):
        assert not gate.requests.ended("it broke off", now)
        assert not gate.doubtful(now)
    assert gate.requests.ended("it refused", 2.0)
    assert gate.doubtful(11.9)
    assert gate.state(11.9) == (EngineState.PASSED_OVER, "3 requests in a row failed there: it refused")
    assert not gate.doubtful(12.0)
    assert gate.requests.ended("it refused", 13.0), "one is enough now"
    assert gate.doubtful(14.0)
    assert not gate.requests.ended(None, 15.0)
    assert not gate.doubtful(15.0)
    assert gate.state(15.0) == (EngineState.HEALTHY, None)
    for _ in range(3):
        gate.transfers.ended("went silent", 15.0)
        gate.requests.ended(None, 15.0)
    assert gate.state(15.0) == (EngineState.PASSED_OVER, "3 transfers in a row failed there: went silent")
    assert gate.doubtful(15.0)


def test_engines_are_added_and_removed_as_their_sources_list_them() -> None:
    listener = RegistryListener()
    engines = registry(EngineRole.PREFILL, listener)
    engines.replace("file", ["a", "b"])
    engines.replace("dns", ["b", "c"])
    assert engines.urls == ("a", "b", "c")
    engines.replace("file", ["a"])
    assert engines.urls == ("a", "b", "c")
    engines.replace("dns", [])
    assert engines.urls == ("a",)
    assert listener.forgotten == ["b", "c"]
    assert [engine.url for engine in listener.closed_engines] == ["b", "c"]
    [engine] = engines
    prompt = PromptEstimate(100, sequences=2)
    load = engines.sent(prompt, engine)
    engines.remove(engine)
    assert not engine.takes_requests
    assert engine.sent == load == InFlightLoad(2)
    engines.ended(prompt, engine, load, is_taken=True)
    assert engine.sent == InFlightLoad()
    assert engines.add("a", "file") is not engine


def test_engines_are_bounded() -> None:
    engines = registry(EngineRole.DECODE)
    with pytest.raises(TooManyEnginesError):
        engines.replace("dns", [str(number) for number in range(MAX_ENGINES + 1)])
    assert len(engines.urls) == MAX_ENGINES


# --- how long a prompt waits for prefill --------------------------------------------------------------------


def engines_with(*tokens: int) -> list[EngineLoad]:
    return [EngineLoad(f"http://{number}", 1, each) for number, each in enumerate(tokens)]


@pytest.mark.parametrize(
    ("tokens", "queued", "pace", "seconds"),
    [
        ((), 0, 1000, 0.0),
        ((5000,), 0, 0, 0.0),  # the pace is unknown
        ((0,), 0, 1000, 0.0),
        ((5000,), 0, 1000, 5.0),
        ((5000, 2000, 9000), 0, 1000, 2.0),
        ((5000, 0), 0, 1000, 0.0),
        ((1000, 1000), 4000, 1000, 3.0),
        ((10**9,), 0, 1, MAX_WAIT_SECONDS),
    ],
)
def test_wait(tokens: tuple[int, ...], queued: float, pace: float, seconds: float) -> None:
    assert queue_wait(engines_with(*tokens), queued, pace) == pytest.approx(seconds)


@given(st.lists(st.integers(0, 10**12), max_size=4), st.floats(0, 1e12), st.floats(0, 1e9))
def test_wait_is_bounded(tokens: list[int], queued: float, pace: float) -> None:
    assert 0.0 <= queue_wait(engines_with(*tokens), queued, pace) <= MAX_WAIT_SECONDS


@pytest.mark.parametrize(
    ("tokens", "steps", "queued", "longest"),
    [
        ((0,), ((2048, 1),), 0, 2048),
        ((500,), ((2048, 1),), 0, 1548),
        ((500, 3000), ((2048, 1), (2048, 1)), 0, 1548),
        ((500, 3000), ((2048, 1), (8192, 1)), 0, 5192),
        ((5000,), ((2048, 1),), 0, 1),
        ((5000,), ((2048, 8),), 0, 1423),
        ((0, 0), ((2048, 1), (2048, 1)), 1000, 1548),
        ((0, 0), ((2048, 1), (0, 1)), 0, 0),
        ((), (), 0, 0),
    ],
)
def test_the_longest_prompt_of_one_step(
    tokens: tuple[int, ...], steps: tuple[tuple[int, int], ...], queued: float, longest: int
) -> None:
    reported = [LoadSnapshot(prefill_first_tokens=step, ranks=ranks) for step, ranks in steps]
    assert tokens_without_wait(engines_with(*tokens), reported, queued) == longest


def test_pace_counts_what_was_ahead() -> None:
    """Four prompts of 1,000 tokens that an engine gets at the same time and computes one by one, a second each."""
    pace = PrefillPace()
    for number in range(1, 5):
        pace.note(1000 * number, float(number))
    assert pace.tokens_per_second == pytest.approx(1000)


def test_short_prompts_count_little() -> None:
    """Their time is mostly a fixed cost."""
    pace = PrefillPace()
    for _ in range(20):
        pace.note(8, 0.01)
        pace.note(4000, 1.0)
    assert pace.tokens_per_second == pytest.approx(4000, rel=0.05)


def test_pace_follows_the_last_prefills() -> None:
    pace = PrefillPace()
    for _ in range(300):
        pace.note(1000, 1.0)
    for _ in range(300):
        pace.note(1000, 0.1)
    assert pace.tokens_per_second == pytest.approx(10_000, rel=0.05)
