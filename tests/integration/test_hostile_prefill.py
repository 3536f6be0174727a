# SPDX-License-Identifier: Apache-2.0
"""Messages to a decode rank from senders without the ticket, or with false contents: other transfers go on."""

import queue
from collections.abc import Iterator

import msgspec
import pytest

from harness.channels import PATIENCE_S, ask
from harness.kv import GQA, Side
from harness.ranks import Pair, Prompt, pair_of_each, prefill, prompts
from vllm_ascend_pd.core.protocol import (
    Acknowledged,
    Describe,
    Granted,
    GrantRefused,
    GrantRequest,
    Message,
    Problem,
    Revoke,
    WriteReport,
    WriterId,
)
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.transport.side_channel import SideChannelClient

SIZE = 2
HONEST = WriterId("prefill", 0, 0)


class Stranger:
    """Connects to a decode rank as a prefill rank does."""

    def __init__(self, pair: Pair) -> None:
        self._client = SideChannelClient()
        self._endpoint = pair.descriptions[0].control

    def say(self, message: Message) -> object:
        answers: queue.Queue[object] = queue.Queue()
        self._client.request(self._endpoint, message, PATIENCE_S, answers.put)
        return answers.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self._client.close()


pair = pair_of_each({"gathered": (GQA, Side(SIZE), Side(1))})


@pytest.fixture
def stranger(pair: Pair) -> Iterator[Stranger]:
    stranger = Stranger(pair)
    yield stranger
    stranger.close()


def expected(pair: Pair) -> tuple[list[Prompt], dict[str, Ticket], Ticket]:
    requests = prompts(pair, [64])
    tickets = pair.announce(requests)
    return requests, tickets, tickets["request-0"]


def arrives(pair: Pair, requests: list[Prompt], tickets: dict[str, Ticket]) -> None:
    """The transfer that was meddled with."""
    prefill(pair, requests, tickets)
    assert pair.wait_arrivals(1) == ({"request-0"}, {})
    assert pair.wait_sent(1) == {}


def asks(ticket: Ticket, **changes: object) -> GrantRequest:
    request = GrantRequest(ticket.ticket_id, ticket.digest(), HONEST, sharding(SIZE), (0,), 1.0)
    return msgspec.structs.replace(request, **changes)


def test_reports_from_who_has_not_got_the_ticket_end_nothing(pair: Pair, stranger: Stranger) -> None:
    requests, tickets, ticket = expected(pair)
    for writer in (HONEST, WriterId("prefill", 0, 1), WriterId("stranger", 0, 0)):
        for reason in (None, "I say that it failed"):
            for digest in ("", "0" * 32, ticket.digest()[:-1]):
                report = WriteReport(ticket.ticket_id, writer, reason, digest=digest)
                assert stranger.say(report) == Acknowledged(), "an answer tells nothing"
    arrives(pair, requests, tickets)


def test_who_has_not_got_the_ticket_does_not_decide_who_writes(pair: Pair, stranger: Stranger) -> None:
    requests, tickets, ticket = expected(pair)
    mine = WriterId("stranger", 0, 0)
    for changes in ({"digest": "0" * 32}, {"digest": ""}):
        for shape in (sharding(SIZE), sharding(1)):
            refused = stranger.say(asks(ticket, writer=mine, sharding=shape, **changes))
            assert isinstance(refused, GrantRefused)
            assert not refused.retry
    arrives(pair, requests, tickets)


def test_what_a_decode_rank_is_not_asked(pair: Pair, stranger: Stranger) -> None:
    requests, tickets, ticket = expected(pair)
    for message in (Describe("decode"), Revoke(ticket.ticket_id, HONEST, "mine now"), Acknowledged(), Granted(1.0)):
        assert isinstance(stranger.say(message), Problem)
    arrives(pair, requests, tickets)
    client = SideChannelClient()
    try:
        answer = ask(client, pair.listener.endpoint, "another engine")
    finally:
        client.close()
    assert isinstance(answer, Problem)
