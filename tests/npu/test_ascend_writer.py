# SPDX-License-Identifier: Apache-2.0
"""Writes over protocol `ascend` on Mooncake's wheels.

Nothing queues inside Mooncake. No byte of a write that has ended arrives later. Peers that hang do not slow others
down.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cann_on_host
from harness.waiting import wait_until
from mooncake_wheels import WHEELS, Answering, python_path

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

ONE_BY_ONE = "0.3.11.post1"
"""This wheel holds up all writes while it connects to a peer."""
TIMEOUT_S = 1
TIMEOUTS = {"ASCEND_CONNECT_TIMEOUT": f"{1000 * TIMEOUT_S}", "ASCEND_TRANSFER_TIMEOUT": f"{1000 * TIMEOUT_S}"}
SLOTS, SLOTS_ONE_BY_ONE = (16, 8), (4, 1)
"""In all, and for peers that have not proved to answer."""


class Process(Answering):
    """A program that answers commands, with one of Mooncake's wheels."""

    def __init__(self, program: str, wheel: str) -> None:
        self.wheel = wheel
        path = python_path(wheel, *sys.path)
        super().__init__(program, {**TIMEOUTS, "CANN_ON_HOST": "1", "PYTHONPATH": path})

    def link(self, fault: str) -> Any:
        return cann_on_host.link_fault(self.process.pid, fault)


class Ranks:
    """A prefill rank, a decode rank, and a process with 24 more. A write to the decode rank has arrived."""

    def __init__(self, wheel: str) -> None:
        self.wheel = wheel
        self.prefill = Process("transfer_peer.py", wheel)
        self.decode = Process("mooncake_peer.py", wheel)
        self.others = Process("mooncake_peer.py", wheel)
        self.prefill.send("start", "ascend", 1)  # decode has the first NPU, and there are no transfers inside one
        _, self.session, self.address, _ = self.decode.ask("start")
        self.sessions = [self.others.ask("start")[1:3]] + [self.others.ask("more") for _ in range(23)]
        self.prefill.answer()
        assert self.write("first")[0] == "arrived"

    def write(self, name: str, nbytes: int = 4, pieces: int = 1) -> list[Any]:
        self.prefill.ask("begin", name, self.session, self.address, nbytes, pieces)
        return list(self.prefill.ask("wait", name))

    def write_to_others(self, name: str) -> None:
        for n, (session, address) in enumerate(self.sessions):
            self.prefill.ask("begin", f"{name} {n}", session, address, 4)

    def outcomes(self, name: str) -> list[str]:
        return [self.prefill.ask("wait", f"{name} {n}")[0] for n in range(len(self.sessions))]

    def asked(self, name: str) -> list[str]:
        return [asked for asked in self.prefill.ask("asked") if asked.startswith(name)]

    def transfers(self) -> int:
        """Returns the number of CANN's transfer calls so far."""
        return int(self.prefill.ask("transfers"))

    def end(self) -> None:
        for each in (self.prefill, self.decode, self.others):
            each.end()


