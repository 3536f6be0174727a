# SPDX-License-Identifier: Apache-2.0
"""Mooncake's wheels for NPUs, unmodified, on the emulated CANN libraries: protocol `ascend`, and how it fails.

The facts that the product relies on are shown here on the wheels themselves.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cann_on_host
from mooncake_wheels import WHEELS, Answering, python_path

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

TIMEOUT_MS = 1000
PATIENT_S = 20
PATIENT = dict.fromkeys(("ASCEND_CONNECT_TIMEOUT", "ASCEND_TRANSFER_TIMEOUT"), str(1000 * PATIENT_S))
"""Where no time limit shall end a write, however busy the machine is."""


class Peer(Answering):
    def __init__(self, wheel: str, env: dict[str, str]) -> None:
        self.wheel = wheel
        own = {
            "CANN_ON_HOST": "",  # the program loads the libraries itself
            "PYTHONPATH": python_path(wheel),
            "ASCEND_CONNECT_TIMEOUT": str(TIMEOUT_MS),
            "ASCEND_TRANSFER_TIMEOUT": str(TIMEOUT_MS),
            "MC_TRANSFER_TIMEOUT": "3600",
        }
        super().__init__("mooncake_peer.py", own | env)


@pytest.fixture(params=WHEELS)
def peer(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Peer]]:
    monkeypatch.setenv("CANN_ON_HOST_LINKS", str(tmp_path))
    started: list[Peer] = []

    def start(**env: str) -> Peer:
        npu = {"ASCEND_RT_VISIBLE_DEVICES": str(len(started))}
        started.append(Peer(request.param, npu | env))
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_both_wheels_are_here() -> None:
    assert WHEELS == ["0.3.11.post1", "0.3.13.post1"]


@pytest.mark.parametrize(("npu", "code"), [("0", -1), ("1", 1)])
def test_engines_on_one_npu_do_not_connect(peer: Callable[..., Peer], npu: str, code: int) -> None:
    decode, prefill = (peer(ASCEND_RT_VISIBLE_DEVICES=each, CANN_ON_HOST_CLIENT_SERVER="0") for each in ("0", npu))
    _, session, address, _ = decode.ask("start")
    prefill.ask("start")
    assert prefill.ask("write", session, address, 4, 1)[0] == code


def test_a_silent_peer_ends_a_batch_after_both_of_mooncakes_attempts(peer: Callable[..., Peer]) -> None:
    decode, prefill = peer(), peer()
    _, session, address, pid = decode.ask("start")
    prefill.ask("start")
    prefill.ask("put", "late")
    with cann_on_host.link_fault(pid, "hang"):
        code, seconds = prefill.ask("write", session, address, 4, 1)
    assert code == -1
    assert 2 * TIMEOUT_MS / 1000 <= seconds < 8
    assert decode.ask("get", 0, 4) != "late"


@pytest.mark.parametrize("auto_connect", ["0", "1", ""])
def test_how_long_connecting_takes_depends_on_auto_connect(peer: Callable[..., Peer], auto_connect: str) -> None:
    """Only without it does ASCEND_CONNECT_TIMEOUT count. 0.3.13 has it by default, whatever CANN says, 0.3.11 if told
    to."""
    env = {"ASCEND_CONNECT_TIMEOUT": "200", "CANN_ON_HOST_AUTO_CONNECT": "0"} | (
        {"ASCEND_AUTO_CONNECT": auto_connect} if auto_connect else {}
    )
    decode, prefill = peer(**env), peer(**env)
    _, session, address, pid = decode.ask("start")
    prefill.ask("start")
    with cann_on_host.link_fault(pid, "hang"):
        code, seconds = prefill.ask("write", session, address, 4, 1)
    assert code == -1
    if auto_connect == "1" or (not auto_connect and prefill.wheel != "0.3.11.post1"):
        assert seconds >= 2 * TIMEOUT_MS / 1000
    else:
        assert 0.3 <= seconds < TIMEOUT_MS / 1000
    assert prefill.ask("write", session, address, 4, 1)[0] == 1, "it answers again"


def test_a_batch_to_a_link_that_hangs_arrives_if_it_comes_back_in_time(peer: Callable[..., Peer]) -> None:
    decode, prefill = peer(), peer(**PATIENT)
    _, session, address, pid = decode.ask("start")
    prefill.ask("start")
    assert prefill.ask("write", session, address, 4, 1)[0] == 1
    prefill.ask("put", "late")
    with cann_on_host.link_fault(pid, "hang"):
        prefill.send("write", session, address, 4, 1)
        time.sleep(0.3)
        assert decode.ask("get", 0, 4) != "late"
    assert prefill.answer()[0] == 1
    assert decode.ask("get", 0, 4) == "late"


def test_a_link_that_breaks_ends_a_batch_under_way(peer: Callable[..., Peer]) -> None:
    decode, prefill = peer(), peer(**PATIENT)
    _, session, address, pid = decode.ask("start")
    prefill.ask("start")
    assert prefill.ask("write", session, address, 4, 1)[0] == 1
    with cann_on_host.link_fault(pid, "hang"):
        prefill.send("write", session, address, 4, 1)
        time.sleep(0.3)
        with cann_on_host.link_fault(pid, "down"):
            code, seconds = prefill.answer()
    assert code == -1
    assert seconds < PATIENT_S


def test_a_process_that_is_stopped_is_written_to(peer: Callable[..., Peer]) -> None:
    """As its network goes on without it."""
    decode, prefill = peer(), peer()
    _, session, address, pid = decode.ask("start")
    prefill.ask("start")
    assert prefill.ask("write", session, address, 4, 1)[0] == 1
    prefill.ask("put", "soon")
    os.kill(pid, signal.SIGSTOP)
    assert prefill.ask("write", session, address, 4, 1)[0] == 1
    os.kill(pid, signal.SIGCONT)
    assert decode.ask("get", 0, 4) == "soon"
