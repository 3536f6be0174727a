# SPDX-License-Identifier: Apache-2.0
"""The tickets decode's scheduler issues and what becomes of them, with a real metaserver client and server."""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from vllm.v1.request import RequestStatus

from harness.schedulers import decode_scheduler
from harness.scheduling import FOR_A_PULLING_CONNECTOR, make_request, remembered
from harness.waiting import wait_until
from vllm_ascend_pd.core.groups import StateGroup, TokenGroup
from vllm_ascend_pd.core.metaserver import FAILURE_SUFFIX
from vllm_ascend_pd.core.prompt_digest import PromptDigest, digest_of_tokens
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.core.signing import Secret, verify
from vllm_ascend_pd.core.step import DecodeStep, WorkerReport
from vllm_ascend_pd.core.ticket import Ticket, parse_ticket
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.decode.ticket_issuer import EngineInfo, Signer
from vllm_ascend_pd.observe import stats

BLOCK = 4
PROMPT = 10
BLOCKS = ([7, 1, 5],)
ENGINE = EngineInfo("decode-0", "10.0.0.1", 5555, 2)
SETTINGS = MetaserverSettings(deadline_s=20, retries=0)


class Metaserver:
    """Answers posts with `status`, once `answering` is set."""

    def __init__(self) -> None:
        self.status = 200
        self.bodies: list[dict] = []
        self.failures: list[dict] = []
        self.answering = threading.Event()
        self.answering.set()
        metaserver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == METASERVER_PATH + FAILURE_SUFFIX:
                    metaserver.failures.append(body)
                else:
                    metaserver.bodies.append(body)
                    metaserver.answering.wait(20)
                self.send_response(metaserver.status)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}{METASERVER_PATH}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def stop(self) -> None:
        self.answering.set()
        self.server.shutdown()
        self.thread.join(5)
        self.server.server_close()


@pytest.fixture
def metaserver() -> Iterator[Metaserver]:
    metaserver = Metaserver()
    yield metaserver
    metaserver.stop()


@pytest.fixture
def scheduler() -> Iterator[DecodeScheduler]:
    scheduler = decode_scheduler(ENGINE, [TokenGroup(BLOCK)], MetaserverClient(SETTINGS, own_host="127.0.0.1"))
    yield scheduler
    scheduler.close()


def test_tickets_are_signed_for_as_long_as_they_may_wait(metaserver):
    secret = Secret(b"a secret of this test, long enough")
    client = MetaserverClient(SETTINGS, own_host="127.0.0.1")
    scheduler = decode_scheduler(ENGINE, [TokenGroup(BLOCK)], client, Signer(secret, 480.0))
    try:
        before = time.time()
        scheduler.allocated(wanting(metaserver.url), BLOCKS, PROMPT)
        scheduler.build_step(computes=False)
        wait_until(lambda: metaserver.bodies, 20)
        ticket = parse_ticket(metaserver.bodies[0], PROMPT, 1)
    finally:
        scheduler.close()
    verify(ticket, secret)
    assert before + 480 <= ticket.expires_at <= time.time() + 481


def wanting(url: object, request_id: str = "r", num_tokens: int = PROMPT, **wants: object):
    """A request as the proxy sends it to decode."""
    return make_request(request_id, num_tokens, {"do_remote_prefill": True, "metaserver": url}, **wants)


def issue(scheduler: DecodeScheduler, request, blocks=BLOCKS, computed: int = 0) -> DecodeStep:
    """The step in which `request` gets its ticket."""
    external = scheduler.matched_tokens(request, computed)
    scheduler.allocated(request, blocks, external)
    return scheduler.build_step(computes=True)


