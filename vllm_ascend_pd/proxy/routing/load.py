# SPDX-License-Identifier: Apache-2.0
"""Estimates an engine's load from its own metrics and from what this proxy has sent there. No I/O.

It also estimates how long a prompt waits for prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from vllm_ascend_pd.core.reasons import WRONG_KV
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.observe.stats import PREFIX, RESTART_NEEDED, VERIFIED
from vllm_ascend_pd.proxy.routing.answers import EngineRole

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USE = "vllm:kv_cache_usage_perc"
_CACHE_INFO = "vllm:cache_config_info"
_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_RESTART_NEEDED = PREFIX + RESTART_NEEDED.name
_VERIFIED = f"{PREFIX}{VERIFIED.name}_total"
_SLEEP_STATE = "vllm:engine_sleep_state"
_WANTED = (_RUNNING, _WAITING, _KV_USE, _CACHE_INFO, *_TOKENS, _RESTART_NEEDED, _VERIFIED, _SLEEP_STATE)
_MAX_LINES = 2048
"""Limit of lines to parse, at 20 us each. There is usually one line per metric and data-parallel rank."""
_NONSENSE = 1e12
"""Larger values are ignored."""
MAX_WAIT_SECONDS = 600.0
"""Limit of `queue_wait`. Nobody decides otherwise about a longer wait."""
_OVER_PREFILLS = 32
"""Each prefill counts 1/32 less with each later one, so `PrefillPace` follows the last few dozen."""


class LoadSnapshot(NamedTuple):
    """Load figures of an engine's `/metrics`, summed over its data-parallel ranks. None: not reported."""

    running: int | None = None
    """Requests being computed."""
    waiting: int | None = None
    """Requests in the engine's queue."""
    kv_tokens: int | None = None
    """Tokens whose KV the engine holds."""
    capacity: int | None = None
    """Tokens whose KV fits."""
    tokens: int | None = None
    """Tokens computed since the engine started: finished prompts and generated tokens."""
    broken_ranks: int | None = None
    """Ranks whose metric `restart_needed` is 1."""
    asleep: bool = False
    """Whether a part of the engine sleeps (`/sleep`)."""
    wrong_kv: int | None = None
    """How often `verify_kv` has found wrong KV, on all ranks."""


def parse_metrics(text: str) -> LoadSnapshot:
    """Reads the metrics of vLLM 0.23 to 0.32. Raises ValueError if the text is not in Prometheus' format."""
    # All other lines, mostly buckets of histograms, would take 100 times as long to parse.
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
    if len(lines) > _MAX_LINES:
        raise ValueError(f"{len(lines)} lines of metrics about load")
    values: dict[str, list[float]] = {}
    capacities: list[int] = []
    asleep = False
    for family in _families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name == _SLEEP_STATE:
                asleep |= sample.labels.get("sleep_state") == "awake" and sample.value == 0
            elif sample.name == _CACHE_INFO:
                capacities.append(_capacity(sample.labels))
            elif sample.name == _VERIFIED and sample.labels.get("result") not in WRONG_KV:
                continue
            elif 0 <= sample.value < _NONSENSE:  # not NaN
                values.setdefault(sample.name, []).append(sample.value)
    use = values.get(_KV_USE)
    capacity = sum(capacities) if capacities and all(capacities) else None
    kv_tokens = None
    if capacity is not None and use:
        # All ranks have the same capacity.
        kv_tokens = round(min(1.0, sum(use) / len(use)) * capacity)
    tokens = [value for name in _TOKENS for value in values.get(name, ())]
    return LoadSnapshot(
        _total(values.get(_RUNNING)),
        _total(values.get(_WAITING)),
        kv_tokens,
        capacity,
        _total(tokens or None),
        _total(values.get(_RESTART_NEEDED)),
        asleep,
        _total(values.get(_VERIFIED)),
    )


def _families(text: str) -> Iterable[Metric]:
    try:
        return list(text_string_to_metric_families(text))
    except Exception as error:  # noqa: BLE001 - the parser lets any exception through: IndexError for `{a="b", =c="d"}`
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _total(values: list[float] | None) -> int | None:
    return None if values is None else round(sum(values))


