# SPDX-License-Identifier: Apache-2.0
"""Estimates an engine's load from its own metrics and from what this proxy has sent there. No I/O.

It also estimates how long a prompt waits for prefill.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from vllm_ascend_pd.core.reasons import WRONG_KV
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.observe.stats import PREFILL_FIRST_TOKENS, PREFIX, RESTART_NEEDED, VERIFIED, WAITING_BLOCKS
from vllm_ascend_pd.proxy.routing.answers import EngineRole

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USE = "vllm:kv_cache_usage_perc"
_CACHE_INFO = "vllm:cache_config_info"
_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_RESTART_NEEDED = PREFIX + RESTART_NEEDED.name
_VERIFIED = f"{PREFIX}{VERIFIED.name}_total"
_WAITING_BLOCKS = PREFIX + WAITING_BLOCKS.name
_PREFILL_FIRST = PREFIX + PREFILL_FIRST_TOKENS.name
_SLEEP_STATE = "vllm:engine_sleep_state"
_OURS = (_RESTART_NEEDED, _VERIFIED, _WAITING_BLOCKS, _PREFILL_FIRST)
_WANTED = (_RUNNING, _WAITING, _KV_USE, _CACHE_INFO, *_TOKENS, *_OURS, _SLEEP_STATE)
_COMMON = "vllm:"
"""With it, `re` skips all other lines, mostly buckets of histograms, at the speed of a search for text."""
_SAMPLE = re.compile(
    rf"\n({_COMMON}(?:{'|'.join(re.escape(name.removeprefix(_COMMON)) for name in _WANTED)}))([{{ \t][^\n]*)".encode()
)
_LABEL = re.compile(rb'[{,](sleep_state|result)="([^"\\]*)"')
_SIZE = re.compile(rb'[{,](kv_cache_size_tokens|num_gpu_blocks|block_size)="([0-9]{1,15})"')
_MAX_BYTES = 16 << 20
"""vLLM's metrics are about 100 KiB per data-parallel rank."""
_MAX_SAMPLE_BYTES = 1 << 20
"""Of the samples about load: about 4 KiB per data-parallel rank."""
_MAX_LINE_BYTES = 16 * 1024
"""`vllm:cache_config_info` has the longest line, of 1 to 2 KiB."""
_MAX_VALUE_CHARS = 32
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
    kv_waiting: float | None = None
    """Share of the engine's blocks that have been given to requests whose KV has not arrived."""
    prefill_first_tokens: int = 0
    """Prompts of more tokens may be computed there before decode gives them memory: tokens of a step. 0: none may, on
    some rank at least, or the engine does not say."""
    ranks: int = 1
    """Data-parallel ranks, each of which computes such steps."""


class MetricsReader:
    """Reads the metrics of vLLM 0.23 to 0.32, in Prometheus' text format, piece by piece. The time that a piece takes
    grows with its length alone."""

    def __init__(self) -> None:
        self._left = _MAX_BYTES
        self._left_for_samples = _MAX_SAMPLE_BYTES
        self._line = bytearray()
        """The beginning of the last line, whose end has not come yet."""
        self._values: dict[str, list[float]] = {}
        self._capacities: list[int] = []
        self._blocks: list[int] = []
        self._asleep = False

    def feed(self, piece: bytes) -> None:
        """Raises ValueError, in words of its own, for text that is too long or not in the format."""
        self._left -= len(piece)
        if self._left < 0:
            raise ValueError(f"more than {_MAX_BYTES} bytes")
        lines, newline, rest = piece.rpartition(b"\n")
        if newline:
            self._read(self._line + lines)
            self._line.clear()
        self._line += rest
        if len(self._line) > _MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")

    def end(self) -> LoadSnapshot:
        """Returns what the text says. Raises ValueError as `feed` does."""
        self._read(self._line)
        values, capacities = self._values, self._capacities
        use = values.get(_KV_USE)
        capacity = sum(capacities) if capacities and all(capacities) else None
        kv_tokens = None
        if capacity is not None and use:
            # All ranks have the same capacity.
            kv_tokens = round(min(1.0, sum(use) / len(use)) * capacity)
        tokens = [value for name in _TOKENS for value in values.get(name, ())]
        steps = values.get(_PREFILL_FIRST, ())
        return LoadSnapshot(
            _total(values.get(_RUNNING)),
            _total(values.get(_WAITING)),
            kv_tokens,
            capacity,
            _total(tokens or None),
            _total(values.get(_RESTART_NEEDED)),
            self._asleep,
            _total(values.get(_VERIFIED)),
            _share(values.get(_WAITING_BLOCKS), self._blocks),
            round(max(steps)) if steps and all(steps) else 0,
            len(steps) or 1,
        )

    def _read(self, lines: bytes | bytearray) -> None:
        for found in _SAMPLE.finditer(b"\n" + lines):
            if len(found[0]) > _MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")
            self._left_for_samples -= len(found[0])
            if self._left_for_samples < 0:
                raise ValueError(f"more than {_MAX_SAMPLE_BYTES} bytes about load")
            self._note(found[1].decode(), *found[2].rpartition(b"}"))

    def _note(self, name: str, labels: bytes, brace: bytes, value_and_time: bytes) -> None:
        value = _value(value_and_time)
        if name == _SLEEP_STATE:
            self._asleep |= _labels(labels).get("sleep_state") == "awake" and value == 0
        elif name == _CACHE_INFO:
            sizes = _sizes(labels)
            self._capacities.append(_capacity(sizes))
            self._blocks.append(sizes.get(b"num_gpu_blocks", 0))
        elif name == _VERIFIED and _labels(labels).get("result") not in WRONG_KV:
            pass
        elif 0 <= value < _NONSENSE:  # not NaN
            self._values.setdefault(name, []).append(value)


