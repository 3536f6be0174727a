# SPDX-License-Identifier: Apache-2.0
"""The tickets that decode's scheduler issues, what it reports of those that are received, and what becomes of those
that cannot be posted, fail or are aborted. The metaserver client, its HTTP server and the side channel are real."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from harness.metaserver import metaserver as serving_metaserver
from harness.schedulers import decode_scheduler
from harness.scheduling import FOR_A_PULLING_CONNECTOR, make_request, remembered
from harness.ticket_takers import REFUSED, TAKEN, TicketTaker
from harness.tickets import ticket_with
from harness.waiting import wait_for, wait_until
from vllm_ascend_pd.core.caches import TokenGroup
from vllm_ascend_pd.core.checksum import Form
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.prompt_digest import PromptDigest, digest_of_tokens
from vllm_ascend_pd.core.protocol import FAILURE_SUFFIX, METASERVER_PATH, OfferTicket, ReleasePrompt
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signing import verify
from vllm_ascend_pd.core.step import DecodeStep, VerifiedBlocks, WorkerReport
from vllm_ascend_pd.core.ticket import parse_ticket
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.decode import prefill_client
from vllm_ascend_pd.decode.arrivals import Arrivals
from vllm_ascend_pd.decode.checksums import Delivered
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.decode.tickets import EngineInfo
from vllm_ascend_pd.observe import stats

BLOCK = 4
PROMPT = 10
BLOCKS = ([7, 1, 5],)
ENGINE = EngineInfo("decode-0", "10.0.0.1", 5555, 2)
CONFIG = ConnectorConfig(transfer_timeout_s=20, metaserver_retries=0)


class Metaserver:
    """What was posted. Posts are answered with `status`, once `answering` is set."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.bodies: list[dict] = []
        self.failures: list[dict] = []
        self.answering = threading.Event()
        self.answering.set()

    def answer(self, post: BaseHTTPRequestHandler, content: bytes) -> None:
        if post.path == METASERVER_PATH + FAILURE_SUFFIX:
            self.failures.append(json.loads(content))
        else:
            self.bodies.append(json.loads(content))
            self.answering.wait(20)
        post.send_response(self.status)
        post.end_headers()


@pytest.fixture
def metaserver() -> Iterator[Metaserver]:
    metaserver = Metaserver()
    with serving_metaserver(metaserver.answer) as metaserver.url:
        yield metaserver
        metaserver.answering.set()


@pytest.fixture
def scheduler() -> Iterator[DecodeScheduler]:
    scheduler = decode_scheduler(ENGINE, [TokenGroup(BLOCK)], MetaserverClient(CONFIG, own_host="127.0.0.1"))
    yield scheduler
    scheduler.close()


def wanting(url: object, request_id: str = "r", num_tokens: int = PROMPT, **wants: object):
    """A request as the proxy sends it to decode."""
    return make_request(request_id, num_tokens, {"do_remote_prefill": True, "metaserver": url}, **wants)


def issue(scheduler: DecodeScheduler, request, blocks=BLOCKS) -> DecodeStep:
    """The step in which `request` gets its ticket."""
    scheduler.allocated(request, blocks, scheduler.matched_tokens(request, 0))
    return scheduler.build_step({"other": 1})


def step_with(scheduler: DecodeScheduler, what: Callable[[DecodeStep], object]) -> DecodeStep:
    """Runs empty steps until `what` is in one."""
    return wait_for(lambda: scheduler.build_step({}), what, timeout_s=10, every_s=0.005)


eventually = partial(wait_until, timeout_s=10)


def test_tickets_are_signed_for_as_long_as_they_may_wait(metaserver):
    secret = Secret([b"a secret of this test, long enough"])
    client = MetaserverClient(CONFIG, own_host="127.0.0.1")
    before = time.time()
    with closing(decode_scheduler(ENGINE, [TokenGroup(BLOCK)], client, secret)) as scheduler:
        scheduler.allocated(wanting(metaserver.url), BLOCKS, PROMPT)
        scheduler.build_step({})
        eventually(lambda: metaserver.bodies)
    ticket = parse_ticket(metaserver.bodies[0], PROMPT, [TokenGroup(BLOCK)])
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
    ticket = parse_ticket(body, PROMPT, [TokenGroup(BLOCK)])  # as prefill reads it
    assert ticket == ticket_with(
        request_id="r",
        remote_block_ids=[[7, 1, 5]],
        remote_block_size=[BLOCK],
        remote_host="10.0.0.1",
        remote_tp_size=2,
        ticket_id=expect.ticket_id,
        num_tokens=PROMPT,
        prompt=PromptDigest(tokens=digest_of_tokens(expect.ticket_id, list(range(PROMPT)))),
        checksum_form=max(Form),
    )
    assert "token_ids" not in body or body["token_ids"] == []
    assert ticket.digest() == expect.digest


