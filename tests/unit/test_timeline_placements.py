# SPDX-License-Identifier: Apache-2.0
"""The timeline counts who computed prompts, from what decode's scheduler wrote into its trace."""

from pathlib import Path

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.observe import events
from vllm_ascend_pd.observe.decode_trace import scheduler_trace
from vllm_ascend_pd.observe.events import Mark, MarkEvent, TracedProcess
from vllm_ascend_pd.tools.timeline.merge import merge
from vllm_ascend_pd.tools.timeline.placements import placements
from vllm_ascend_pd.tools.timeline.read import Recording, read_folder


def test_counts_what_the_scheduler_traced(tmp_path: Path) -> None:
    trace = scheduler_trace(ConnectorConfig(trace_dir=str(tmp_path)), "engine")
    for number, (by_decode, reason, tokens) in enumerate(
        [(True, "cheap", 8), (False, "long", 3000), (True, "cheap", 40), (True, "no_prefill", 5)]
    ):
        trace.prompt_placed(f"request-{number}", by_decode, reason, tokens)
    trace.close(10)
    recordings, problems = read_folder(tmp_path)
    assert problems == []
    assert [str(one) for one in placements(merge(recordings))] == [
        "decode computed 2 prompts (cheap, 48 tokens)",
        "prefill computed 1 prompt (long, 3000 tokens)",
        "decode computed 1 prompt (no_prefill, 5 tokens)",
    ]


def test_leaves_out_what_it_cannot_read() -> None:
    process = TracedProcess(events.FORMAT, "decode scheduler", "engine", 0, 0, "0" * 16, 0.0)
    abouts = ["", "nobody: cheap, 8 tokens", "decode: [red]cheap[/], 8 tokens", "decode: cheap, -8 tokens"]
    marks = [MarkEvent(name=events.PLACED, ph="i", ts=1.0, tid=1, args=Mark("request", "", about)) for about in abouts]
    reasons = [chr(ord("a") + n // 10) + chr(ord("a") + n % 10) for n in range(99)]
    many = [
        MarkEvent(name=events.PLACED, ph="i", ts=2.0, tid=1, args=Mark("r", "", f"decode: {reason}, 1 tokens"))
        for reason in reasons
    ]
    found = placements(merge([Recording("decode", process, (), {}, [*marks, *many], ())]))
    assert len(found) == 32
    assert {one.reason for one in found} <= set(reasons)
