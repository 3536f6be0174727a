# SPDX-License-Identifier: Apache-2.0
"""Long prompts, which prefill computes before decode gives them blocks. The clients of the metaserver and of prefill,
their servers and the side channel are real."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from harness.clock import clock_of
from harness.metaserver import metaserver as serving_metaserver
from harness.schedulers import DUE_S, decode_scheduler
from harness.scheduling import make_request, remembered
from harness.ticket_takers import REFUSED, TAKEN, UNKNOWN, TicketTaker
from harness.waiting import wait_for, wait_until
from vllm_ascend_pd.core.caches import TokenGroup
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.protocol import FAILURE_SUFFIX, METASERVER_PATH, AskTicket, OfferTicket, ReleasePrompt
from vllm_ascend_pd.core.reasons import Decision, Reason
from vllm_ascend_pd.core.step import DecodeStep
from vllm_ascend_pd.core.ticket_params import carries_ticket, expects_ticket, hold_s, prefill_first_tokens
from vllm_ascend_pd.decode import intents, prefill_client
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.prefill_admission import PrefillAdmission
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.decode.tickets import EngineInfo
from vllm_ascend_pd.observe.stats import PROMPTS, RECEIVE_FAILURES, WAITING_BLOCKS, Counter, DecodeSchedulerStats
from vllm_ascend_pd.transport import wakeup
from vllm_ascend_pd.transport.peers import Peers
from vllm_ascend_pd.transport.wakeup import IdleWait, WakeupSender, WakeupSocket

BLOCK, LONGEST = 4, 8
PROMPT = 10
BLOCKS = ([7, 1, 5],)
ENGINE = EngineInfo("decode-0", "10.0.0.1", 5555, 2)
CONFIG = ConnectorConfig(transfer_timeout_s=20, metaserver_retries=0)
SOON_S = 10


class Metaserver:
    """What was posted. Posts are answered once `answering` is set: as our proxy does, or with `status`."""

    def __init__(self, prefill: TicketTaker) -> None:
        self.url = ""
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self.answering = threading.Event()
        self.knows_intents = True
        self._prefill = prefill

    def answer(self, post: BaseHTTPRequestHandler, content: bytes) -> None:
        body = json.loads(content)
        said: dict[str, Any] = {"status": "ok"}
        if post.path == METASERVER_PATH + FAILURE_SUFFIX:
            self.failures.append(body)
        elif post.path == METASERVER_PATH:
            self.bodies.append(body)
            self.answering.wait(20)
            if self.knows_intents:
                said["kv_transfer_params"] = self._prefill.params | {"transfer_id": body.get("transfer_id")}
        if self.status != 200:
            said = {"error": "no prefill engine is well", "may_follow": False}
        post.send_response(self.status)
        encoded = json.dumps(said).encode()
        post.send_header("Content-Length", str(len(encoded)))
        post.end_headers()
        post.wfile.write(encoded)


@pytest.fixture(autouse=True)
def no_questions_about_tickets_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(prefill_client, "KEEP_EVERY_S", 600.0)


@pytest.fixture
def prefill(request: pytest.FixtureRequest) -> Iterator[TicketTaker]:
    taker = TicketTaker(*getattr(request, "param", ()))
    yield taker
    taker.close()


@pytest.fixture
def metaserver(prefill: TicketTaker) -> Iterator[Metaserver]:
    metaserver = Metaserver(prefill)
    with serving_metaserver(metaserver.answer) as metaserver.url:
        yield metaserver
        metaserver.answering.set()


@contextmanager
def scheduling(may_compute: bool = False) -> Iterator[DecodeScheduler]:
    client = MetaserverClient(CONFIG, own_host="127.0.0.1")
    scheduler = decode_scheduler(ENGINE, [TokenGroup(BLOCK)], client, longest=LONGEST, may_compute=may_compute)
    yield scheduler
    scheduler.close()


@pytest.fixture
def scheduler() -> Iterator[DecodeScheduler]:
    with scheduling() as scheduler:
        yield scheduler


def kept(scheduler: DecodeScheduler) -> dict[str, Any]:
    """What is kept of requests."""
    return remembered(scheduler) | remembered(scheduler._intents)


def come(scheduler: DecodeScheduler, metaserver: Metaserver, tokens: int = PROMPT, name: str = "r") -> Any:
    """A request that has come, and that vLLM has not asked for."""
    request = make_request(name, tokens, {"do_remote_prefill": True, "metaserver": metaserver.url})
    scheduler.add_request(request)
    return request


def step_with(scheduler: DecodeScheduler, what: Callable[[DecodeStep], object]) -> DecodeStep:
    """Runs empty steps until `what` is in one."""
    return wait_for(lambda: scheduler.build_step({}), what, SOON_S, every_s=0.005)


def posted(scheduler: DecodeScheduler, metaserver: Metaserver) -> dict[str, Any]:
    """What is posted in the next step."""
    scheduler.build_step({"other": 1})
    wait_until(lambda: metaserver.bodies, SOON_S)
    return metaserver.bodies[0]


def computed(scheduler: DecodeScheduler, metaserver: Metaserver) -> None:
    """Prefill has computed all prompts that were posted."""
    metaserver.answering.set()
    step_with(scheduler, lambda step: not scheduler.awaiting_prefill)


def waiting_blocks(scheduler: DecodeScheduler) -> int | None:
    """None: as many as before."""
    observer = scheduler._observer
    assert isinstance(observer, DecodeSchedulerStats)
    gauges = observer.take().get("gauges", {})
    return gauges[WAITING_BLOCKS.name][""] if WAITING_BLOCKS.name in gauges else None


def counted(scheduler: DecodeScheduler, counter: Counter) -> dict[str, int]:
    """What was counted since anything was taken last, by labels."""
    observer = scheduler._observer
    assert isinstance(observer, DecodeSchedulerStats)
    return observer.take().get("counters", {}).get(counter.name, {})


def test_prefill_computes_a_long_prompt_before_it_gets_blocks(
    scheduler: DecodeScheduler, metaserver: Metaserver, prefill: TicketTaker
) -> None:
    request = come(scheduler, metaserver)
    assert scheduler.matched_tokens(request, 0) is None
    assert scheduler.awaiting_prefill == {"r"}
    intent = posted(scheduler, metaserver)
    assert "remote_block_ids" not in intent
    assert (intent["request_id"], intent["num_tokens"], intent["remote_engine_id"]) == ("r", PROMPT, "decode-0")
    assert expects_ticket(intent)
    assert not carries_ticket(intent)
    assert scheduler.build_step({}).prefilled == []
    computed(scheduler, metaserver)
    assert prefill.got == []
    assert waiting_blocks(scheduler) is None

    assert scheduler.matched_tokens(request, 0) == PROMPT
    scheduler.allocated(request, BLOCKS, PROMPT)
    [expect] = scheduler.build_step({"other": 1}).expects
    assert waiting_blocks(scheduler) == len(BLOCKS[0])
    wait_until(lambda: prefill.got, SOON_S)
    offer = prefill.got[0]
    assert isinstance(offer, OfferTicket)
    assert (offer.transfer_id, offer.ticket.remote_block_ids) == (intent["transfer_id"], [[7, 1, 5]])
    assert offer.ticket.ticket_id == expect.ticket_id == intent["ticket_id"]
    assert len(metaserver.bodies) == 1
    scheduler.update(None, {"r"})
    assert waiting_blocks(scheduler) == 0
    assert scheduler.end_request(request)[1] == {"received_bytes": 0, "bytes_before_prefill_end": 0}
    assert kept(scheduler) == {}
    assert prefill.of(ReleasePrompt) == []


@pytest.mark.parametrize("status", [200, 502])
def test_prefills_answer_wakes_an_idle_engine(
    metaserver: Metaserver, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """It waits for that itself: ranks, which wait for KV, would not hear it. The step that gets it does not wait, so
    that vLLM asks for the request."""
    monkeypatch.setattr(wakeup, "PAUSE_S", SOON_S)
    monkeypatch.setattr(wakeup, "FIRST_S", SOON_S)
    metaserver.status = status
    socket, waker = WakeupSocket(), WakeupSender()
    client = MetaserverClient(CONFIG, own_host="127.0.0.1", wake=lambda: waker.wake(socket.address))
    idle = IdleWait(SOON_S, in_flight=1, wakeup=socket)
    scheduler = decode_scheduler(ENGINE, [TokenGroup(BLOCK)], client, longest=LONGEST, idle=idle)
    with closing(waker), closing(scheduler):
        request = come(scheduler, metaserver)
        assert scheduler.build_step({}).wait_s == 0.0
        wait_until(lambda: metaserver.bodies, SOON_S)
        threading.Timer(0.1, metaserver.answering.set).start()
        began = time.monotonic()
        assert scheduler.build_step({}).wait_s == 0.0
        assert time.monotonic() - began < SOON_S / 2
        assert scheduler.awaiting_prefill == set()
        scheduler.end_request(request)


def test_other_prompts_get_blocks_first(scheduler: DecodeScheduler, metaserver: Metaserver) -> None:
    """Short ones, those of which decode has enough, and those that a router had computed."""
    short = come(scheduler, metaserver, LONGEST, "short")
    assert scheduler.matched_tokens(short, 0) == LONGEST
    cached = come(scheduler, metaserver, PROMPT, "cached")
    assert scheduler.matched_tokens(cached, BLOCK) == PROMPT - BLOCK
    held = {"remote_engine_id": "p", "transfer_id": "t-1", "ticket_host": "127.0.0.1", "ticket_port": 9}
    routed = make_request("routed", PROMPT, {"do_remote_prefill": True, **held})
    scheduler.add_request(routed)
    assert scheduler.matched_tokens(routed, 0) == PROMPT
    assert scheduler.awaiting_prefill == set()
    for request in (short, cached, routed):
        scheduler.end_request(request)
    assert kept(scheduler) == {}


def test_an_intent_leaves_though_vllm_asks_for_nobody(scheduler: DecodeScheduler, metaserver: Metaserver) -> None:
    """All seats are taken, or a request before it does not fit."""
    request = come(scheduler, metaserver)
    assert posted(scheduler, metaserver)["request_id"] == "r"
    assert scheduler.awaiting_prefill == {"r"}
    scheduler.end_request(request)
    assert kept(scheduler) == {}


def test_intents_wait_in_line(
    scheduler: DecodeScheduler, metaserver: Metaserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many are posted at a time. Those of clients that have left take no place."""
    monkeypatch.setattr(intents, "MAX_POSTED", 2)
    requests = [come(scheduler, metaserver, name=f"r{number}") for number in range(5)]
    scheduler.build_step({"other": 1})
    wait_until(lambda: len(metaserver.bodies) == 2, SOON_S)
    scheduler.end_request(requests[2])
    metaserver.answering.set()
    step_with(scheduler, lambda step: not scheduler.awaiting_prefill)
    assert sorted(body["request_id"] for body in metaserver.bodies[2:]) == ["r3", "r4"]
    for request in requests:
        scheduler.end_request(request)
    assert kept(scheduler) == {}


