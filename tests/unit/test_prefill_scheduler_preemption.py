# SPDX-License-Identifier: Apache-2.0
"""Preemption on prefill: the scheduler tells ranks, and sends only what was not sent before."""

from prefill_steps import *  # noqa: F403
from prefill_steps import BLOCK, BLOCKS, PROMPT, goes_on, starts, ticketed
from vllm.v1.request import RequestStatus

from harness.schedulers import prefill_scheduler
from harness.scheduling import Scheduled, make_output, make_request
from vllm_ascend_pd.core.caches import TokenGroup


def test_preemptions_that_the_scheduler_does_not_name_are_seen_once():
    scheduler = prefill_scheduler([TokenGroup(BLOCK)], names_all_preempted=False)
    request, other = ticketed(), make_request("other", PROMPT, None)

    def preempted_when_another_goes_on(named=()):
        return scheduler.build_step(make_output(running=[Scheduled(other, None, 0, 1)], preempted=named)).preempted

    assert starts(scheduler, request, 4, ([7],)).preempted == set()
    request.status = RequestStatus.PREEMPTED  # as vllm-ascend's SchedulerDynamicBatch does
    assert scheduler.build_step(make_output()).preempted == set()  # nobody gets its blocks yet
    assert preempted_when_another_goes_on() == {"r"}
    assert preempted_when_another_goes_on() == set()
    request.status = RequestStatus.RUNNING
    assert goes_on(scheduler, request, 4, 2, ([1],)).preempted == set()
    request.num_preemptions += 1  # and runs again in the same step: vLLM 0.23 after a reset of its prefix cache
    assert goes_on(scheduler, request, 6, 1).preempted == {"r"}
    request.status, request.num_preemptions = RequestStatus.PREEMPTED, 2
    assert preempted_when_another_goes_on([request]) == {"r"}
    assert preempted_when_another_goes_on() == set()


def test_preemption_of_others_is_not_reported(scheduler):
    plain = make_request("plain", PROMPT, None)
    assert scheduler.build_step(make_output(preempted=[plain])).preempted == set()


def test_preempted_and_aborted_before_the_next_step(scheduler):
    """Its blocks were freed at once, so ranks must stop reading them."""
    request = ticketed()
    starts(scheduler, request, PROMPT)
    scheduler.finished(request)
    step = scheduler.build_step(make_output(preempted=[request]))
    assert (step.preempted, step.finished) == ({"r"}, {"r": None})


def test_preempted_and_aborted_before_the_next_step_where_vllm_names_nobody():
    """vLLM 0.23: a reset of its prefix cache frees the blocks, and no step's output says so."""
    scheduler = prefill_scheduler([TokenGroup(BLOCK)], names_all_preempted=False)
    request, other = ticketed(), make_request("other", PROMPT, None)
    starts(scheduler, request, PROMPT)
    request.num_preemptions += 1
    scheduler.finished(request)
    step = scheduler.build_step(make_output(new=[Scheduled(other, BLOCKS, 0, PROMPT)]))
    assert (step.preempted, step.finished) == ({"r"}, {"r": None})


def test_preempted_in_a_step_without_tokens_and_aborted_before_the_next():
    """vllm-ascend's SchedulerDynamicBatch, which does not count it either."""
    scheduler = prefill_scheduler([TokenGroup(BLOCK)], names_all_preempted=False)
    request, other = ticketed(), make_request("other", PROMPT, None)
    starts(scheduler, request, PROMPT)
    request.status = RequestStatus.PREEMPTED
    assert scheduler.build_step(make_output()).preempted == set()
    request.status = RequestStatus.FINISHED_ABORTED
    scheduler.finished(request)
    step = scheduler.build_step(make_output(new=[Scheduled(other, BLOCKS, 0, PROMPT)]))
    assert (step.preempted, step.finished) == ({"r"}, {"r": None})
    scheduler.update(None, {"r"})
    assert scheduler.build_step(make_output(new=[])).preempted == set()