def test_logprobs_of_the_prompt_are_decodes_own_to_compute(scheduler, metaserver):
    request = wanting(metaserver.url, prompt_logprobs=1)
    assert scheduler.matched_tokens(request, 0) == 0


def test_the_first_cache_group_may_hold_nothing_of_a_prompt(metaserver):
    """Chunked attention, and a chunk ends where decode begins: a failure is known by the other groups' blocks."""
    groups = [TokenGroup(BLOCK, windowed=True), TokenGroup(BLOCK)]
    with closing(decode_scheduler(ENGINE, groups, MetaserverClient(CONFIG, own_host="127.0.0.1"))) as scheduler:
        [expect] = issue(scheduler, wanting(metaserver.url, num_tokens=9), ([0, 0], [7, 1])).expects
    assert expect.blocks == [7, 1]


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
    assert scheduler.end_request(request)[1] is None


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
    assert scheduler.end_request(request)[1] == {"received_bytes": 1034, "bytes_before_prefill_end": 804}
    assert remembered(scheduler) == {}


def test_nothing_is_kept_of_requests_that_ended(scheduler, metaserver):
    """Whether they end before or after the ranks have, well or not."""
    requests = [wanting(metaserver.url if n % 3 else None, str(n)) for n in range(60)]
    tickets = [issue(scheduler, request).expects[0].ticket_id for request in requests]
    for n, request in enumerate(requests):
        if n % 2:
            scheduler.end_request(request)
        scheduler.update(WorkerReport(received={tickets[n]: (1, 1)}), {str(n)})
        if not n % 2:
            scheduler.end_request(request)
        assert scheduler.end_request(request)[1] is None
    scheduler.update(WorkerReport(failed={tickets[0]: "late"}, received={tickets[1]: (1, 1)}), {"0", "never seen"})
    assert remembered(scheduler) == {}
    assert scheduler.matched_tokens(requests[0], 0) == PROMPT  # the same id may come again


def test_what_becomes_of_tickets_is_counted(scheduler, metaserver):
    """Once for each request, however many ranks say so, and in whatever order."""
    for request_id, ticket_url in (("ok", metaserver.url), ("late", metaserver.url), ("lost", None)):
        issue(scheduler, wanting(ticket_url, request_id))
    [wrong] = issue(scheduler, wanting(metaserver.url, "wrong")).expects
    tickets = {request_id: issued.ticket.ticket_id for request_id, issued in scheduler._transfers.items()}
    scheduler.update(WorkerReport(received={tickets["ok"]: (10, 5)}), {"ok"})
    scheduler.update(WorkerReport(failed={tickets["late"]: "no grant"}), set())
    scheduler.update(WorkerReport(failed={tickets["late"]: "so says another"}), {"late", "lost"})
    of_a_rank = Arrivals()
    delivered = Delivered(wrong, VerifiedBlocks((), PROMPT, 1), (10, 5), None, sharding(1), ())
    of_a_rank.ticket_verified(delivered, "KV differs from what prefill computed")
    scheduler.update(of_a_rank.report.merge(WorkerReport(received={wrong.ticket_id: (10, 5)})), {"wrong"})
    said = scheduler._observer.take()
    assert said["counters"] == {
        stats.RECEIVE_FAILURES.name: {"transfer": 1, "not_posted": 1, "wrong_bytes": 1},
        stats.PROMPTS.name: {"prefill,policy": 4},
        stats.PROMPT_TOKENS.name: {"prefill,policy": 4 * PROMPT},
    }
    counts, sums = said["histograms"][stats.TICKET_TO_READY_SECONDS.name]
    assert sum(counts) == 1
    assert 0 < sum(sums) < 60
    assert scheduler._observer.take() == {}


