# SPDX-License-Identifier: Apache-2.0
"""Which tickets prefill's scheduler serves: with the request that carries them, and what its answer says."""

import msgspec
import pytest
from vllm.v1.request import Request, RequestStatus

from harness.schedulers import prefill_scheduler
from harness.scheduling import Scheduled, make_output, make_request
from harness.tickets import ticket_with
from vllm_ascend_pd.core.caches import TokenGroup
from vllm_ascend_pd.core.hosts import AnyHost, HostList
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signing import CLOCK_SKEW_S, signed
from vllm_ascend_pd.core.step import WorkerReport
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.prefill import ticket_admission as admission_module
from vllm_ascend_pd.prefill.ticket_admission import TicketAdmission

SECRET = Secret([b"a secret of this test, long enough"])
OTHER = Secret([b"another secret, of another cluster"])
NOW = 1_800_000_000.0
LIFE_S = 480
FORGET_S = admission_module._FORGET_S
ANYWHERE = AnyHost()
BLOCKS = ([7, 1, 5],)


def ticket(number: int = 1, host: str = "10.0.0.1") -> Ticket:
    return ticket_with(
        request_id=f"cmpl-{number}",
        remote_block_ids=[[100, 101, 102]],
        remote_block_size=[4],
        remote_host=host,
        ticket_id=f"{number:032x}",
        num_tokens=10,
    )


class Prefill:
    """A scheduler with a clock of our own."""

    def __init__(self, hosts: HostList = ANYWHERE, secret: Secret | None = SECRET) -> None:
        self.now = NOW
        self.admission = TicketAdmission(hosts, secret)
        self.admission._clock = lambda: self.now
        self.scheduler = prefill_scheduler([TokenGroup(4)], self.admission)
        self.requests = 0

    def error(self, params: Ticket | dict) -> str | None:
        """What the answer to a request with `params` says, after it was run; None: its KV is sent."""
        self.requests += 1
        name = f"r{self.requests}"
        builtins = msgspec.to_builtins(params) if isinstance(params, Ticket) else params
        request = make_request(name, 10, builtins)
        self.scheduler.allocated(request, BLOCKS)
        step = self.scheduler.build_step(make_output(new=[Scheduled(request, BLOCKS, 0, 10)]))
        kept, said = self.scheduler.end_request(request)
        self.scheduler.update(None, {name})
        assert kept is (name in step.tickets) is (said is None)
        return None if said is None else said["error"]


def test_a_signed_ticket_is_served_once():
    prefill = Prefill()
    good = signed(ticket(), SECRET, int(NOW) + LIFE_S)
    assert prefill.error(good) is None
    for _ in range(3):
        assert prefill.error(good) == "the ticket was used before: a replay"
    assert prefill.error(signed(ticket(2), SECRET, int(NOW) + LIFE_S)) is None


def test_preempted_and_run_again_it_is_the_same_request():
    prefill = Prefill()
    request = make_request("r", 10, msgspec.to_builtins(signed(ticket(), SECRET, int(NOW) + LIFE_S)))
    prefill.scheduler.allocated(request, BLOCKS)
    prefill.scheduler.build_step(make_output(new=[Scheduled(request, BLOCKS, 0, 4)]))
    prefill.scheduler.allocated(request, BLOCKS)
    request.status = RequestStatus.FINISHED_ABORTED
    assert prefill.scheduler.end_request(request)[1] is None


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        (ticket(), "the ticket is not signed: decode needs this cluster's secret (secret_file)"),
        (
            signed(ticket(), OTHER, int(NOW) + LIFE_S),
            "signed with another secret",
        ),
        (msgspec.structs.replace(signed(ticket(), SECRET, int(NOW) + LIFE_S), remote_host="10.0.0.2"), "altered"),
        (msgspec.structs.replace(signed(ticket(), SECRET, int(NOW) - 99), expires_at=int(NOW) + 99), "altered"),
        (signed(ticket(), SECRET, int(NOW) - 99), "the ticket expired 99 s ago"),
        (signed(ticket(), SECRET, int(NOW) + 86400 + 99), "expires more than a day from now"),
    ],
    ids=["unsigned", "another-secret", "another-host", "prolonged", "expired", "for-days"],
)
def test_what_is_refused(params, complaint):
    prefill = Prefill()
    assert complaint in prefill.error(params)
    assert prefill.error(signed(ticket(), SECRET, int(NOW) + LIFE_S)) is None, "a refused one counts for nothing"