@pytest.fixture(scope="module", params=WHEELS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANN_ON_HOST_LINKS", str(tmp_path_factory.mktemp("links")))
        ranks = Ranks(request.param)
        yield ranks
        ranks.end()


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_write_is_over_when_its_bytes_are_there(ranks: Ranks, pieces: int) -> None:
    ranks.prefill.ask("put", "abcdefgh" * 3)
    with ranks.decode.link("slow 300"):
        outcome, seconds, _, cpu_seconds = ranks.write(f"slow {pieces}", 8, pieces)
    assert outcome == "arrived"
    assert seconds >= 0.3
    assert cpu_seconds < 0.1, "whoever waits sleeps"
    assert ranks.decode.ask("get", 0, 8 * pieces) == "abcdefgh" * pieces


@pytest.mark.parametrize("pieces", [1, 3])
def test_nothing_of_a_write_that_has_failed_arrives(ranks: Ranks, pieces: int) -> None:
    ranks.prefill.ask("put", "LATE" * 3)
    with ranks.decode.link("hang"):
        outcome, seconds, may_arrive, _ = ranks.write(f"lost {pieces}", 4, pieces)
    assert "failed after" in outcome
    assert not may_arrive
    assert seconds >= 2 * TIMEOUT_S, "both of Mooncake's attempts"
    time.sleep(1.0)
    assert "L" not in ranks.decode.ask("get", 0, 12)
    ranks.prefill.ask("put", "well" * 3)
    assert ranks.write(f"again {pieces}", 4, pieces)[0] == "arrived"


def test_links_of_the_comm_engine_may_be_lost_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after "AICPU launch failed": then not even writes to others arrive, and no link's repair helps."""
    monkeypatch.setenv("CANN_ON_HOST_LINKS", str(tmp_path))
    ranks = Ranks(ONE_BY_ONE)
    try:
        with ranks.others.link("lost"):
            ranks.prefill.ask("begin", "lost", *ranks.sessions[0], 4)
            assert "failed after" in ranks.prefill.ask("wait", "lost")[0]
        assert "failed after" in ranks.write("to another")[0]
    finally:
        ranks.end()


def test_one_batch_to_a_peer_at_a_time(ranks: Ranks) -> None:
    """CANN would send two one by one, and time the second one only from the first one's end."""
    with ranks.decode.link("slow 400"):
        ranks.prefill.ask("begin", "turn 1", ranks.session, ranks.address, 4)
        time.sleep(0.1)
        ranks.prefill.ask("begin", "turn 2", ranks.session, ranks.address, 4)
        time.sleep(0.1)
        assert ranks.asked("turn") == ["turn 1"]
        assert ranks.prefill.ask("wait", "turn 1")[0] == "arrived"
        time.sleep(0.1)
        assert ranks.asked("turn") == ["turn 1", "turn 2"]
        assert ranks.prefill.ask("wait", "turn 2")[0] == "arrived"


def test_without_a_lease_nothing_begins(ranks: Ranks) -> None:
    before = ranks.transfers()
    ranks.prefill.ask("begin", "refused", ranks.session, ranks.address, 4, 1, False)
    assert "the lease ended" in ranks.prefill.ask("wait", "refused")[0]
    assert ranks.transfers() == before
    assert ranks.write("allowed")[0] == "arrived", "its slot was given back"


def test_silent_peers_cost_a_healthy_one_nothing(ranks: Ranks) -> None:
    alone = sorted(ranks.prefill.ask("stream", ranks.session, ranks.address, 0.5))
    with ranks.others.link("hang"):
        ranks.write_to_others("beside")
        beside = sorted(ranks.prefill.ask("stream", ranks.session, ranks.address, 1.5))
        ranks.outcomes("beside")
    if ranks.wheel == ONE_BY_ONE:
        assert beside[-1] < 7 * TIMEOUT_S, "it waits for one connection at a time"
    else:
        assert beside[len(beside) // 2] < 10 * alone[len(alone) // 2]
        assert beside[-1] < 0.5


@pytest.mark.parametrize("proven", [False, True])
def test_nothing_queues_inside_mooncake(ranks: Ranks, proven: bool) -> None:
    """Of 24 writes to silent peers, CANN has exactly those that have asked for their lease."""
    ranks.prefill.ask("put", "WELL")
    if proven:
        for n, (session, address) in enumerate(ranks.sessions):
            ranks.prefill.ask("begin", f"well {n}", session, address, 4)
            assert ranks.prefill.ask("wait", f"well {n}")[0] == "arrived"
    size, for_unproven = SLOTS_ONE_BY_ONE if ranks.wheel == ONE_BY_ONE else SLOTS
    bound = size if proven else for_unproven
    ranks.prefill.ask("put", "~~~~")
    before, name = ranks.transfers(), f"proven {proven}"
    with ranks.others.link("hang"):
        ranks.write_to_others(name)
        counts = proven or ranks.wheel != ONE_BY_ONE  # which connects before it transfers
        wait_until(
            lambda: len(ranks.asked(name)) >= bound and (not counts or ranks.transfers() - before >= bound),
            10,
        )
        time.sleep(0.2)  # in which no further one begins
        assert len(ranks.asked(name)) == bound
        if counts:
            assert ranks.transfers() - before == bound
        outcomes = ranks.outcomes(name)
    assert all("failed after" in outcome or "to make room" in outcome for outcome in outcomes)
    assert sum("failed after" in outcome for outcome in outcomes) >= bound
    time.sleep(1.0)
    assert not any("~" in ranks.others.ask("get_at", address, 4) for _, address in ranks.sessions), "it arrived late"