def test_a_load_of_a_pool_beside_ours_does_not_end_a_transfer_once_more(scheduler, metaserver, monkeypatch):
    """The request was preempted, and then another connector loaded its KV: vLLM names requests, not transfers."""
    delivered = []
    monkeypatch.setattr(scheduler._placement, "delivered", lambda *sample: delivered.append(sample))
    request = wanting(metaserver.url)
    issue(scheduler, request)
    scheduler.update(None, {"r"})
    assert scheduler._observer.take()["histograms"]
    scheduler.allocated(request, BLOCKS, 0)
    scheduler.update(None, {"r"})
    assert "histograms" not in scheduler._observer.take()
    assert len(delivered) == 1
    scheduler.end_request(request)
    assert remembered(scheduler) == {}


# --- failures and aborts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        (None, "no metaserver URL"),
        (8000, "no metaserver URL"),
        ("http://192.0.2.1/v1/metaserver", "name it in peers"),
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
    assert scheduler.end_request(request)[1] == {"error": step.cancelled[expect.ticket_id]}
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
    answer = scheduler.end_request(request)[1]
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
    assert scheduler.end_request(request)[1] == {"error": "x" * 1000}
    assert remembered(scheduler) == {}


def test_the_metaserver_hears_whether_prefill_reported_the_failure_itself(scheduler, metaserver):
    metaserver.answering.clear()
    [expect] = issue(scheduler, wanting(metaserver.url)).expects
    ranks = [WorkerReport({expect.ticket_id: "it broke"}, by_prefill={expect.ticket_id}), WorkerReport()]
    for one, other in (ranks, ranks[::-1]):
        assert one.merge(other).by_prefill == {expect.ticket_id}
    scheduler.update(ranks[0].merge(ranks[1]), set())
    eventually(lambda: metaserver.failures)
    assert [told["by_prefill"] for told in metaserver.failures] == [True]


def test_a_request_that_vllm_ends_because_its_kv_is_lost(scheduler, metaserver):
    """Under kv_load_failure_policy `fail`: before the report that says why, which is what everybody hears."""
    metaserver.answering.clear()
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    why = "prefill rank 1 went silent"
    request.status = RequestStatus.FINISHED_ERROR
    assert scheduler.end_request(request)[1] == {"error": "its KV was lost"}
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
    assert scheduler.end_request(request)[1] == {"error": why}
    scheduler.update(WorkerReport({expect.ticket_id: why}), {"r"})
    assert scheduler._observer.take()["counters"][stats.RECEIVE_FAILURES.name] == {"prefill": 1}
    assert remembered(scheduler) == {}


def test_an_abort_cancels_the_ticket_and_the_post(scheduler, metaserver):
    metaserver.answering.clear()
    request = wanting(metaserver.url)
    [expect] = issue(scheduler, request).expects
    eventually(lambda: metaserver.bodies)
    assert scheduler.end_request(request)[1] == {"error": "the request was aborted"}
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
    scheduler.end_request(request)
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
    assert scheduler.end_request(request)[1] == {"received_bytes": 1000, "bytes_before_prefill_end": 800}
    assert remembered(scheduler) == {}


# --- prompts that a prefill engine holds, which is played ------------------------------------------------------------


@pytest.fixture(autouse=True)
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_client, "_ASK_EVERY_S", 0.05)


@pytest.fixture
def prefill(request: pytest.FixtureRequest) -> Iterator[TicketTaker]:
    taker = TicketTaker(*getattr(request, "param", ()))
    yield taker
    taker.close()


def routed(prefill: TicketTaker, **changes: Any) -> Any:
    return make_request("r", PROMPT, prefill.params | changes)


def prompt_of(release: ReleasePrompt) -> tuple[Any, ...]:
    """What says which prompt is released: the same as in a ticket for it."""
    assert (len(release.ticket_id), release.num_tokens) == (32, PROMPT)
    assert release.prompt is not None
    assert release.prompt.tokens == digest_of_tokens(release.ticket_id, list(range(PROMPT)))
    return release.ticket_id, release.num_tokens, release.prompt


