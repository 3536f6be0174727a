# SPDX-License-Identifier: Apache-2.0
"""Without `trace_dir` nothing is traced; what a stopwatch cannot time is counted."""

import threading
import time
from pathlib import Path

import pytest

from vllm_ascend_pd.core.config import ConfigError, parse_config
from vllm_ascend_pd.core.rank_info import RankInfo
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.core.transports import TransportInfo
from vllm_ascend_pd.device.cpu import CpuEvent
from vllm_ascend_pd.observe.decode_trace import rank_trace, scheduler_trace
from vllm_ascend_pd.observe.listeners import PrefillStats, prefill_observer
from vllm_ascend_pd.observe.prefill_trace import prefill_trace
from vllm_ascend_pd.observe.stopwatch import Stopwatch, moment

RANK_INFO = RankInfo("engine", "model", "127.0.0.1", 0, sharding(1), 0, 1, (0,))


def test_off_is_decided_once() -> None:
    off = parse_config({})
    before = threading.active_count()
    assert prefill_trace(off, RANK_INFO) is None
    assert not prefill_observer(off, RANK_INFO, PrefillStats(RANK_INFO, TransportInfo())).wants_clock
    assert rank_trace(off, RANK_INFO) is scheduler_trace(off, "engine") is None
    assert threading.active_count() == before


def test_on_makes_a_file_each(tmp_path: Path) -> None:
    on = parse_config({"trace_dir": str(tmp_path / "traces")})
    prefill = prefill_observer(on, RANK_INFO, PrefillStats(RANK_INFO, TransportInfo()))
    assert prefill.wants_clock
    for trace in (prefill, rank_trace(on, RANK_INFO), scheduler_trace(on, "engine")):
        assert trace is not None
        trace.close(6.0)
    assert len(list((tmp_path / "traces").iterdir())) == 3


def test_a_limit_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="`trace_max_bytes` must be at least 65536"):
        parse_config({"trace_max_bytes": 1000})


def test_a_stopwatch_times_spans_one_after_the_other() -> None:
    stopwatch = Stopwatch("watch", patience_s=10.0)
    spans: list[tuple[float, float]] = []
    late = CpuEvent()
    stopwatch.put(lambda begin, end: spans.append((begin, end)), 1.0, 2.0)
    stopwatch.put(lambda begin, end: spans.append((begin, end)), 1.5, moment(late))
    stopwatch.put(lambda begin, end: spans.append((begin, end)), 1.5, 3.0)
    happens = time.monotonic()
    late.set()
    stopwatch.close(10.0)
    assert spans[0] == (1.0, 2.0)
    assert spans[1][0] == 2.0
    assert spans[1][1] >= happens
    assert spans[2] == (spans[1][1], spans[1][1])
    assert stopwatch.missed == 0


def test_a_stopwatch_goes_on_after_work_that_failed_or_does_not_end() -> None:
    stopwatch = Stopwatch("watch", patience_s=0.01)
    spans: list[tuple[float, float]] = []
    failed = CpuEvent()
    stopwatch.put(lambda begin, end: spans.append((begin, end)), 1.0, CpuEvent())
    stopwatch.put(lambda begin, end: spans.append((begin, end)), 1.0, failed)
    failed.set(RuntimeError("the device failed"))
    stopwatch.put(lambda begin, end: spans.append((begin, end)), 4.0, 5.0)
    stopwatch.close(10.0)
    assert spans == [(4.0, 5.0)]
    assert stopwatch.missed == 2
