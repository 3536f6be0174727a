# SPDX-License-Identifier: Apache-2.0
"""Decode computes cheap prompts itself, in vLLM's own scheduler, and each prompt counts once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import BLOCK, RealScheduler, Role
from vllm_ascend_pd.core.observer import DecodeSchedulerObserver

STEP = 128
AT_MOST = 100


@pytest.fixture
def auto(scheduled_model: Path) -> Iterator[RealScheduler]:
    """A decode engine that computes prompts of up to `AT_MOST` tokens, and has few blocks."""
    extra = {"who_computes": "auto", "decode_prompt_tokens": AT_MOST, "decode_prompt_share": 1.0}
    scheduler = RealScheduler(Role.DECODE, scheduled_model, 20, step_tokens=STEP, extra=extra)
    yield scheduler
    scheduler.close()


class Counted(DecodeSchedulerObserver):
    """What was counted, as (who, why, tokens), and the latest threshold."""

    def __init__(self) -> None:
        self.prompts: list[tuple[str, str, int]] = []
        self.threshold = -1

    def prompt_placed(self, request_id: str, by_decode: bool, reason: str, tokens: int) -> None:
        self.prompts.append(("decode" if by_decode else "prefill", reason, tokens))

    def threshold_set(self, tokens: int) -> None:
        self.threshold = tokens


@pytest.fixture
def counted(auto: RealScheduler) -> Counted:
    observer = Counted()
    auto.scheduler.connector._role.scheduler._placement._observer = observer
    return observer


def test_two_prompts_in_chunks(auto: RealScheduler, counted: Counted, all_prefilled: Any) -> None:
    for name, first in (("a", 0), ("b", 1000)):
        auto.add(name, range(first, first + AT_MOST), all_prefilled, max_tokens=2)
    step, outputs = auto.step()
    assert step.num_scheduled_tokens == {"a": AT_MOST, "b": STEP - AT_MOST}
    assert [each.request_id for each in outputs] == ["a"]
    _, outputs = auto.step()
    assert [each.request_id for each in outputs] == ["a", "b"]
    assert counted.prompts == 2 * [("decode", "cheap", AT_MOST)]


def test_a_prompt_that_waits_for_blocks_counts_when_it_has_them(
    auto: RealScheduler, counted: Counted, all_prefilled: Any
) -> None:
    before = auto.add("before", range(1000, 1000 + 17 * BLOCK), max_tokens=100)
    auto.step()
    auto.add("waits", range(AT_MOST), all_prefilled, max_tokens=2)
    for _ in range(5):
        assert "waits" not in auto.step()[0].num_scheduled_tokens
    assert counted.prompts == []
    auto.scheduler.finish_requests(before.request_id, RequestStatus.FINISHED_ABORTED)
    assert auto.schedule().num_scheduled_tokens == {"waits": AT_MOST}
    assert counted.prompts == [("decode", "cheap", AT_MOST)]


def test_a_prompt_preempted_before_its_first_token_counts_once(
    auto: RealScheduler, counted: Counted, all_prefilled: Any
) -> None:
    request = auto.add("r", range(AT_MOST), all_prefilled, max_tokens=2)
    auto.schedule()
    auto.preempt(request)
    assert set(auto.schedule().num_scheduled_tokens) == {"r"}
    assert counted.prompts == [("decode", "cheap", AT_MOST)]


def test_a_request_preempted_after_its_first_token_counts_again(
    auto: RealScheduler, counted: Counted, all_prefilled: Any
) -> None:
    request = auto.add("r", range(AT_MOST), all_prefilled, max_tokens=4)
    auto.step()
    auto.preempt(request)
    auto.step()
    cached = AT_MOST // BLOCK * BLOCK
    assert counted.prompts == [("decode", "cheap", AT_MOST), ("decode", "preempted", AT_MOST + 1 - cached)]
