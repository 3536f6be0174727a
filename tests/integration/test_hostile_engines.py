# SPDX-License-Identifier: Apache-2.0
"""Decode engines that prefill must refuse: hosts outside the allow-list, and revocations of other engines' tickets."""

import queue
from collections.abc import Iterator

import msgspec
import pytest

from harness.channels import HOST, PATIENCE_S
from harness.kv import GQA, Side
from harness.rank_programs import PrefillRank
from harness.ranks import Pair, prefill, prompts
from vllm_ascend_pd.core.protocol import Message, Problem, Revoke, WriterId
from vllm_ascend_pd.core.step import PrefillStep
from vllm_ascend_pd.transport.side_channel import ClientConnection, SideChannelServer

CONFIG = {"grant_timeout_s": 5.0, "control_timeout_s": 2.0, "queue_timeout_s": 20.0, "transfer_timeout_s": 20.0}


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(GQA, Side(2), Side(1), CONFIG | request.param)
    yield made
    assert made.close() == []


@pytest.mark.parametrize("pair", [{"peers": ["10.0.0.0/8"], "queue_timeout_s": 3.0}], indirect=True, ids=["listed"])
def test_an_engine_whose_ranks_are_outside_the_allow_list(pair: Pair) -> None:
    requests = prompts(pair, [64])
    tickets = pair.announce(requests)
    prefill(pair, requests, tickets)
    reason = pair.wait_sent(1)["request-0"]
    assert "decode's rank (0, 0): host is not in peers" in reason
    assert pair.differences([]) == [], "not one byte"
    received, failed = pair.wait_arrivals(1, timeout_s=60)
    assert received == set()
    assert "not in peers" not in failed["request-0"], "prefill did not go there, not even to say so"


def writer_of(rank: PrefillRank, ticket_id: str) -> WriterId:
    control = rank.worker._control
    [number] = [number for number, transfer in control._transfers.items() if transfer.ticket.ticket_id == ticket_id]
    return control._writer(number)


@pytest.mark.parametrize("pair", [{}], indirect=True, ids=["private"])
def test_another_engine_cannot_take_a_ticket_back(pair: Pair) -> None:
    contacts: queue.Queue[ClientConnection] = queue.Queue()

    def handle(message: Message, peer: ClientConnection) -> Message:
        contacts.put(peer)
        return Problem("I am busy with other things")

    requests = prompts(pair, [96, 64])
    meddled, elsewhere = requests
    tickets = pair.announce([meddled])
    meddler = SideChannelServer(HOST, 0, handle)
    try:
        port = int(meddler.endpoint.rpartition(":")[2])
        decoy = msgspec.structs.replace(pair.ticket(elsewhere), remote_engine_id="meddler", remote_port=port)
        step = PrefillStep(tickets=tickets | {elsewhere.request_id: decoy})
        pair.each(pair.p_ranks, "step", step, {p.request_id: p for p in requests})
        ticket_id = tickets[meddled.request_id].ticket_id
        writers = pair.each(pair.p_ranks, "do", writer_of, ticket_id)  # not even they are any use to the meddler
        for _ in pair.p_ranks:
            peer = contacts.get(timeout=PATIENCE_S)
            for writer in writers:
                peer.send(Revoke(ticket_id, writer, "the test meddles"))
        prefill(pair, requests, {})
        assert pair.wait_arrivals(1) == ({"request-0"}, {})
        failed = pair.wait_sent(2)
    finally:
        meddler.close()
    assert failed.keys() == {"request-1"}
    assert "busy with other things" in failed["request-1"]
    assert pair.differences([meddled]) == []
