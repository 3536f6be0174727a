# SPDX-License-Identifier: Apache-2.0
"""The tickets that decode's scheduler issues, what it reports of those that are received, and what becomes of those
that cannot be posted, fail or are aborted. The metaserver client and its HTTP server are real."""

import time

import pytest
from decode_requests import *  # noqa: F403
from decode_requests import BLOCK, BLOCKS, CONFIG, ENGINE, PROMPT, eventually, issue, step_with, wanting
from vllm.v1.request import RequestStatus

from harness.schedulers import decode_scheduler
from harness.scheduling import FOR_A_PULLING_CONNECTOR, make_request, remembered
from harness.tickets import ticket_with
from harness.waiting import wait_until
from vllm_ascend_pd.core.caches import TokenGroup
from vllm_ascend_pd.core.prompt_digest import PromptDigest, digest_of_tokens
from vllm_ascend_pd.core.step import WorkerReport
from vllm_ascend_pd.core.ticket import Secret, parse_ticket, verify
from vllm_ascend_pd.decode.metaserver import MetaserverClient
from vllm_ascend_pd.observe import stats


def test_tickets_are_signed_for_as_long_as_they_may_wait(metaserver):
    secret = Secret(b"a secret of this test, long enough")
    client = MetaserverClient(CONFIG, own_host="127.0.0.1")
    scheduler = decode_scheduler(ENGINE, [TokenGroup(BLOCK)], client, secret)
    try:
        before = time.time()
        scheduler.allocated(wanting(metaserver.url), BLOCKS, PROMPT)
        scheduler.build_step({})
        wait_until(lambda: metaserver.bodies, 20)
        ticket = parse_ticket(metaserver.bodies[0], PROMPT, 1)
    finally:
        scheduler.close()
    verify(ticket, secret)
    assert before + 480 <= ticket.expires_at <= time.time() + 481


def test_a_request_gets_a_ticket(scheduler, metaserver):
    request = wanting(metaserver.url)
    assert scheduler.matched_tokens(request, 0) == PROMPT
    step = issue(scheduler, request)
    [expect] = step.expects
    assert (expect.request_id, expect.blocks) == ("r", [7, 1, 5])
    assert (step.cancelled, step.prefilled, step.wait_s) == ({}, [], 0.0)
    assert step_with(scheduler, lambda step: step.prefilled).prefilled == [expect.ticket_id]
    [body] = metaserver.bodies
    ticket = parse_ticket(body, PROMPT, 1)  # as prefill reads it
    assert ticket == ticket_with(
        request_id="r",
        remote_block_ids=[[7, 1, 5]],
        remote_block_size=[BLOCK],
        remote_host="10.0.0.1",
        remote_tp_size=2,
        ticket_id=expect.ticket_id,
        num_tokens=PROMPT,
        prompt=PromptDigest(tokens=digest_of_tokens(expect.ticket_id, list(range(PROMPT)))),
    )
    assert "token_ids" not in body or body["token_ids"] == []
    assert ticket.digest() == expect.digest


def test_the_ticket_leaves_with_the_step_that_tells_the_ranks(scheduler, metaserver):
    request = wanting(metaserver.url)
    scheduler.allocated(request, BLOCKS, scheduler.matched_tokens(request, 0))
    time.sleep(0.1)
    assert metaserver.bodies == []
    assert len(scheduler.build_step({"other": 1}).expects) == 1
    eventually(lambda: metaserver.bodies)


def test_logprobs_of_the_prompt_are_decodes_own_to_compute(scheduler, metaserver):
    request = wanting(metaserver.url, prompt_logprobs=1)
    assert scheduler.matched_tokens(request, 0) == 0


def test_the_first_cache_group_may_hold_nothing_of_a_prompt(metaserver):
    """Chunked attention, and a chunk ends where decode begins: a failure is known by the other groups' blocks."""
    groups = [TokenGroup(BLOCK, windowed=True), TokenGroup(BLOCK)]
    scheduler = decode_scheduler(ENGINE, groups, MetaserverClient(CONFIG, own_host="127.0.0.1"))
    try:
        [expect] = issue(scheduler, wanting(metaserver.url, num_tokens=9), ([0, 0], [7, 1])).expects
        assert expect.blocks == [7, 1]
    finally:
        scheduler.close()


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_prefill": False}, {"do_remote_decode": True}, FOR_A_PULLING_CONNECTOR["decode"]],
    ids=["none", "empty", "no", "prefill", "pull"],
)
def test_requests_that_decode_prefills_itself(scheduler, params):
    request = make_request("r", PROMPT, params)
    assert scheduler.matched_tokens(request, 0) == 0
    step = issue(scheduler, request)
    assert (step.expects, step.cancelled) == ([], {})
    assert scheduler.finished(request) is None


