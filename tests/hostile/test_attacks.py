# SPDX-License-Identifier: Apache-2.0
"""Attacks on engines: by who connects to them, and by whom they connect to (`harness/attacks.py`).

A real listener, client or rank in a process of its own is attacked. Meanwhile honest requests end well, nothing is
logged with a traceback, and memory and files stay within bounds. A sink that gets the same bytes in its place tells
what the machine does.

The last tests show what an attacker can still do. docs/security.md says so, too.
"""

import signal
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import psutil
import pytest

from harness.attacked import Client, Ranks, Subject, Tickets, outcome, subject_of
from harness.attacks import (
    PATIENCE_S,
    ROWS,
    Row,
    answer_endlessly,
    attack,
    identities,
    read,
    running,
    sign,
)
from harness.ranks import expect_delivery, prefill, prompts
from harness.tickets import ticket_with
from harness.waiting import wait_until
from vllm_ascend_pd.core.hosts import AnyHost
from vllm_ascend_pd.core.signing import signed
from vllm_ascend_pd.core.ticket import Ticket, TicketError
from vllm_ascend_pd.prefill.ticket_admission import TicketAdmission
from vllm_ascend_pd.transport.secret_files import new_secret, write_new

MAX_GROWTH_BYTES = 64 << 20
"""Beyond what the same attack on a sink takes."""
MAX_FILES = 64
MAX_CPU_S = 5.0
"""Of the attacked thread, beyond what the same attack on a sink takes it. The worst attack takes about one second."""
ROUNDS = 3
FILLED_BYTES = 256 << 20

Subjects = Callable[[Row], Subject]


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("secret") / "secret"
    write_new(path, new_secret())
    return str(path)


@pytest.fixture(scope="module")
def subjects(secret_file: str) -> Iterator[Subjects]:
    """A function that returns what a row attacks. Rows share it."""
    running_ones: dict[Any, Subject] = {}

    def subject(row: Row) -> Subject:
        key = (row.against.split()[-1], row.engine_has_secret)
        if key not in running_ones:
            running_ones[key] = subject_of(row, secret_file)
        return running_ones[key]

    yield subject
    for each in running_ones.values():
        each.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}, with {row.who}")
def test_an_engine_under_attack_serves_others(row: Row, subjects: Subjects, secret_file: str) -> None:
    subject = subjects(row)
    found = outcome(row, subject, secret_file, ROUNDS)
    control = outcome(row, subject, secret_file, ROUNDS, sink=True)
    assert (found.sent > 0) is not row.ends_in_handshake
    assert found.errors == []
    assert found.grown - control.grown <= MAX_GROWTH_BYTES
    assert found.files <= MAX_FILES
    assert found.cpu_s - control.cpu_s <= MAX_CPU_S


@pytest.mark.parametrize("forgets", ["restarted", "told another time"])
def test_a_replay_that_prefill_has_forgotten_writes_nothing(forgets: str, secret_file: str) -> None:
    """Decode has not forgotten the ticket."""
    subject = Ranks(secret_file)
    try:
        pair = subject.pair
        requests = prompts(pair, [40, 50])
        tickets = {each.request_id: sign(pair.ticket(each), secret_file) for each in requests}
        pair.expect(requests, tickets)
        prefill(pair, requests, tickets)
        expect_delivery(pair, requests)
        if forgets == "restarted":
            pair.restart_prefill("prefill-again")
        else:
            admitted_again(tickets.values(), secret_file)
        pair.each(pair.d_ranks, "clear")
        prefill(pair, requests, tickets)
        assert pair.wait_sent(len(requests)).keys() == tickets.keys()
        assert pair.differences([]) == []
    finally:
        subject.close()


def admitted_again(tickets: Collection[Ticket], secret_file: str) -> None:
    """Has prefill's scheduler admit tickets, then once more after its clock has jumped two days ahead and back."""
    admission, now, secret = TicketAdmission(AnyHost(), read(secret_file)), time.time(), read(secret_file)
    for each in tickets:
        admission.admit(each)
        with pytest.raises(TicketError, match="a replay"):
            admission.admit(each)
    later = now + 2 * 86400
    admission._clock = lambda: later
    admission.admit(signed(ticket_with(), secret, int(later) + 600))
    admission._clock = lambda: now
    for each in tickets:
        admission.admit(each)


@pytest.mark.parametrize("knows", [False, True], ids=["anybody", "a holder of the secret"])
def test_who_may_send_messages_can_end_a_listener(secret_file: str, knows: bool) -> None:
    """A hundred connections are enough: libzmq asserts that an identity that it has made up is new."""
    known = secret_file if knows else None
    tickets = Tickets(known)
    try:
        tickets.honest()
        with running(attack, identities, tickets.target(known)):
            tickets.process.join(PATIENCE_S)
        assert tickets.process.exitcode == -signal.SIGABRT
    finally:
        tickets.close()


def test_without_a_secret_whom_an_engine_connects_to_can_fill_its_memory() -> None:
    """libzmq does not bound the parts of a message."""
    client = Client(None)
    try:
        client.honest()
        process = psutil.Process(client.pid)
        before = process.memory_info().rss
        with running(answer_endlessly) as host:
            client.lure(host.first)
            wait_until(lambda: process.memory_info().rss - before > FILLED_BYTES, PATIENCE_S)
    finally:
        client.close()
