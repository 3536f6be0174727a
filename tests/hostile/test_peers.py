# SPDX-License-Identifier: Apache-2.0
"""Hostile messages that can be read, between real ranks: no other request suffers from them."""

import random
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from mutate import hostile_value, msgpack
from test_listeners import many

from harness.channels import plain_sockets
from harness.kv import GQA, Side
from harness.rank_programs import MODEL
from harness.ranks import Pair, prefill, prompts, run
from vllm_ascend_pd.core.protocol import (
    PROTOCOL_VERSION,
    EngineDescription,
    GrantRequest,
    Revoke,
    WriteReport,
    WriterId,
    decode,
    encode,
)
from vllm_ascend_pd.core.step import DecodeStep
from vllm_ascend_pd.core.topology import sharding

pytestmark = pytest.mark.timeout(3600)  # the long form

QUICK = {"grant_timeout_s": 4.0, "control_timeout_s": 2.0, "transfer_timeout_s": 60.0}


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(GQA, Side(2), Side(1), QUICK)
    yield made
    for rank in made.p_ranks + made.d_ranks:
        assert [line for line in rank.call("warnings") if "could not be served" in line or "callback" in line] == []
    assert made.close() == []


def works(pair: Pair) -> None:
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [40, 50], seed=100)
    run(pair, requests)
    received, failed = pair.wait_arrivals(2)
    assert (received, failed) == ({"request-0", "request-1"}, {})
    assert pair.differences(requests) == []
    assert pair.wait_sent(2) == {}


def test_a_decode_rank_asked_for_anything(pair: Pair, inputs: int, fuzz_seed: int) -> None:
    """It gets grant requests and reports for unknown tickets and for a known one, from engines of all shapes,
    repeatedly.
    """
    chance = random.Random(fuzz_seed)
    bait = prompts(pair, [64])
    tickets = pair.announce(bait)
    [ticket] = tickets.values()
    writer = WriterId("prefill", 0, 0)
    shapes = [sharding(2), sharding(1024), sharding(7), sharding(8, 2, 16), sharding(2, pcp=512)]
    made = answered = 0
    with plain_sockets() as make:
        dealer = make(zmq.DEALER, pair.descriptions[0].control)
        before: list[bytes] = []
        for number in range(many(inputs, 2000)):
            ticket_id = chance.choice((ticket.ticket_id, secrets.token_hex(16), "", "x" * 1000))
            grant = GrantRequest(
                ticket_id,
                chance.choice((ticket.digest(), "")),
                chance.choice((writer, WriterId("", -(2**63), 2**63 - 1), WriterId("prefill", 2**40, -1))),
                chance.choice(shapes),
                chance.choice(((), (0, 1, 2), (-1, 2**62), tuple(range(5000)), (0,) * 100)),
                chance.choice((0.0, 5.0, 3600.0)),
                chance.choice(("", "a draft")),
            )
            report = WriteReport(
                ticket_id,
                grant.writer,
                chance.choice((None, "", "x" * 10_000)),
                chance.choice((0, 2**63 - 1)),
            )
            message = hostile_value(chance, msgspec.to_builtins(chance.choice((grant, report))))
            frame = msgpack([PROTOCOL_VERSION, number + 1, message])
            if before and number % 10 == 0:
                frame = chance.choice(before)  # a replay
            before = [*before[-20:], frame]
            if len(frame) > 60_000:
                continue
            dealer.send(frame)
            made += 1
            if made % 100 == 0:
                answered += sum(1 for _ in range(100) if decode(dealer.recv()))
    assert answered >= made - 100
    pair.each(pair.d_ranks, "step", DecodeStep(cancelled={ticket.ticket_id: "that was all"}))
    _, failed = pair.wait_arrivals(1, timeout_s=90)
    assert failed.keys() == {"request-0"}
    works(pair)


NOBODY = WriterId("nobody", 0, 0)
UNASKED = (
    b"",
    b"\xc1" * 100,
    encode(0, Revoke("0" * 32, NOBODY, "x" * 1000)),
    encode(2**60, Revoke("", NOBODY, "")),
)


@contextmanager
def hostile_engine(descriptions: list[bytes]) -> Iterator[int]:
    """Runs a decode engine that describes itself as one of `descriptions` after the other. It sends messages that
    nobody asked for, and answers nothing else.
    """
    with plain_sockets() as make:
        router = make(zmq.ROUTER)
        router.setsockopt(zmq.RCVTIMEO, 100)
        ended = threading.Event()

        def answer() -> None:
            number = 0
            while not ended.is_set():
                try:
                    peer, frame = router.recv_multipart()
                except zmq.Again:
                    continue
                seq, _ = decode(frame)
                for unasked in UNASKED:
                    for _ in range(100):
                        router.send_multipart([peer, unasked])
                router.send_multipart([peer, msgpack([PROTOCOL_VERSION, seq, msgspec.Raw(descriptions[number])])])
                number = (number + 1) % len(descriptions)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            yield int(endpoint.rstrip(b"\0").rpartition(b":")[2])
        finally:
            ended.set()
            thread.join()


ABSURD = [
    {"tp": 0}, {"tp": -1}, {"tp": 2**40}, {"tp": 2**31 - 1, "dcp": 2**31 - 1}, {"pp": 0}, {"pp": 2**62}, {"dcp": 7},
    {"interleave": 2**31 - 1}, {"ranks": []}, {"engine_id": ""}, {"engine_id": "\n" * 100}, {"model": "x" * 100_000},
]  # fmt: skip


def test_a_prefill_engine_among_hostile_decode_engines(pair: Pair, fuzz_seed: int) -> None:
    chance = random.Random(fuzz_seed)
    right = msgspec.to_builtins(EngineDescription("hostile", MODEL, 1, 1, pair.descriptions))
    descriptions = [{**right, **fields} for fields in ABSURD] + [hostile_value(chance, right) for _ in range(40)]
    with hostile_engine([msgpack(each) for each in descriptions]) as port:
        for round_ in range(2):  # two ranks ask for each of the 15 requests: all descriptions are answers
            requests = prompts(pair, [20] * 15)
            tickets = {
                p.request_id: msgspec.structs.replace(
                    pair.ticket(p),
                    remote_engine_id=f"hostile-{round_}-{p.request_id}",
                    remote_port=port,
                )
                for p in requests
            }
            prefill(pair, requests, tickets)
            failed = pair.wait_sent(len(requests), timeout_s=90)
            assert failed.keys() == tickets.keys()
            assert pair.differences([]) == []
    works(pair)
