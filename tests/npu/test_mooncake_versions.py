# SPDX-License-Identifier: Apache-2.0
"""Mooncake's wheels for NPUs under this package's engine: which of them can write to each other, and what they refuse.

Every claim of `core/compatibility.py` is compared with what the wheels do, on the emulated CANN libraries.
"""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from harness.kv import GQA, Side
from harness.pool import long
from harness.ranks import MakePair, expect_delivery, expect_failure, prompts, run
from mooncake_wheels import FOLDER, Answering, python_path
from vllm_ascend_pd.core.compatibility import cannot_write
from vllm_ascend_pd.core.protocol import TransportInfo
from vllm_ascend_pd.tools.doctor.report import DoctorReport, Level

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

ROOT = Path(__file__).parents[2]
OLD, NEW = "0.3.11.post1", "0.3.13.post1"
BOTH = pytest.mark.parametrize("wheel", [OLD, NEW])


class Peer(Answering):
    """A process with an engine of `wheel`: a version, or a folder. Mooncake's log goes to `log`."""

    def __init__(self, wheel: str, log: Path, **settings: str) -> None:
        self.log = log
        own = {"MC_LOG_LEVEL": "INFO", "PYTHONPATH": python_path(wheel, str(ROOT))}
        super().__init__("transfer_peer.py", own | settings, log.open("w"))


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    started: list[Peer] = []

    def start(wheel: str, **settings: str) -> Peer:
        npu = {"ASCEND_RT_VISIBLE_DEVICES": str(len(started))}
        started.append(Peer(wheel, tmp_path / f"log-{len(started)}", **(npu | settings)))
        return started[-1]

    yield start
    for each in started:
        each.end()


KINDS: dict[str, tuple[str, dict[str, str], tuple[str, str, str]]] = {
    "HIXL's newer engine": (NEW, {}, ("ascend", "client/server", "AutoConnect")),
    "its older one": (NEW, {"CANN_ON_HOST_CLIENT_SERVER": "0"}, ("ascend", "comm", "AutoConnect")),
    "an older Mooncake": (OLD, {}, ("ascend", "comm", "Connect")),
    "told to be newer": (OLD, {"ASCEND_LOCAL_COMM_RES": '{"version":"1.3"}'}, ("ascend", "client/server", "Connect")),
    "TCP": (NEW, {}, ("tcp", "", "")),
}


def test_engines_know_what_they_are_and_write_where_they_say_they_can(peer: Callable[..., Peer]) -> None:
    peers = {name: peer(wheel, **settings) for name, (wheel, settings, _) in KINDS.items()}
    started = {name: peers[name].ask("start", protocol) for name, (_, _, (protocol, *_)) in KINDS.items()}
    transports = {}
    for name, (wheel, _, (protocol, *rest)) in KINDS.items():
        transports[name] = msgspec.convert(started[name]["transport"], TransportInfo)
        assert transports[name] == TransportInfo(protocol, f"mooncake-transfer-engine-npu {wheel}", *rest), name
        log = peers[name].log.read_text()
        assert bool(re.search(r"Set AutoConnect to: ?1", log)) == ("AutoConnect" in rest), (
            f"{name}: Mooncake's own word"
        )
        assert bool(re.search(r'LocalCommRes to.*"1\.3"', log)) == ("client/server" in rest), f"{name}: the same"
    for prefill, decode in itertools.permutations(KINDS, 2):
        text = f"{prefill} to {decode}"
        peers[prefill].ask("put", text)
        answer = peers[prefill].ask("write", started[decode]["session"], started[decode]["address"], len(text))
        assert (answer is None) == (cannot_write(transports[prefill], transports[decode]) is None), (text, answer)
        assert (peers[decode].ask("get", len(text)) == text) == (answer is None), text