def test_the_ticket_goes_straight_to_prefill_with_the_step_that_tells_the_ranks(
    scheduler: DecodeScheduler, prefill: TicketTaker
) -> None:
    request = routed(prefill)
    scheduler.allocated(request, BLOCKS, scheduler.matched_tokens(request, 0))
    time.sleep(0.1)
    assert prefill.got == []
    [expect] = scheduler.build_step({"other": 1}).expects
    eventually(lambda: prefill.got)
    offer = prefill.got[0]
    assert isinstance(offer, OfferTicket)
    assert (offer.engine_id, offer.transfer_id) == ("prefill-0-12ab", "t-1")
    assert (offer.ticket.ticket_id, offer.ticket.digest()) == (expect.ticket_id, expect.digest)
    assert offer.ticket.token_ids == []
    scheduler.update(None, {"r"})
    assert scheduler.end_request(request)[1] == {"received_bytes": 0, "bytes_before_prefill_end": 0}
    time.sleep(0.2)
    assert prefill.of(ReleasePrompt) == []
    assert remembered(scheduler) == {}


@pytest.mark.parametrize("prefill", [([REFUSED], [TAKEN]), ([TAKEN], [REFUSED])], indirect=True)
def test_prefill_that_refuses(scheduler: DecodeScheduler, prefill: TicketTaker) -> None:
    request = routed(prefill)
    [expect] = issue(scheduler, request).expects
    [(ticket_id, reason)] = step_with(scheduler, lambda step: step.cancelled).cancelled.items()
    assert ticket_id == expect.ticket_id
    assert "it is for another prompt" in reason
    eventually(lambda: prefill.of(ReleasePrompt))
    scheduler.update(None, {"r"})
    assert "it is for another prompt" in scheduler.end_request(request)[1]["error"]
    assert remembered(scheduler) == {}


def test_a_failure_that_a_rank_notices_releases_the_prompt(scheduler: DecodeScheduler, prefill: TicketTaker) -> None:
    request = routed(prefill)
    [expect] = issue(scheduler, request).expects
    scheduler.update(WorkerReport({expect.ticket_id: "a lease ran out"}), set())
    assert scheduler.build_step({"other": 1}).cancelled == {expect.ticket_id: "a lease ran out"}
    eventually(lambda: prefill.of(ReleasePrompt))
    assert prefill.of(ReleasePrompt)[0].reason == "a lease ran out"
    assert prefill.of(ReleasePrompt)[0].ticket_id == expect.ticket_id


def test_a_prompt_that_decode_computes_is_released(scheduler: DecodeScheduler, prefill: TicketTaker) -> None:
    request = routed(prefill)
    assert scheduler.matched_tokens(request, PROMPT - 1) == 0
    scheduler.allocated(request, BLOCKS, 0)
    assert scheduler.matched_tokens(request, 0) == 0  # after a reset of the prefix cache
    scheduler.allocated(request, BLOCKS, 0)
    assert scheduler.end_request(request)[1] is None
    eventually(lambda: prefill.got)
    time.sleep(0.2)
    [release] = prefill.got
    assert release == ReleasePrompt("prefill-0-12ab", "t-1", "decode computes the prompt", *prompt_of(release))
    assert remembered(scheduler) == {}


def test_a_request_that_ends_before_it_starts_releases_its_prompt(
    scheduler: DecodeScheduler, prefill: TicketTaker
) -> None:
    assert scheduler.end_request(routed(prefill))[1] is None
    eventually(lambda: prefill.got)
    [release] = prefill.got
    assert release == ReleasePrompt("prefill-0-12ab", "t-1", "the request was aborted", *prompt_of(release))
    assert remembered(scheduler) == {}


def test_an_aborted_request_releases_its_prompt(scheduler: DecodeScheduler, prefill: TicketTaker) -> None:
    request = routed(prefill)
    [expect] = issue(scheduler, request).expects
    eventually(lambda: prefill.of(OfferTicket))
    assert scheduler.end_request(request)[1] == {"error": "the request was aborted"}
    assert scheduler.build_step({"other": 1}).cancelled == {expect.ticket_id: "the request was aborted"}
    eventually(lambda: prefill.of(ReleasePrompt))
    scheduler.update(None, {"r"})
    assert remembered(scheduler) == {}
