# SPDX-License-Identifier: Apache-2.0
"""Engines at IPv6 addresses, and one of each kind: real processes, real Mooncake over TCP. tests/e2e/test_ipv6.py has
prefill and decode at IPv6 addresses."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from harness.kv import GQA, Side
from harness.rank_hosts import start_afresh
from harness.ranks import MakePair, expect_failure, prompts, run

pytest.importorskip("mooncake.engine")

WRITE = """
import sys
import numpy
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import TransferError
from vllm_ascend_pd.transport.batches import TransferLimits
source, destination = numpy.arange(4096, dtype=numpy.uint8), numpy.zeros(4096, dtype=numpy.uint8)
try:
    ours, theirs = (TransferEngine(host, "tcp", TransferLimits(timeout_s=3)) for host in sys.argv[1:3])
    for engine, memory in ((ours, source), (theirs, destination)):
        engine.register([(memory.ctypes.data, 4096)])
    ours.write(sys.argv[3] if sys.argv[3:] else theirs.session, [source.ctypes.data], [destination.ctypes.data], [4096])
    print("session", theirs.session, "arrived", (source == destination).all())
except TransferError as error:
    print("refused", error)
"""


@pytest.fixture(autouse=True)
def own_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mooncake reads once in a process which kind of address it uses."""
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    start_afresh()
    yield
    start_afresh()


def written(*arguments: str) -> str:
    ran = subprocess.run([sys.executable, "-c", WRITE, *arguments], capture_output=True, text=True, timeout=60)
    return ran.stdout


@pytest.mark.parametrize("host", ["::1", "0:0:0:0:0:0:0:1", "127.0.0.1"])
def test_a_write_between_engines_of_one_kind_of_address(host: str) -> None:
    said = written(host, host)
    assert "arrived True" in said, said
    assert said.split()[1].startswith(f"[{host}]:" if ":" in host else f"{host}:")


def test_ipv6_that_is_set_for_an_ipv4_address_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_USE_IPV6", "1")
    said = written("127.0.0.1", "127.0.0.1")
    assert "refused" in said
    assert "MC_USE_IPV6 is set, and this host's address is IPv4" in said


@pytest.mark.parametrize(("host", "session"), [("::1", "127.0.0.1:15001"), ("127.0.0.1", "[::1]:15001")])
def test_a_peer_with_the_other_kind_of_address_is_refused_at_once(host: str, session: str) -> None:
    started = time.monotonic()
    said = written(host, host, session)
    ours, theirs = (6, 4) if host == "::1" else (4, 6)
    assert f"its address is IPv{theirs}, and this engine's is IPv{ours}: Mooncake uses one of them" in said
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("hosts", [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_prefill_and_decode_at_addresses_of_two_kinds_fail_with_both_named(
    hosts: tuple[str, str], make_pair: MakePair
) -> None:
    pair = make_pair(GQA, Side(1), Side(1), hosts=hosts)
    run(pair, prompts(pair, [40]))
    kinds = [6 if ":" in host else 4 for host in hosts]
    expect_failure(pair, f"its address is IPv{kinds[1]}, and this engine's is IPv{kinds[0]}")