def test_a_prompt_that_is_cached_meanwhile_is_released(
    scheduler: DecodeScheduler, metaserver: Metaserver, prefill: TicketTaker
) -> None:
    request = come(scheduler, metaserver)
    intent = posted(scheduler, metaserver)
    computed(scheduler, metaserver)
    assert scheduler.matched_tokens(request, PROMPT - 1) == 0  # all but the last token
    scheduler.allocated(request, BLOCKS, 0)
    wait_until(lambda: prefill.got, SOON_S)
    [release] = prefill.of(ReleasePrompt)
    assert (release.transfer_id, release.ticket_id) == (intent["transfer_id"], intent["ticket_id"])
    scheduler.end_request(request)
    assert kept(scheduler) == {}


def test_who_computes_a_prompt_is_decided_once(
    scheduler: DecodeScheduler, metaserver: Metaserver, prefill: TicketTaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode has time for it only when prefill has computed it."""
    decision = Decision(False, Reason.BUSY)
    monkeypatch.setattr(scheduler._placement, "decide", lambda *_: decision)
    request = come(scheduler, metaserver)
    posted(scheduler, metaserver)
    decision = Decision(True, Reason.CHEAP)
    assert scheduler.matched_tokens(request, 0) is None
    computed(scheduler, metaserver)
    assert scheduler.matched_tokens(request, 0) == PROMPT
    scheduler.allocated(request, BLOCKS, PROMPT)
    assert counted(scheduler, PROMPTS) == {"prefill,busy": 1}
    scheduler.build_step({"other": 1})
    wait_until(lambda: prefill.got, SOON_S)
    assert prefill.of(ReleasePrompt) == []
    scheduler.update(None, {"r"})
    scheduler.end_request(request)
    assert kept(scheduler) == {}


def test_a_client_that_leaves(scheduler: DecodeScheduler, metaserver: Metaserver, prefill: TicketTaker) -> None:
    """While prefill computes, the post ends. When it has computed, it is told."""
    client = scheduler._recipients._metaserver
    request = come(scheduler, metaserver)
    posted(scheduler, metaserver)
    scheduler.end_request(request)
    wait_until(lambda: not client._open and not client._posts, SOON_S)
    assert kept(scheduler) == {}

    request = come(scheduler, metaserver)
    scheduler.build_step({"other": 1})
    computed(scheduler, metaserver)
    scheduler.end_request(request)
    wait_until(lambda: prefill.got, SOON_S)
    [release] = prefill.got
    assert isinstance(release, ReleasePrompt)
    assert release.reason == "the request was aborted"
    assert kept(scheduler) == {}


def test_prefill_that_fails(scheduler: DecodeScheduler, metaserver: Metaserver) -> None:
    metaserver.status = 502
    request = come(scheduler, metaserver)
    posted(scheduler, metaserver)
    computed(scheduler, metaserver)
    assert counted(scheduler, RECEIVE_FAILURES) == {"prefill": 1}
    assert scheduler.take_refused() == ["r"]
    assert scheduler.matched_tokens(request, 0) is None
    assert "no prefill engine is well" in scheduler.end_request(request)[1]["error"]
    assert kept(scheduler) == {}


@pytest.mark.parametrize("why", ["does not say where it is held", "is not in peers"])
def test_an_answer_that_names_no_engine_for_the_ticket(
    scheduler: DecodeScheduler, metaserver: Metaserver, why: str
) -> None:
    """Prefill does not hold the prompt, or its address is refused. The metaserver, for which prefill has succeeded,
    learns why."""
    nobody = HostList((), "is not in peers")
    scheduler._recipients._prefill._admission = PrefillAdmission(Peers(None, nobody, nobody))
    metaserver.knows_intents = why == "is not in peers"
    request = come(scheduler, metaserver)
    intent = posted(scheduler, metaserver)
    computed(scheduler, metaserver)
    assert scheduler.take_refused() == ["r"]
    assert scheduler.matched_tokens(request, 0) is None
    reason = scheduler.end_request(request)[1]["error"]
    assert why in reason
    wait_until(lambda: metaserver.failures, SOON_S)
    [failure] = metaserver.failures
    assert (failure["request_id"], failure["ticket_id"]) == ("r", intent["ticket_id"])
    assert failure["reason"] == reason
    assert kept(scheduler) == {}


def test_a_metaserver_that_may_not_be_posted_to(scheduler: DecodeScheduler) -> None:
    request = make_request("r", PROMPT, {"do_remote_prefill": True, "metaserver": "http://192.0.2.7/v1/metaserver"})
    scheduler.add_request(request)
    scheduler.build_step({})
    assert counted(scheduler, RECEIVE_FAILURES) == {"not_posted": 1}
    assert scheduler.take_refused() == ["r"]
    assert "the metaserver's URL is refused" in scheduler.end_request(request)[1]["error"]
    assert kept(scheduler) == {}


def test_decode_computes_what_prefill_did_not(metaserver: Metaserver) -> None:
    """With `kv_load_failure_policy` recompute."""
    metaserver.status = 502
    with scheduling(may_compute=True) as scheduler:
        request = come(scheduler, metaserver)
        posted(scheduler, metaserver)
        computed(scheduler, metaserver)
        assert scheduler.take_refused() == []
        assert scheduler.matched_tokens(request, 0) == 0
        scheduler.allocated(request, BLOCKS, 0)
        assert scheduler.end_request(request)[1] is None
        assert kept(scheduler) == {}


def test_a_prompt_that_gets_no_room(
    scheduler: DecodeScheduler, metaserver: Metaserver, prefill: TicketTaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after a time, and prefill need not hold it any longer."""
    request = come(scheduler, metaserver)
    posted(scheduler, metaserver)
    clock = clock_of(intents, monkeypatch)
    computed(scheduler, metaserver)
    clock.now += DUE_S - 1
    assert scheduler.take_refused() == []
    clock.now += 2
    assert scheduler.take_refused() == ["r"]
    assert counted(scheduler, RECEIVE_FAILURES) == {"transfer": 1}
    assert "no room" in scheduler.end_request(request)[1]["error"]
    wait_until(lambda: metaserver.failures, SOON_S)
    assert "no room" in metaserver.failures[0]["reason"]
    wait_until(lambda: prefill.of(ReleasePrompt), SOON_S)
    assert kept(scheduler) == {}


@pytest.mark.parametrize("prefill", [([REFUSED], [TAKEN]), ([TAKEN], [REFUSED])], indirect=True)
def test_a_ticket_that_prefill_refuses(scheduler: DecodeScheduler, metaserver: Metaserver) -> None:
    """The metaserver learns of it: for it, prefill had succeeded."""
    request = come(scheduler, metaserver)
    intent = posted(scheduler, metaserver)
    computed(scheduler, metaserver)
    scheduler.allocated(request, BLOCKS, scheduler.matched_tokens(request, 0))
    scheduler.build_step({"other": 1})
    step_with(scheduler, lambda step: step.cancelled)
    wait_until(lambda: metaserver.failures, SOON_S)
    [failure] = metaserver.failures
    assert (failure["request_id"], failure["ticket_id"]) == ("r", intent["ticket_id"])
    assert "it is for another prompt" in failure["reason"]
    scheduler.update(None, {"r"})
    scheduler.end_request(request)
    assert kept(scheduler) == {}


def test_prefill_that_has_died(
    scheduler: DecodeScheduler, metaserver: Metaserver, prefill: TicketTaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held the prompt. Nobody answers the offers, so the transfer fails."""
    monkeypatch.setattr(prefill_client, "SILENT_ROUNDS", 1)
    request = come(scheduler, metaserver)
    posted(scheduler, metaserver)
    computed(scheduler, metaserver)
    prefill.close()
    scheduler._recipients._prefill._config = ConnectorConfig(control_timeout_s=0.2)
    scheduler.allocated(request, BLOCKS, scheduler.matched_tokens(request, 0))
    scheduler.build_step({"other": 1})
    step_with(scheduler, lambda step: step.cancelled)
    wait_until(lambda: metaserver.failures, SOON_S)
    scheduler.update(None, {"r"})
    scheduler.end_request(request)
    assert kept(scheduler) == {}


@pytest.mark.parametrize("prefill", [([TAKEN], [UNKNOWN])], indirect=True)
def test_decode_asks_about_a_ticket_until_it_has_blocks(
    scheduler: DecodeScheduler, metaserver: Metaserver, prefill: TicketTaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill does not know it yet, and goes on holding the prompt."""
    monkeypatch.setattr(prefill_client, "KEEP_EVERY_S", 0.02)
    request = come(scheduler, metaserver)
    intent = posted(scheduler, metaserver)
    computed(scheduler, metaserver)
    wait_until(lambda: len(prefill.of(AskTicket)) > 2, SOON_S)
    asked = {(ask.transfer_id, ask.ticket_id) for ask in prefill.of(AskTicket)}
    assert asked == {(intent["transfer_id"], intent["ticket_id"])}
    scheduler.allocated(request, BLOCKS, scheduler.matched_tokens(request, 0))
    scheduler.build_step({"other": 1})
    wait_until(lambda: prefill.of(OfferTicket), SOON_S)
    assert not [step for step in (scheduler.build_step({}) for _ in range(3)) if step.cancelled]
    scheduler.update(None, {"r"})
    scheduler.end_request(request)
    assert scheduler._recipients._prefill._open == {}
    assert kept(scheduler) == {}


@pytest.mark.parametrize("prefill", [([TAKEN], [UNKNOWN])], indirect=True)
def test_decode_asks_more_often_if_prefill_holds_prompts_for_a_short_time(
    scheduler: DecodeScheduler, metaserver: Metaserver, prefill: TicketTaker
) -> None:
    prefill.hold_s = 0.2
    request = come(scheduler, metaserver)
    posted(scheduler, metaserver)
    computed(scheduler, metaserver)
    wait_until(lambda: len(prefill.of(AskTicket)) > 2, SOON_S)
    scheduler.end_request(request)


@pytest.mark.parametrize("said", [None, "5", True, 0, -1, float("nan"), float("inf"), 86401])
def test_a_hold_that_makes_no_sense(said: object) -> None:
    assert hold_s({"hold_timeout_s": said}) is None


@pytest.mark.parametrize("said", [None, "5", True, 0, -1, 5.0, [5]])
def test_a_proxy_that_says_nothing_that_makes_sense(said: object) -> None:
    assert prefill_first_tokens({"prefill_first_tokens": said}) is None
    assert prefill_first_tokens({"prefill_first_tokens": 5}) == 5


@pytest.mark.parametrize("prefill", [([TAKEN], [REFUSED]), ()], indirect=True, ids=["it has freed it", "it has died"])
@pytest.mark.parametrize("may_compute", [False, True])
def test_prefill_that_does_not_hold_a_prompt_any_more(
    metaserver: Metaserver,
    prefill: TicketTaker,
    monkeypatch: pytest.MonkeyPatch,
    may_compute: bool,
    request: pytest.FixtureRequest,
) -> None:
    """Decode learns of it before it has blocks, and tells the metaserver. With `kv_load_failure_policy` recompute it
    computes the prompt."""
    monkeypatch.setattr(prefill_client, "KEEP_EVERY_S", 0.02)
    monkeypatch.setattr(prefill_client, "SILENT_ROUNDS", 1)
    with scheduling(may_compute) as scheduler:
        scheduler._recipients._prefill._config = ConnectorConfig(control_timeout_s=0.5)
        if "died" in request.node.name:
            prefill.close()
        waits = come(scheduler, metaserver)
        intent = posted(scheduler, metaserver)
        computed(scheduler, metaserver)
        step_with(scheduler, lambda step: metaserver.failures)
        [failure] = metaserver.failures
        assert (failure["request_id"], failure["ticket_id"]) == ("r", intent["ticket_id"])
        assert ("does not answer" if "died" in request.node.name else "another prompt") in failure["reason"]
        assert scheduler.take_refused() == ([] if may_compute else ["r"])
        assert scheduler.matched_tokens(waits, 0) == (0 if may_compute else None)
        if may_compute:
            scheduler.allocated(waits, BLOCKS, 0)
        scheduler.end_request(waits)
        assert kept(scheduler) == {}
