# SPDX-License-Identifier: Apache-2.0
"""How long prefill's scheduler holds the blocks of a request that has ended, and the errors that its answer names."""

import msgspec
import pytest
from prefill_steps import *  # noqa: F403
from prefill_steps import BLOCKS, PROMPT, goes_on, starts, ticket, ticketed

from harness.scheduling import FOR_A_PULLING_CONNECTOR, make_output, make_request, remembered
from vllm_ascend_pd.core.step import Send, WorkerReport


def test_blocks_are_held_until_sent(scheduler):
    request = ticketed()
    starts(scheduler, request, PROMPT)
    assert not scheduler.has_pending_pushes
    assert scheduler.finished(request) == (True, None)
    assert scheduler.has_pending_pushes
    assert scheduler.build_step(make_output()).finished == {"r": None}
    assert scheduler.build_step(make_output()).finished == {}
    assert scheduler.has_pending_pushes
    scheduler.update(None, {"r"})
    assert not scheduler.has_pending_pushes
    assert remembered(scheduler) == {}


def test_aborted_before_it_was_scheduled(scheduler):
    never_allocated, allocated = ticketed("a"), ticketed("b")
    scheduler.allocated(allocated, BLOCKS)
    assert scheduler.finished(never_allocated) == (False, None)
    assert scheduler.finished(allocated) == (False, None)
    step = scheduler.build_step(make_output())
    assert (step.finished, step.tickets) == ({}, {})
    assert remembered(scheduler) == {}


def test_an_error_that_ranks_report_is_in_the_answer(scheduler):
    request = ticketed()
    starts(scheduler, request, PROMPT)
    scheduler.update(WorkerReport(failed={"r": "decode went away"}), set())
    scheduler.update(WorkerReport(failed={"r": "a later reason", "unknown": "x"}), set())
    assert scheduler.finished(request) == (True, {"error": "decode went away"})
    scheduler.update(WorkerReport(failed={"r": "too late for the answer"}), {"r"})
    assert remembered(scheduler) == {}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ticket_id": "x"}, "ticket_id"),
        ({"remote_block_ids": [[1]]}, "remote_block_ids"),
        ({"num_tokens": 11}, "the ticket is for 11 prompt tokens, the prompt has 10"),
        ({"remote_block_ids": [[1, 2, 3]] * 2, "remote_block_size": [4, 4]}, "2 cache groups, this engine has 1"),
        ({"remote_port": None}, "not a ticket"),
    ],
    ids=str,
)
def test_a_malformed_ticket_ends_in_an_error(scheduler, changes, complaint):
    params = {**msgspec.to_builtins(ticket()), **changes}
    request = make_request("r", PROMPT, params)
    step = starts(scheduler, request, PROMPT)
    assert (step.tickets, step.sends) == ({}, [])
    scheduler.allocated(request, BLOCKS)  # preempted and resumed
    delay, answer = scheduler.finished(request)
    assert not delay
    assert answer is not None
    assert complaint in answer["error"]
    assert scheduler.build_step(make_output()).finished == {}
    assert remembered(scheduler) == {}


def test_a_ticket_that_comes_again_waits_for_the_ranks_to_have_told_decode(scheduler):
    starts(scheduler, first := ticketed(), PROMPT)
    assert scheduler.finished(first) == (True, None)
    again = make_request("again", PROMPT, msgspec.to_builtins(ticket()))
    assert starts(scheduler, again, PROMPT).tickets == {}
    assert scheduler.finished(again) == (False, {"error": "this ticket is being served already"})
    scheduler.update(None, {"r"})
    assert remembered(scheduler) == {}


def test_a_ticket_is_served_once(scheduler):
    first, second = ticketed(), make_request("again", PROMPT, msgspec.to_builtins(ticket()))
    starts(scheduler, first, 6)
    step = starts(scheduler, second, PROMPT)
    assert (step.tickets, step.sends) == ({}, [])
    assert scheduler.finished(second) == (False, {"error": "this ticket is being served already"})
    assert goes_on(scheduler, first, 6, 4).sends == [Send("r", 4, 10, ([1, 5],), last=True)]
    assert scheduler.finished(first) == (True, None)
    scheduler.update(None, {"r"})
    assert remembered(scheduler) == {}


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_decode": False}, {"do_remote_prefill": True}, FOR_A_PULLING_CONNECTOR["prefill"]],
    ids=["none", "empty", "no", "decode", "pull"],
)
def test_requests_without_a_ticket(scheduler, params):
    request = make_request("r", PROMPT, params)
    step = starts(scheduler, request, PROMPT)
    assert (step.tickets, step.sends, scheduler.finished(request)) == ({}, [], (False, None))
    assert remembered(scheduler) == {}
