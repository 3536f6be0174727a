# SPDX-License-Identifier: Apache-2.0
"""Lookups of host names, some of which get no answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import anyio
import pytest

from vllm_ascend_pd.transport import names
from vllm_ascend_pd.transport.names import HostNames

pytestmark = pytest.mark.anyio


class NameServer:
    """Takes the place of the system's lookups."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str] | Exception] = {}
        """A name without an entry gets no answer until `silent` is released."""
        self.asked: list[str] = []
        self.silent = threading.Event()

    def getaddrinfo(self, name: str, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        self.asked.append(name)
        if name not in self.answers:
            self.silent.wait(10)
        answer = self.answers.get(name, socket.gaierror(socket.EAI_AGAIN, "no answer"))
        if isinstance(answer, Exception):
            raise answer
        return [(0, 0, 0, "", (address, 0)) for address in answer]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.silent.set()


async def test_a_name_without_an_answer_delays_no_other_and_is_looked_up_once_at_a_time(dns: NameServer) -> None:
    dns.answers["good"] = ["10.0.0.1", "10.0.0.1", "::1"]
    lookups = HostNames()
    waiting = [asyncio.create_task(lookups.look_up("silent")) for _ in range(40)]
    await anyio.sleep(0)
    waiting[0].cancel()
    with anyio.fail_after(5):
        assert await lookups.addresses("good") == ["10.0.0.1", "::1"]
        assert await lookups.look_up("good") == ["10.0.0.1", "::1"]
    assert dns.asked.count("silent") == 1
    dns.answers["silent"] = ["10.0.0.2"]
    dns.silent.set()
    assert await asyncio.gather(*waiting[1:]) == 39 * [["10.0.0.2"]]


async def test_the_last_answer_is_used_until_another_comes(dns: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_FRESH_SECONDS", 0.0)
    again, gone = (socket.gaierror(code, "") for code in (socket.EAI_AGAIN, socket.EAI_NONAME))
    lookups = HostNames()

    async def settled() -> list[str]:
        """The addresses once the lookup that they start has ended."""
        found = await lookups.addresses("name")
        with anyio.fail_after(5):
            while lookups._lookups:
                await anyio.sleep(0.001)
        return found

    dns.answers["name"] = ["10.0.0.1"]
    assert await settled() == ["10.0.0.1"]
    dns.answers["name"] = again  # no name server answered
    assert [await settled(), await settled()] == 2 * [["10.0.0.1"]]
    dns.answers["name"] = ["10.0.0.2"]
    assert [await settled(), await settled()] == [["10.0.0.1"], ["10.0.0.2"]]
    dns.answers["name"] = gone
    assert await settled() == ["10.0.0.2"]
    with pytest.raises(socket.gaierror):
        await lookups.addresses("name")


async def test_a_fresh_answer_is_not_looked_up_again(dns: NameServer) -> None:
    dns.answers["name"] = ["10.0.0.1"]
    lookups = HostNames()
    for _ in range(3):
        assert await lookups.addresses("name") == ["10.0.0.1"]
    assert dns.asked == ["name"]
