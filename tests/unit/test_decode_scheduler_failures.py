# SPDX-License-Identifier: Apache-2.0
"""Decode's scheduler when a ticket cannot be posted, prefill or a rank fails, or the request is aborted."""

import time

import pytest
from decode_requests import *  # noqa: F403
from decode_requests import BLOCKS, eventually, issue, step_with, wanting
from vllm.v1.request import RequestStatus

from harness.scheduling import remembered
from vllm_ascend_pd.core.step import WorkerReport
from vllm_ascend_pd.observe import stats


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        (None, "no metaserver URL"),
        (8000, "no metaserver URL"),
        ("http://192.0.2.1/v1/metaserver", "allow-list"),
        ("http://127.0.0.1:8000/admin", "its path is not /v1/metaserver"),
        ("ftp://127.0.0.1/v1/metaserver", "not http or https"),
        ("", ""),
    ],
)
def test_a_metaserver_that_may_not_be_posted_to(scheduler, url, complaint):
    request = wanting(url)
    step = issue(scheduler, request)
    [expect] = step.expects
    assert set(step.cancelled) == {expect.ticket_id}
    assert complaint in step.cancelled[expect.ticket_id]
    scheduler.update(WorkerReport(failed={expect.ticket_id: "as cancelled"}), {"r"})
    assert scheduler.build_step({}).cancelled == {}
    assert scheduler.finished(request) == {"error": step.cancelled[expect.ticket_id]}
    assert remembered(scheduler) == {}


def test_the_metaserver_does_not_know_the_request(scheduler, metaserver):
    metaserver.status = 404
    request = wanting(metaserver.url)
    step = issue(scheduler, request)
    [expect] = step.expects
    assert step.cancelled == {}
    later = step_with(scheduler, lambda step: step.cancelled)
    assert set(later.cancelled) == {expect.ticket_id}
    assert "answered 404" in later.cancelled[expect.ticket_id]
    assert later.prefilled == []
    scheduler.update(None, {"r"})
    answer = scheduler.finished(request)
    assert answer is not None
    assert "answered 404" in answer["error"]
    assert remembered(scheduler) == {}


def test_one_rank_fails_and_the_others_are_told(scheduler, metaserver):
    metaserver.answering.clear()
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    scheduler.update(WorkerReport(failed={expect.ticket_id: "prefill rank 1: it broke", "unknown": "x"}), set())
    assert scheduler.build_step({}).cancelled == {expect.ticket_id: "prefill rank 1: it broke"}
    scheduler.update(WorkerReport(failed={expect.ticket_id: "cancelled"}), {"r"})
    assert scheduler.build_step({}).cancelled == {}
    assert scheduler.finished(request) == {"error": "prefill rank 1: it broke"}
    assert remembered(scheduler) == {}


def test_the_metaserver_hears_what_ranks_noticed(scheduler, metaserver):
    metaserver.answering.clear()
    [expect] = issue(scheduler, wanting(metaserver.url)).expects
    scheduler.update(WorkerReport({expect.ticket_id: "x" * 1000, "unknown": "x"}), set())
    eventually(lambda: metaserver.failures)
    ids = {"request_id": "r", "ticket_id": expect.ticket_id}
    assert metaserver.failures == [{**ids, "reason": "x" * 500}]
    assert scheduler.build_step({}).cancelled == {expect.ticket_id: "x" * 1000}
    scheduler.update(WorkerReport({expect.ticket_id: "another rank"}), {"r"})
    time.sleep(0.1)
    assert len(metaserver.failures) == 1


def test_the_metaserver_is_not_told_of_an_abort(scheduler, metaserver):
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    scheduler.finished(request)
    [reason] = scheduler.build_step({}).cancelled.values()
    scheduler.update(WorkerReport({expect.ticket_id: reason}), {"r"})
    time.sleep(0.1)
    assert metaserver.failures == []


def test_a_request_that_vllm_ends_because_its_kv_is_lost(scheduler, metaserver):
    """Under kv_load_failure_policy `fail`: before the report that says why, which is what everybody hears."""
    metaserver.answering.clear()
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    why = "prefill rank 1 went silent"
    request.status = RequestStatus.FINISHED_ERROR
    assert scheduler.finished(request) == {"error": "its KV was lost"}
    assert scheduler.build_step({}).cancelled == {}
    scheduler.update(WorkerReport({expect.ticket_id: why}), set())
    eventually(lambda: metaserver.failures)
    assert [told["reason"] for told in metaserver.failures] == [why]
    assert scheduler.build_step({}).cancelled == {expect.ticket_id: why}
    assert scheduler._observer.take()["counters"][stats.RECEIVE_FAILURES.name] == {"transfer": 1}
    scheduler.update(WorkerReport({expect.ticket_id: why}), {"r"})
    assert remembered(scheduler) == {}


def test_a_request_that_vllm_ends_because_prefill_failed(scheduler, metaserver):
    metaserver.status = 404
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    why = step_with(scheduler, lambda step: step.cancelled).cancelled[expect.ticket_id]
    request.status = RequestStatus.FINISHED_ERROR
    assert scheduler.finished(request) == {"error": why}
    scheduler.update(WorkerReport({expect.ticket_id: why}), {"r"})
    assert scheduler._observer.take()["counters"][stats.RECEIVE_FAILURES.name] == {"prefill": 1}
    assert remembered(scheduler) == {}


def test_an_abort_cancels_the_ticket_and_the_post(scheduler, metaserver):
    metaserver.answering.clear()
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    eventually(lambda: metaserver.bodies)
    assert scheduler.finished(request) == {"error": "the request was aborted"}
    assert scheduler.build_step({}).cancelled == {expect.ticket_id: "the request was aborted"}
    metaserver.answering.set()
    time.sleep(0.1)
    step = scheduler.build_step({})
    assert (step.prefilled, step.cancelled) == ([], {})
    scheduler.update(None, {"r"})  # only now has every rank stopped expecting it
    assert remembered(scheduler) == {}


def test_an_abort_before_the_ticket_left(scheduler, metaserver):
    request = wanting(metaserver.url)
    scheduler.allocated(request, BLOCKS, scheduler.matched_tokens(request, 0))
    scheduler.finished(request)
    step = scheduler.build_step({})
    [expect] = step.expects
    assert step.cancelled == {expect.ticket_id: "the request was aborted"}
    time.sleep(0.1)
    assert metaserver.bodies == []
    scheduler.update(None, {"r"})
    assert remembered(scheduler) == {}


def test_the_metaserver_answers_after_the_kv_has_arrived(scheduler, metaserver):
    metaserver.status = 404
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    scheduler.update(WorkerReport(received={expect.ticket_id: (1000, 800)}), {"r"})
    eventually(lambda: metaserver.bodies)
    time.sleep(0.1)
    assert scheduler.build_step({}).cancelled == {}
    assert scheduler.finished(request) == {"received_bytes": 1000, "bytes_before_prefill_end": 800}
    assert remembered(scheduler) == {}