def _capacity(labels: dict[str, str]) -> int:
    """Returns how many tokens fit; 0: unknown.

    With several cache groups only `kv_cache_size_tokens` is right. vLLM 0.23 does not report it."""
    tokens = _number(labels.get("kv_cache_size_tokens", ""))
    return tokens or _number(labels.get("num_gpu_blocks", "")) * _number(labels.get("block_size", ""))


def _number(label: str) -> int:
    return int(label) if label.isascii() and label.isdigit() and len(label) < 16 else 0


class InFlightLoad(NamedTuple):
    """What this proxy has in flight at an engine."""

    requests: int = 0
    """Prefill: prompts. Decode: sequences."""
    tokens: int = 0
    """Prefill: prompt tokens not cached there. Decode: tokens whose KV the engine holds or will hold."""


class LoadReport(NamedTuple):
    """An engine's load figures at one time."""

    snapshot: LoadSnapshot
    """What the engine reported."""
    sent: InFlightLoad
    """What this proxy had in flight there when it asked."""
    at: float
    """When the report came, in seconds of a steady clock."""


class EngineLoad(NamedTuple):
    """The estimated load of an engine."""

    url: str
    """The engine's."""
    requests: int = 0
    """Requests running and waiting there."""
    tokens: int = 0
    """Prefill: prompt tokens not yet computed. Decode: tokens whose KV the engine holds or will hold."""
    capacity: int | None = None
    """How many tokens of KV fit. None: unknown."""


def _others_requests(seen: LoadReport) -> int:
    """Requests of other proxies and of direct clients. Requests sent just before the snapshot may be missing in it, so
    the difference may be negative: that counts as 0."""
    running, waiting = seen.snapshot.running, seen.snapshot.waiting
    return max(0, (running or 0) + (waiting or 0) - seen.sent.requests)


def load_of(role: EngineRole, url: str, sent: InFlightLoad, seen: LoadReport | None, mean_tokens: float) -> EngineLoad:
    """The load of an engine: its own report, corrected by what this proxy has sent, and seen end, since then. It is
    never less than what this proxy has in flight there.

    Engines do not report how many tokens wait for prefill: requests of others count with our mean length.
    """
    if seen is None:
        return EngineLoad(url, sent.requests, sent.tokens)
    others = _others_requests(seen)
    if role is EngineRole.PREFILL or seen.snapshot.kv_tokens is None:
        tokens = sent.tokens + round(others * mean_tokens)
    else:
        tokens = max(sent.tokens, seen.snapshot.kv_tokens + sent.tokens - seen.sent.tokens)
    return EngineLoad(url, sent.requests + others, tokens, seen.snapshot.capacity)


class PrefillPace:
    """How fast the prefill engines have computed prompts lately. The event loop's thread owns it.

    It is one pace for all engines of the role: usually they are alike.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @owned
    def note(self, tokens: int, seconds: float) -> None:
        """Notes a prefill that has ended well.

        Args:
            tokens: what its engine had to compute when it got the prompt, the prompt included.
            seconds: from then until the engine's answer.
        """
        kept = 1 - 1 / _OVER_PREFILLS
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds

    @property
    def tokens_per_second(self) -> float:
        """0: unknown."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


def queue_wait(engines: Sequence[EngineLoad], queued_tokens: float, tokens_per_second: float) -> float:
    """Returns the seconds that a further prompt would wait at the engine with the shortest queue; 0 if unknown.

    A prompt that is being computed counts as a whole until its engine has answered, so the estimate may be too high by
    the time of one prompt.

    Args:
        engines: the load of each engine that may get the prompt.
        queued_tokens: tokens of the prompts that wait until any of the engines takes them.
        tokens_per_second: how many tokens an engine computes; 0 if unknown.
    """
    if not engines or tokens_per_second <= 0:
        return 0.0
    ahead = min(engine.tokens for engine in engines) + queued_tokens / len(engines)
    return min(ahead / tokens_per_second, MAX_WAIT_SECONDS)
