# SPDX-License-Identifier: Apache-2.0
"""What an engine says of its load, and what the proxy knows besides: what it has sent there itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from vllm_ascend_pd.core.stats import PREFIX, RESTART_NEEDED
from vllm_ascend_pd.proxy.routing.balance import EngineLoad

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""vLLM's name since 0.10, and the one before."""
_CACHE_INFO = "vllm:cache_config_info"
_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_RESTART_NEEDED = PREFIX + RESTART_NEEDED.name
_WANTED = (_RUNNING, _WAITING, *_KV_USE, _CACHE_INFO, *_TOKENS, _RESTART_NEEDED)
_MAX_LINES = 1024
"""Of what is wanted: one per name and data-parallel engine is usual. Parsing takes 20 us each."""

_NONSENSE = 1e12


class LoadSnapshot(NamedTuple):
    """Of an engine's `/metrics`, summed over its data-parallel ranks. None: it does not say."""

    running: int | None = None
    waiting: int | None = None
    kv_tokens: int | None = None
    capacity: int | None = None
    tokens: int | None = None
    """Computed since the engine started: prompts that are done, and what was generated."""
    broken_ranks: int | None = None
    """Ranks whose metric `restart_needed` is 1."""


def parse_metrics(text: str) -> LoadSnapshot:
    """vLLM 0.23's and 0.32's. Raises ValueError for what is no Prometheus text."""
    # The rest, mostly histograms' buckets, takes 100 times as long to parse.
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
    if len(lines) > _MAX_LINES:
        raise ValueError(f"{len(lines)} lines of metrics about load")
    values: dict[str, list[float]] = {}
    rooms: list[int] = []
    for family in _families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name == _CACHE_INFO:
                rooms.append(_room(sample.labels))
            elif 0 <= sample.value < _NONSENSE:  # false for NaN, too
                values.setdefault(sample.name, []).append(sample.value)
    use = next((values[name] for name in _KV_USE if name in values), [])
    capacity = sum(rooms) if rooms and all(rooms) else None
    kv_tokens = None
    if capacity is not None and use:
        # Ranks have rooms of the same size.
        kv_tokens = round(min(1.0, sum(use) / len(use)) * capacity)
    tokens = [value for name in _TOKENS for value in values.get(name, ())]
    return LoadSnapshot(
        _total(values.get(_RUNNING)),
        _total(values.get(_WAITING)),
        kv_tokens,
        capacity,
        _total(tokens or None),
        _total(values.get(_RESTART_NEEDED)),
    )


def _families(text: str) -> Iterable[Metric]:
    try:
        return list(text_string_to_metric_families(text))
    except Exception as error:  # noqa: BLE001 - the parser raises what it meets: IndexError for `{a="b", =c="d"}`
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _total(values: list[float] | None) -> int | None:
    return None if values is None else round(sum(values))


def _room(labels: dict[str, str]) -> int:
    """Tokens; 0: unknown. Of several cache groups only `kv_cache_size_tokens` is right; vLLM 0.23 does not say it."""
    tokens = _number(labels.get("kv_cache_size_tokens", ""))
    return tokens or _number(labels.get("num_gpu_blocks", "")) * _number(labels.get("block_size", ""))


def _number(label: str) -> int:
    return int(label) if label.isascii() and label.isdigit() and len(label) < 16 else 0


class InFlightLoad(NamedTuple):
    """What the proxy has at an engine."""

    requests: int = 0
    tokens: int = 0


class LoadReport(NamedTuple):
    """A snapshot, and what the proxy had there when it asked for it."""

    snapshot: LoadSnapshot
    sent: InFlightLoad
    at: float


def others_requests(seen: LoadReport) -> int:
    """Requests of other proxies and direct clients. What was sent just before the snapshot may be missing in it."""
    running, waiting = seen.snapshot.running, seen.snapshot.waiting
    return max(0, (running or 0) + (waiting or 0) - seen.sent.requests)


def prefill_load(url: str, sent: InFlightLoad, seen: LoadReport | None, mean_tokens: float) -> EngineLoad:
    """Others' requests are taken to be as long as ours are on average: engines do not say."""
    others = 0 if seen is None else others_requests(seen)
    return EngineLoad(url, sent.requests + others, sent.tokens + round(others * mean_tokens))


def decode_load(url: str, sent: InFlightLoad, seen: LoadReport | None, mean_tokens: float) -> EngineLoad:
    """What the engine holds itself, with what was sent and has ended since; never less than what it has of ours."""
    if seen is None:
        return EngineLoad(url, sent.requests, sent.tokens)
    others = others_requests(seen)
    if seen.snapshot.kv_tokens is None:
        tokens = sent.tokens + round(others * mean_tokens)
    else:
        tokens = max(sent.tokens, seen.snapshot.kv_tokens + sent.tokens - seen.sent.tokens)
    return EngineLoad(url, sent.requests + others, tokens, seen.snapshot.capacity)