def step_with(scheduler: DecodeScheduler, what: Callable[[DecodeStep], object]) -> DecodeStep:
    """Runs empty steps until `what` is in one."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        step = scheduler.build_step(computes=False)
        if what(step):
            return step
        time.sleep(0.005)
    raise AssertionError("no step had it")


eventually = partial(wait_until, timeout_s=10)


def test_a_request_gets_a_ticket(scheduler, metaserver):
    request = wanting(metaserver.url)
    assert scheduler.matched_tokens(request, 0) == PROMPT
    step = issue(scheduler, request)
    [expect] = step.expects
    assert (expect.request_id, expect.attempt, expect.blocks) == ("r", 0, [7, 1, 5])
    assert (step.cancelled, step.prefilled, step.wait_s) == ({}, [], 0.0)
    assert step_with(scheduler, lambda step: step.prefilled).prefilled == [expect.ticket_id]
    [body] = metaserver.bodies
    ticket = parse_ticket(body, PROMPT, 1)  # as prefill reads it
    assert ticket == Ticket(
        request_id="r",
        remote_block_ids=[[7, 1, 5]],
        remote_block_size=[BLOCK],
        remote_engine_id="decode-0",
        remote_host="10.0.0.1",
        remote_port=5555,
        remote_tp_size=2,
        remote_cached_tokens=0,
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
    assert len(scheduler.build_step(computes=True).expects) == 1
    eventually(lambda: metaserver.bodies)


def test_decodes_cached_prefix_is_not_asked_for(scheduler, metaserver):
    request = wanting(metaserver.url)
    assert scheduler.matched_tokens(request, 8) == 2
    [expect] = issue(scheduler, request, computed=8).expects
    assert expect.blocks == [5]  # the cached ones stay good whatever happens
    eventually(lambda: metaserver.bodies)
    assert metaserver.bodies[0]["remote_cached_tokens"] == 8
    assert metaserver.bodies[0]["remote_block_ids"] == [[7, 1, 5]]


def test_a_state_is_asked_for_without_the_last_token(metaserver):
    groups = [TokenGroup(4), StateGroup(4096)]
    scheduler = decode_scheduler(ENGINE, groups, MetaserverClient(SETTINGS, own_host="127.0.0.1"))
    try:
        request = wanting(metaserver.url)
        assert scheduler.matched_tokens(request, 0) == PROMPT - 1
        issue(scheduler, request, ([7, 1, 5], [20]), computed=4)
        eventually(lambda: metaserver.bodies)
        ticket = parse_ticket(metaserver.bodies[0], PROMPT - 1, 2, {1})
        assert (ticket.remote_block_ids, ticket.remote_block_size) == ([[7, 1, 5], [20]], [4, 1])
        assert ticket.remote_cached_tokens == 4
        assert scheduler.matched_tokens(wanting(metaserver.url, "one", num_tokens=1), 0) == 0
    finally:
        scheduler.close()


def test_a_window_is_asked_for_without_the_last_token(metaserver):
    """vLLM keeps of it what the token after the received ones sees, and that is the one that decode computes."""
    groups = [TokenGroup(BLOCK), TokenGroup(BLOCK, windowed=True)]
    scheduler = decode_scheduler(ENGINE, groups, MetaserverClient(SETTINGS, own_host="127.0.0.1"))
    try:
        request = wanting(metaserver.url)
        assert scheduler.matched_tokens(request, 4) == PROMPT - 1 - 4
        issue(scheduler, request, ([7, 1, 5], [0, 2, 3]), computed=4)
        eventually(lambda: metaserver.bodies)
        assert parse_ticket(metaserver.bodies[0], PROMPT, 2).num_tokens == PROMPT - 1
    finally:
        scheduler.close()


def test_logprobs_of_the_prompt_are_decodes_own_to_compute(scheduler, metaserver):
    request = wanting(metaserver.url, prompt_logprobs=1)
    assert scheduler.matched_tokens(request, 0) == 0


def test_blocks_that_stand_for_a_block_on_each_of_several_ranks(metaserver):
    engine = dataclasses.replace(ENGINE, dcp=2, interleave=BLOCK)
    groups = [TokenGroup(BLOCK, ranks=2)]
    scheduler = decode_scheduler(engine, groups, MetaserverClient(SETTINGS, own_host="127.0.0.1"))
    try:
        request = wanting(metaserver.url)
        assert scheduler.matched_tokens(request, 8) == 2
        [expect] = issue(scheduler, request, ([7, 1],), computed=8).expects
        assert expect.blocks == [1]
        eventually(lambda: metaserver.bodies)
        ticket = parse_ticket(metaserver.bodies[0], PROMPT, 1)
        assert (ticket.remote_block_ids, ticket.remote_block_size) == ([[7, 1]], [BLOCK])
        assert (ticket.remote_tp_size, ticket.remote_pcp_size, ticket.remote_dcp_size) == (2, 1, 2)
        assert (ticket.remote_interleave_size, ticket.span(0), ticket.remote_cached_tokens) == (BLOCK, 8, 8)
    finally:
        scheduler.close()


def test_cache_groups(metaserver):
    scheduler = decode_scheduler(
        ENGINE,
        [TokenGroup(4), TokenGroup(8)],
        MetaserverClient(SETTINGS, own_host="127.0.0.1"),
    )
    try:
        [expect] = issue(scheduler, wanting(metaserver.url), ([7, 1, 5], [20, 30]), computed=8).expects
        assert expect.blocks == [5, 30]
        eventually(lambda: metaserver.bodies)
        assert parse_ticket(metaserver.bodies[0], PROMPT, 2).remote_block_ids == [[7, 1, 5], [20, 30]]
    finally:
        scheduler.close()


def test_the_first_cache_group_may_hold_nothing_of_a_prompt(metaserver):
    """Chunked attention, and a chunk ends where decode begins: a failure is known by the other groups' blocks."""
    groups = [TokenGroup(BLOCK, windowed=True), TokenGroup(BLOCK)]
    scheduler = decode_scheduler(ENGINE, groups, MetaserverClient(SETTINGS, own_host="127.0.0.1"))
    try:
        [expect] = issue(scheduler, wanting(metaserver.url, num_tokens=9), ([0, 0], [7, 1])).expects
        assert expect.blocks == [7, 1]
    finally:
        scheduler.close()


