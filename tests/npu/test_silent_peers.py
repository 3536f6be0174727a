# SPDX-License-Identifier: Apache-2.0
"""Row of the fault suite for NPUs: the links of 24 decode engines hang while prefill writes to them.

Their requests fail, their blocks get other owners, and nothing is written there when the links come back. A healthy
decode engine that prefill has written to before gets its KV meanwhile.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import cann_on_host
from harness.kv import Model, Side
from harness.ports import reserve_port
from harness.rank_hosts import Rank
from harness.rank_programs import HOST, MODEL
from harness.ranks import Pair, expect_delivery, prefill, prompts
from silent_decodes import Decodes
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.step import DecodeStep, Expect
from vllm_ascend_pd.decode.listener import DescriptionListener

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

BLOCK = 128
COUNT = 24
GQA = Model(layers=2, heads=4, widths=(32, 32))
SIDE = Side(1, num_blocks=64, block_size=BLOCK)
QUICK = {"write_timeout_s": 2.0, "lease_s": 5.0, "settle_timeout_s": 5.0, "grant_timeout_s": 60.0}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("HCCL_RDMA_TIMEOUT", "10")  # RoCE repairs nothing: a transfer has `write_timeout_s`
    monkeypatch.setenv("CANN_ON_HOST_LINKS", str(tmp_path))
    pair = Pair(GQA, SIDE, SIDE, QUICK, device="npu")
    for rank in pair.p_ranks + pair.d_ranks:
        rank.retire()
    yield pair
    pair.close()


def test_nothing_is_written_late_when_the_links_of_24_peers_hang(pair: Pair) -> None:
    silent = Rank(Decodes, GQA, SIDE, f"tcp://{HOST}:{reserve_port()}", QUICK, COUNT, device="npu")
    silent.receive()
    silent.retire()
    listeners = [
        DescriptionListener(EngineDescription(f"silent-{n}", MODEL, 1, 1, (description,), 1, 1), HOST, 0, None)
        for n, description in enumerate(silent.call("descriptions"))
    ]
    [earlier, *requests] = prompts(pair, [BLOCK] * (COUNT + 2))
    [healthy, *unlucky] = requests
    prefill(pair, [earlier], pair.announce([earlier]))
    expect_delivery(pair, [earlier])  # a peer that has got nothing yet shares slots with those that hang
    tickets = pair.announce([healthy])
    for n, (prompt, listener) in enumerate(zip(unlucky, listeners, strict=True)):
        port = int(listener.endpoint.rpartition(":")[2])
        ticket = msgspec.structs.replace(pair.ticket(prompt), remote_engine_id=f"silent-{n}", remote_port=port)
        tickets[prompt.request_id] = ticket
    expects = [
        DecodeStep([Expect(p.request_id, t.ticket_id, t.digest(), p.d_blocks, p.cached)])
        for p in unlucky
        for t in [tickets[p.request_id]]
    ]
    silent.call("steps", expects)
    with cann_on_host.link_fault(silent.call("process"), "hang"):
        prefill(pair, requests, tickets)
        assert pair.wait_arrivals(1, 60.0) == ({healthy.request_id}, {})
        assert pair.differences([earlier, healthy]) == []
        ended: set[str] = set()
        deadline = time.monotonic() + 120
        while len(ended) < COUNT:
            assert time.monotonic() < deadline, f"blocks are held: {len(ended)} of {COUNT} requests ended"
            cancelled = []
            for finished, _, failed in silent.call("arrivals"):
                ended |= finished
                cancelled.append(DecodeStep(cancelled=failed))
            silent.call("steps", cancelled)
            time.sleep(0.05)
        silent.call("reuse", unlucky)
    time.sleep(6.0)  # both of Mooncake's attempts, for whatever still waited for a thread
    assert silent.call("overwritten", unlucky) == 0
    assert len(pair.wait_sent(COUNT + 1, 60.0)) == COUNT
    for listener in listeners:
        listener.close(5.0)
    silent.stop()
    silent.stopped()
