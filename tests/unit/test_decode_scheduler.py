# SPDX-License-Identifier: Apache-2.0
"""The tickets that decode's scheduler issues, and what it reports of those that are received. The metaserver client and
its HTTP server are real."""

import time

import pytest
from decode_requests import *  # noqa: F403
from decode_requests import BLOCK, BLOCKS, ENGINE, PROMPT, SETTINGS, eventually, issue, step_with, wanting

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
    client = MetaserverClient(SETTINGS, own_host="127.0.0.1")
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
    scheduler = decode_scheduler(ENGINE, groups, MetaserverClient(SETTINGS, own_host="127.0.0.1"))
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