def test_the_metaserver_knows_the_request_by_its_external_id(scheduler, metaserver, monkeypatch):
    monkeypatch.delenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", raising=False)
    step = issue(scheduler, wanting(metaserver.url, "cmpl-42-0-89abcdef"))
    assert step.expects[0].request_id == "cmpl-42-0-89abcdef"
    eventually(lambda: metaserver.bodies)
    assert metaserver.bodies[0]["request_id"] == "cmpl-42-0"


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


def test_asking_for_matched_tokens_changes_nothing(scheduler, metaserver):
    request = wanting(metaserver.url)
    assert [scheduler.matched_tokens(request, computed) for computed in (0, 0, 4, 10, 12)] == [10, 10, 6, 0, 0]
    assert remembered(scheduler) == {}


def test_a_request_that_decode_has_completely_needs_no_ticket(scheduler, metaserver):
    request = wanting(metaserver.url, num_tokens=8)
    step = issue(scheduler, request, ([7, 1],), computed=8)
    assert (step.expects, remembered(scheduler)) == ([], {})


def test_a_request_that_has_generated_gets_no_first_ticket(scheduler, metaserver):
    """Decode had its whole prompt once, then preempted it and gave the blocks away."""
    request = wanting(metaserver.url)
    assert scheduler.matched_tokens(request, PROMPT) == 0
    request.append_output_token_ids(5)
    assert scheduler.matched_tokens(request, 0) == 0


def test_one_ticket_however_often_blocks_are_allocated(scheduler, metaserver):
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    scheduler.allocated(request, ([7, 1, 5, 9],), 0)  # its KV is here: decode starts
    scheduler.allocated(request, ([7, 1, 5, 9],), PROMPT)
    assert scheduler.build_step(computes=True).expects == []
    scheduler.update(None, {"r"})
    assert scheduler.matched_tokens(request, 0) == 0  # preempted: it computes its prompt itself
    assert scheduler.build_step(computes=True).expects == []
    eventually(lambda: metaserver.bodies)
    assert [body["ticket_id"] for body in metaserver.bodies] == [expect.ticket_id]


def test_tickets_are_not_alike(scheduler, metaserver):
    tickets = [issue(scheduler, wanting(metaserver.url, str(n))).expects[0].ticket_id for n in range(50)]
    assert len(set(tickets)) == 50


# --- what goes wrong -----------------------------------------------------------------------------------------


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
    assert scheduler.build_step(computes=False).cancelled == {}
    assert scheduler.finished(request) == {"error": step.cancelled[expect.ticket_id]}
    assert remembered(scheduler) == {}


def test_params_without_a_metaserver(scheduler):
    request = make_request("r", PROMPT, {"do_remote_prefill": True})
    assert len(issue(scheduler, request).cancelled) == 1


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
    assert scheduler.build_step(computes=False).cancelled == {expect.ticket_id: "prefill rank 1: it broke"}
    scheduler.update(WorkerReport(failed={expect.ticket_id: "cancelled"}), {"r"})
    assert scheduler.build_step(computes=False).cancelled == {}
    assert scheduler.finished(request) == {"error": "prefill rank 1: it broke"}
    assert remembered(scheduler) == {}