def test_engines_that_may_be_made_up_are_few_at_a_time(monkeypatch):
    """Unless tickets are signed. One that was refused is served as soon as the others are over."""
    monkeypatch.setattr(admission_module, "MAX_UNPROVEN", 2)
    prefill = Prefill(secret=None)
    too_many = "2 decode engines have tickets though nothing was ever delivered to them: too many"

    def of(engine: str, number: int) -> Ticket:
        return msgspec.structs.replace(ticket(number), remote_engine_id=engine)

    def begin(engine: str, number: int) -> Request:
        request = make_request(engine, 10, msgspec.to_builtins(of(engine, number)))
        prefill.scheduler.allocated(request, BLOCKS)
        prefill.scheduler.build_step(make_output(new=[Scheduled(request, BLOCKS, 0, 10)]))
        return request

    assert prefill.error(of("known", 1)) is None
    made_up = [begin("made-up-0", 2), begin("made-up-1", 3)]
    assert prefill.error(of("real", 4)) == too_many
    assert prefill.error(of("made-up-1", 5)) is None, "its engine is one of the two"
    assert prefill.error(of("known", 6)) is None
    assert prefill.error(of("real", 7)) is None, "one of the two was delivered to"
    another = begin("made-up-2", 8)
    assert prefill.error(of("new", 9)) == too_many
    for request in (*made_up, another):
        prefill.scheduler.end_request(request)
        prefill.scheduler.update(WorkerReport(failed={request.request_id: "nobody is there"}), {request.request_id})
    assert prefill.error(of("new", 10)) is None
    assert not prefill.admission._open


def test_engines_of_signed_tickets_are_not_made_up(monkeypatch):
    monkeypatch.setattr(admission_module, "MAX_UNPROVEN", 0)
    assert Prefill().error(signed(ticket(), SECRET, int(NOW) + LIFE_S)) is None


def test_clocks_may_differ_by_so_much():
    prefill = Prefill()
    prefill.now = NOW + CLOCK_SKEW_S - 0.1
    assert prefill.error(signed(ticket(1), SECRET, int(NOW))) is None
    prefill.now = NOW + CLOCK_SKEW_S
    assert "expired" in prefill.error(signed(ticket(2), SECRET, int(NOW)))


def test_tickets_are_remembered_until_they_expire_and_little_longer(monkeypatch):
    """Those that expire in the same minute, or so, are forgotten together."""
    monkeypatch.setattr(admission_module, "MAX_REMEMBERED", 3)
    prefill = Prefill()
    tickets = [signed(ticket(n), SECRET, int(NOW) + life) for n, life in ((1, 300), (2, 10), (3, 200))]
    for one in tickets:
        assert prefill.error(one) is None
    assert "3 tickets that have not expired were served" in prefill.error(signed(ticket(4), SECRET, int(NOW) + 199))
    prefill.now = NOW + 10 + CLOCK_SKEW_S + FORGET_S
    assert "expired" in prefill.error(tickets[1])
    assert prefill.error(tickets[0]) == prefill.error(tickets[2]) == "the ticket was used before: a replay"
    assert prefill.error(signed(ticket(4), SECRET, int(NOW) + 199)) is None
    assert "3 tickets" in prefill.error(signed(ticket(5), SECRET, int(NOW) + 199))
    prefill.now = NOW + 1000
    assert prefill.error(signed(ticket(6), SECRET, int(NOW) + 1099)) is None
    assert [len(seen) for seen in prefill.admission._seen.values()] == [prefill.admission._remembered] == [1]


def test_a_ticket_is_remembered_while_another_clock_may_be_late():
    """It may come again until it has expired by a clock that is late by as much as clocks may differ."""
    prefill = Prefill()
    last = (int(NOW) // FORGET_S + 2) * FORGET_S - 1  # of those that are forgotten together
    one = signed(ticket(1), SECRET, last)
    assert prefill.error(one) is None
    prefill.now = last + CLOCK_SKEW_S - 1
    assert prefill.error(one) == "the ticket was used before: a replay"


def test_engines_that_kv_was_delivered_to_are_remembered_within_a_bound(monkeypatch):
    monkeypatch.setattr(admission_module, "_MAX_PROVEN", 2)
    admission = TicketAdmission(ANYWHERE)
    for number in range(5):
        one = msgspec.structs.replace(ticket(number), remote_engine_id=f"decode-{number}")
        admission.admit(one)
        admission.release(one, delivered=True)
    assert [engine for _, engine in admission._proven] == ["decode-3", "decode-4"]


@pytest.mark.parametrize("secret", [None, SECRET], ids=["unsigned", "signed"])
def test_a_made_up_host_is_refused(secret):
    prefill = Prefill(hosts=HostList(("10.0.0.0/24:5000-5999",), "is not in peers"), secret=secret)

    def made(number: int, host: str) -> Ticket:
        unsigned = ticket(number, host)
        return unsigned if secret is None else signed(unsigned, secret, int(NOW) + LIFE_S)

    assert prefill.error(made(1, "10.0.0.9")) is None
    assert prefill.error(made(2, "127.0.0.1")) == "the ticket's host is not in peers"
    prefill = Prefill(hosts=HostList(("10.0.0.0/24:22",), "is not in peers"), secret=secret)
    assert "not this port" in prefill.error(made(4, "10.0.0.9"))
    assert "neither an address nor a host's name" in prefill.error(made(3, "eth0;10.0.0.9"))