def test_one_ticket_however_often_blocks_are_allocated(scheduler, metaserver):
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    scheduler.allocated(request, ([7, 1, 5, 9],), 0)  # its KV is here: decode starts
    scheduler.allocated(request, ([7, 1, 5, 9],), PROMPT)
    assert scheduler.build_step({"other": 1}).expects == []
    scheduler.update(None, {"r"})
    assert scheduler.matched_tokens(request, 0) == 0  # preempted: it computes its prompt itself
    assert scheduler.build_step({"other": 1}).expects == []
    eventually(lambda: metaserver.bodies)
    assert [body["ticket_id"] for body in metaserver.bodies] == [expect.ticket_id]


def test_received_bytes_are_in_the_answer(scheduler, metaserver):
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    scheduler.update(WorkerReport(received={expect.ticket_id: (1000, 800)}), set())
    other_rank = WorkerReport(received={expect.ticket_id: (30, 0)})
    another = WorkerReport(received={expect.ticket_id: (4, 4), "unknown": (1, 1)})
    scheduler.update(other_rank.merge(another), {"r"})
    assert scheduler.finished(request) == {"received_bytes": 1034, "bytes_before_prefill_end": 804}
    assert remembered(scheduler) == {}


def test_nothing_is_kept_of_requests_that_ended(scheduler, metaserver):
    """Whether they end before or after the ranks have, well or not."""
    requests = [wanting(metaserver.url if n % 3 else None, str(n)) for n in range(60)]
    tickets = [issue(scheduler, request).expects[0].ticket_id for request in requests]
    for n, request in enumerate(requests):
        if n % 2:
            scheduler.finished(request)
        scheduler.update(WorkerReport(received={tickets[n]: (1, 1)}), {str(n)})
        if not n % 2:
            scheduler.finished(request)
        assert scheduler.finished(request) is None
    scheduler.update(WorkerReport(failed={tickets[0]: "late"}, received={tickets[1]: (1, 1)}), {"0", "never seen"})
    assert remembered(scheduler) == {}
    assert scheduler.matched_tokens(requests[0], 0) == PROMPT  # the same id may come again


def test_what_becomes_of_tickets_is_counted(scheduler, metaserver):
    """Once for each request, however many ranks say so, and in whatever order."""
    for request_id, ticket_url in (("ok", metaserver.url), ("late", metaserver.url), ("lost", None)):
        issue(scheduler, wanting(ticket_url, request_id))
    tickets = {request_id: issued.ticket.ticket_id for request_id, issued in scheduler._transfers.items()}
    scheduler.update(WorkerReport(received={tickets["ok"]: (10, 5)}), {"ok"})
    scheduler.update(WorkerReport(failed={tickets["late"]: "no grant"}), set())
    scheduler.update(WorkerReport(failed={tickets["late"]: "so says another"}), {"late", "lost"})
    said = scheduler._observer.take()
    assert said["counters"] == {
        stats.RECEIVE_FAILURES.name: {"transfer": 1, "not_posted": 1},
        stats.PROMPTS.name: {"prefill,policy": 3},
        stats.PROMPT_TOKENS.name: {"prefill,policy": 3 * PROMPT},
    }
    counts, sums = said["histograms"][stats.TICKET_TO_READY_SECONDS.name]
    assert sum(counts) == 1
    assert 0 < sum(sums) < 60
    assert scheduler._observer.take() == {}


# --- failures and aborts -----------------------------------------------------------------------------------------


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


def test_the_metaserver_and_the_other_ranks_hear_what_one_noticed(scheduler, metaserver):
    metaserver.answering.clear()
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    scheduler.update(WorkerReport({expect.ticket_id: "x" * 1000, "unknown": "x"}), set())
    eventually(lambda: metaserver.failures)
    ids = {"request_id": "r", "ticket_id": expect.ticket_id}
    assert metaserver.failures == [{**ids, "reason": "x" * 500}]
    assert scheduler.build_step({}).cancelled == {expect.ticket_id: "x" * 1000}
    scheduler.update(WorkerReport({expect.ticket_id: "another rank"}), {"r"})
    time.sleep(0.1)
    assert len(metaserver.failures) == 1
    assert scheduler.build_step({}).cancelled == {}
    assert scheduler.finished(request) == {"error": "x" * 1000}
    assert remembered(scheduler) == {}


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
    assert metaserver.failures == []
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