def test_a_prefill_rank_refuses_a_decode_engine_of_another_kind(
    monkeypatch: pytest.MonkeyPatch, make_pair: MakePair
) -> None:
    side = Side(1, num_blocks=24, block_size=128)
    pair = make_pair(GQA, side, side, device="npu")
    before = prompts(pair, [130])
    run(pair, before)
    expect_delivery(pair, before)
    monkeypatch.setenv("CANN_ON_HOST_CLIENT_SERVER", "0")
    pair.restart_decode("another")
    run(pair, prompts(pair, [130], seed=5))
    expect_failure(
        pair,
        "prefill transfers by ascend with HIXL's client/server engine (mooncake-transfer-engine-npu",
        "decode by ascend with HIXL's comm engine (mooncake-transfer-engine-npu",
    )


def test_tcp_means_tcp_with_the_wheel_for_npus(peer: Callable[..., Peer]) -> None:
    decode, prefill = peer(NEW), peer(NEW)
    there, here = decode.ask("start", "tcp"), prefill.ask("start", "tcp")
    assert here["transport"] == there["transport"]
    assert msgspec.convert(here["transport"], TransportInfo) == TransportInfo(
        "tcp", f"mooncake-transfer-engine-npu {NEW}"
    )
    prefill.ask("put", "over TCP")
    assert prefill.ask("write", there["session"], there["address"], 8) is None
    assert decode.ask("get", 8) == "over TCP"
    assert prefill.ask("transfers") == 0, "and no NPU was set, without which `ascend` does not start"
    assert prefill.ask("setting", "MC_FORCE_TCP") is None, "an engine that starts later has a protocol of its own"


def test_a_wheel_without_tcp_refuses_tcp(peer: Callable[..., Peer]) -> None:
    reason = peer(OLD).ask("start", "tcp")["error"]
    assert f"mooncake-transfer-engine-npu {OLD} moves bytes only by 'ascend'" in reason
    assert "0.3.13.post1" in reason


@BOTH
def test_a_wheel_for_npus_refuses_rdma(peer: Callable[..., Peer], wheel: str) -> None:
    assert "has no 'rdma'" in peer(wheel).ask("start", "rdma")["error"]


@BOTH
def test_without_cann_the_error_says_so(peer: Callable[..., Peer], wheel: str) -> None:
    reason = peer(wheel, CANN_ON_HOST="").ask("start", "tcp")["error"]
    assert "Mooncake cannot be loaded (libascendcl.so: cannot open shared object file" in reason
    assert "set_env.sh" in reason


@BOTH
@pytest.mark.parametrize("library", ["libcurl.so.4", "libibverbs.so.1", "libnuma.so.1"])
def test_a_missing_system_library_is_named_with_its_package(
    peer: Callable[..., Peer], wheel: str, library: str, tmp_path: Path
) -> None:
    """The wheel as it is, but for the name of the one library that its transfer engine is linked against."""
    package = tmp_path / "mooncake"
    package.mkdir()
    gone = library[:-1] + "9"
    for path in (FOLDER / wheel / "mooncake").iterdir():
        content = path.read_bytes() if path.suffix == ".so" else b""
        if library.encode() in content:
            (package / path.name).write_bytes(content.replace(library.encode() + b"\0", gone.encode() + b"\0"))
        else:
            (package / path.name).symlink_to(path)
    reason = peer(str(tmp_path)).ask("start", "tcp")["error"]
    assert f"{gone}: cannot open shared object file" in reason
    assert f"apt-get install {library.partition('.')[0]}{library[-1]}" in reason


@pytest.mark.parametrize(
    ("wheel", "kind", "hixl", "loopback"),
    [long(NEW, "client/server", Level.NOTE, Level.OK), (OLD, "comm", Level.WARNING, Level.NOTE)],
)
def test_doctor_names_the_engine_and_finds_nothing_wrong_with_the_wheel(
    wheel: str, kind: str, hixl: Level, loopback: Level
) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "vllm_ascend_pd.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": python_path(wheel, str(ROOT))},
    )
    findings = {each.check: each for each in msgspec.json.decode(ran.stdout, type=DoctorReport).findings}
    assert findings["loading.mooncake"].level is Level.OK
    assert findings["config.protocol"].level is Level.OK
    assert findings["versions.hixl"].figures["kind"] == kind
    assert findings["versions.hixl"].level is hixl, "there is no driver here"
    assert findings["transfer.loopback"].level is loopback, findings["transfer.loopback"].found
