# SPDX-License-Identifier: Apache-2.0
"""What ranks trace: real processes, real Mooncake over TCP, no model."""

import time
from pathlib import Path

import pytest

from harness.kv import GQA, Side, layer_name
from harness.ranks import Pair, expect_delivery, prompts, run
from harness.timelines import is_chrome_trace, nests_properly, prefill_ranks, traced_requests
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.tools.timeline.read import Recording

SHAPES = {
    "TP4_TO_TP2": (Side(4), Side(2), True),
    "PP2_TO_TP1": (Side(1, stages=(1, 2)), Side(1), False),
}


@pytest.mark.parametrize(("prefill", "decode", "regroups"), SHAPES.values(), ids=SHAPES.keys())
def test_every_layer_is_in_the_trace(tmp_path: Path, prefill: Side, decode: Side, regroups: bool) -> None:
    began = time.time()
    pair = Pair(GQA, prefill, decode, {"trace_dir": str(tmp_path)})
    made = prompts(pair, [1, 17, 64, 100])
    tickets = run(pair, made, chunk=40)
    expect_delivery(pair, made)
    assert pair.close() == []  # the traces' threads have ended, and written all
    recordings, requests = traced_requests(tmp_path, lambda all: len(all) == len(tickets))
    assert len(prefill_ranks(recordings)) == prefill.tp * prefill.pp
    assert [recording.problems for recording in recordings] == [()] * len(recordings)
    layers = {layer_name(n) for n in range(pair.model.layers)}
    for request in requests:
        nests_properly(recordings, request, layers, regroups)
        assert len(request.written) > 0
        assert request.failures == set()
    for recording in recordings:
        if recording.process.part == "decode rank":
            decode_traces_each_ticket(recording, tickets)
    for file in tmp_path.iterdir():
        is_chrome_trace(file, began)
        text = file.read_text()
        for ticket in tickets.values():
            assert ticket.request_id in text
            assert ticket.ticket_id not in text
            assert ticket.digest() not in text


def decode_traces_each_ticket(recording: Recording, tickets: dict[str, Ticket]) -> None:
    for name in tickets:
        seen = [(e.name, e.ph) for e in recording.events if e.cat == "receive" and e.args.request == name]
        assert seen == [("receive", "b"), ("receive", "e")]