def _value(text: bytes) -> float:
    fields = text.split(maxsplit=1)
    if not fields or len(fields[0]) > _MAX_VALUE_CHARS:
        raise ValueError("a sample without a value")
    try:
        return float(fields[0])
    except ValueError:
        raise ValueError("a value that is no number") from None


def _labels(text: bytes) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace") for name, value in _LABEL.findall(text)}


def _total(values: list[float] | None) -> int | None:
    return None if values is None else round(sum(values))


def _share(waiting: list[float] | None, blocks: list[int]) -> float | None:
    return min(1.0, sum(waiting) / sum(blocks)) if waiting and any(blocks) else None


def _sizes(labels: bytes) -> dict[bytes, int]:
    return {name: int(value) for name, value in _SIZE.findall(labels)}


def _capacity(sizes: dict[bytes, int]) -> int:
    """Returns how many tokens fit; 0: unknown.

    With several cache groups only `kv_cache_size_tokens` is right. vLLM 0.23 does not report it."""
    return sizes.get(b"kv_cache_size_tokens", 0) or sizes.get(b"num_gpu_blocks", 0) * sizes.get(b"block_size", 0)


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


def load_of(role: EngineRole, url: str, sent: InFlightLoad, seen: LoadReport | None, mean_tokens: float) -> EngineLoad:
    """The load of an engine: its own report, corrected by what this proxy has sent, and seen end, since then. It is
    never less than what this proxy has in flight there.

    Engines do not report how many tokens wait for prefill: requests of others count with our mean length.
    """
    if seen is None:
        return EngineLoad(url, sent.requests, sent.tokens)
    snapshot = seen.snapshot
    # Requests sent just before the snapshot may be missing in it, so the difference may be negative.
    others = max(0, (snapshot.running or 0) + (snapshot.waiting or 0) - seen.sent.requests)
    if role is EngineRole.PREFILL or snapshot.kv_tokens is None:
        tokens = sent.tokens + round(others * mean_tokens)
    else:
        tokens = max(sent.tokens, snapshot.kv_tokens + sent.tokens - seen.sent.tokens)
    return EngineLoad(url, sent.requests + others, tokens, snapshot.capacity)


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


def tokens_without_wait(engines: Sequence[EngineLoad], reported: Sequence[LoadSnapshot], queued_tokens: float) -> int:
    """Returns the longest prompt that takes prefill no more than one step, with what is computed before it, at some
    engine. At least 1; 0 if a step's tokens are not known of all engines.

    Args:
        engines, queued_tokens: as in `queue_wait`.
        reported: what each of the engines has reported.
    """
    if not reported or not all(each.prefill_first_tokens for each in reported):
        return 0
    left = [
        each.prefill_first_tokens - (engine.tokens + queued_tokens / len(engines)) / each.ranks
        for engine, each in zip(engines, reported, strict=True)
    ]
    return max(1, round(max(left)))