def test_the_metaserver_hears_what_ranks_noticed(scheduler, metaserver):
    """While it works on the ticket, of an attempt that failed, once; then that there will be no other."""
    metaserver.answering.clear()
    [expect] = issue(scheduler, wanting(metaserver.url)).expects
    given_up = WorkerReport(given_up={expect.ticket_id: (0, "prefill rank 1 went silent"), "unknown": (0, "x")})
    scheduler.update(given_up, set())
    scheduler.update(given_up, set())
    eventually(lambda: metaserver.failures)
    ids = {"request_id": "r", "ticket_id": expect.ticket_id}
    told = {**ids, "attempt": 0, "reason": "prefill rank 1 went silent", "final": False}
    assert metaserver.failures == [told]
    again = WorkerReport({expect.ticket_id: "x" * 1000}, given_up={expect.ticket_id: (1, "it broke")})
    scheduler.update(again, set())
    eventually(lambda: len(metaserver.failures) == 2)
    assert metaserver.failures[1] == {**ids, "attempt": 1, "reason": "x" * 500, "final": True}
    assert scheduler.build_step(computes=False).cancelled == {expect.ticket_id: "x" * 1000}
    scheduler.update(WorkerReport({expect.ticket_id: "another rank"}), {"r"})
    time.sleep(0.1)
    assert len(metaserver.failures) == 2


def test_the_metaserver_is_not_told_of_an_abort(scheduler, metaserver):
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    scheduler.finished(request)
    [reason] = scheduler.build_step(computes=False).cancelled.values()
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
    assert scheduler.build_step(computes=False).cancelled == {}
    scheduler.update(WorkerReport({expect.ticket_id: why}), set())
    eventually(lambda: metaserver.failures)
    assert [(told["reason"], told["final"]) for told in metaserver.failures] == [(why, True)]
    assert scheduler.build_step(computes=False).cancelled == {expect.ticket_id: why}
    assert scheduler._observer.take()["counters"] == {stats.RECEIVE_FAILURES.name: {"transfer": 1}}
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
    assert scheduler._observer.take()["counters"] == {stats.RECEIVE_FAILURES.name: {"prefill": 1}}
    assert remembered(scheduler) == {}


def test_an_abort_cancels_the_ticket_and_the_post(scheduler, metaserver):
    metaserver.answering.clear()
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    eventually(lambda: metaserver.bodies)
    assert scheduler.finished(request) == {"error": "the request was aborted"}
    assert scheduler.build_step(computes=False).cancelled == {expect.ticket_id: "the request was aborted"}
    metaserver.answering.set()
    time.sleep(0.1)
    step = scheduler.build_step(computes=False)
    assert (step.prefilled, step.cancelled) == ([], {})
    scheduler.update(None, {"r"})  # only now has every rank stopped expecting it
    assert remembered(scheduler) == {}


def test_an_abort_before_the_ticket_left(scheduler, metaserver):
    request = wanting(metaserver.url)
    scheduler.allocated(request, BLOCKS, scheduler.matched_tokens(request, 0))
    scheduler.finished(request)
    step = scheduler.build_step(computes=False)
    [expect] = step.expects
    assert step.cancelled == {expect.ticket_id: "the request was aborted"}
    time.sleep(0.1)
    assert metaserver.bodies == []
    scheduler.update(None, {"r"})
    assert remembered(scheduler) == {}


def test_an_abort_after_a_failure_keeps_the_reason(scheduler):
    request = wanting(None)
    step = issue(scheduler, request)
    assert scheduler.finished(request) == {"error": next(iter(step.cancelled.values()))}
    assert scheduler.build_step(computes=False).cancelled == {}


def test_the_metaserver_answers_after_the_kv_has_arrived(scheduler, metaserver):
    metaserver.status = 404
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    scheduler.update(WorkerReport(received={expect.ticket_id: (1000, 800)}), {"r"})
    eventually(lambda: metaserver.bodies)
    time.sleep(0.1)
    assert scheduler.build_step(computes=False).cancelled == {}
    assert scheduler.finished(request) == {"received_bytes": 1000, "bytes_before_prefill_end": 800}
    assert remembered(scheduler) == {}


# --- what goes well ------------------------------------------------------------------------------------------


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
    scheduler.update(WorkerReport(given_up={tickets["ok"]: (0, "a rank went silent")}), set())
    scheduler.update(WorkerReport(given_up={tickets["ok"]: (0, "so says another")}), set())
    scheduler.update(WorkerReport(received={tickets["ok"]: (10, 5)}), {"ok"})
    scheduler.update(WorkerReport(failed={tickets["late"]: "no grant"}), set())
    scheduler.update(WorkerReport(failed={tickets["late"]: "so says another"}), {"late", "lost"})
    said = scheduler._observer.take()
    assert said["counters"] == {
        stats.ATTEMPTS_GIVEN_UP.name: {"": 1},
        stats.RECEIVE_FAILURES.name: {"transfer": 1, "not_posted": 1},
    }
    counts, sums = said["histograms"][stats.TICKET_TO_READY_SECONDS.name]
    assert sum(counts) == 1
    assert 0 < sum(sums) < 60
    assert scheduler._observer.take() == {}
