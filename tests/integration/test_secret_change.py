# SPDX-License-Identifier: Apache-2.0
"""The cluster's secret is changed while the side channel is in use: [old], [old, new], [new, old], [new]."""

import itertools
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection

import pytest

from harness.channels import HOST, PATIENCE_S, Answer, ask, assert_works, echo
from harness.waiting import wait_until
from vllm_ascend_pd.core.protocol import Describe, GrantRefused, Message
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.transport.loop import TICK_S
from vllm_ascend_pd.transport.secret_files import new_secret
from vllm_ascend_pd.transport.side_channel import (
    ClientConnection,
    SideChannelClient,
    SideChannelError,
    SideChannelServer,
)

OLD, NEW, OTHER = (new_secret().strip() for _ in range(3))
STEPS = ([OLD], [OLD, NEW], [NEW, OLD], [NEW])
SHORT_S = 1.5
"""For what is never answered; what is, takes milliseconds."""
LONG_S = 600.0
"""The timeout of a request that is answered well before: it is not sent again because of it."""


def names(lines: list[bytes]) -> str:
    return "+".join({OLD: "old", NEW: "new", OTHER: "other"}[line] for line in lines)


@contextmanager
def serving(lines: list[bytes] | None, port: int = 0) -> Iterator[SideChannelServer]:
    with closing(SideChannelServer(HOST, port, echo, secret=lines and Secret(lines))) as server:
        yield server


@contextmanager
def asking(lines: list[bytes] | None) -> Iterator[SideChannelClient]:
    with closing(SideChannelClient(secret=lines and Secret(lines))) as client:
        yield client


def port_of(server: SideChannelServer) -> int:
    return int(server.endpoint.rpartition(":")[2])


SAME = [(step, step) for step in STEPS]
NEIGHBOURS = [*itertools.pairwise(STEPS), *((after, before) for before, after in itertools.pairwise(STEPS))]


@pytest.mark.parametrize(("client", "server"), [*SAME, *NEIGHBOURS], ids=names)
def test_neighbours_talk(client: list[bytes], server: list[bytes]) -> None:
    with serving(server) as listener, asking(client) as asker:
        for text in map(str, range(20)):
            assert ask(asker, listener.endpoint, text, timeout_s=LONG_S) == GrantRefused(text, retry=False)
        assert (listener.rejected, listener.refused) == (0, 0)


@pytest.mark.parametrize("server", [[OLD], [NEW]], ids=names)
def test_a_server_gets_a_request_once_however_long_it_takes(server: list[bytes]) -> None:
    got = []

    def handle(message: Message, peer: ClientConnection) -> Message:
        got.append(message)
        time.sleep(10 * TICK_S)
        return echo(message, peer)

    with closing(SideChannelServer(HOST, 0, handle, secret=Secret(server))) as listener, asking([OLD, NEW]) as asker:
        assert_works(asker, listener)
        assert_works(asker, listener)
        assert len(got) == 2


STRANGERS = [
    *(([OLD], [NEW]), ([NEW], [OLD]), ([OLD], [NEW, OLD]), ([NEW], [OLD, NEW])),
    *(([OLD, NEW], [OTHER]), ([OTHER], [OLD, NEW]), ([OLD, NEW], None), (None, [OLD, NEW])),
]


@pytest.mark.parametrize(("client", "server"), STRANGERS, ids=lambda lines: names(lines or []) or "none")
def test_strangers_get_nothing(client: list[bytes] | None, server: list[bytes] | None) -> None:
    with serving(server) as listener, asking(client) as asker:
        assert isinstance(ask(asker, listener.endpoint, timeout_s=SHORT_S), SideChannelError)
        assert listener.rejected == 0, "not one message has come"
        with asking(server) as friend:
            assert_works(friend, listener)


def answers_of(client: SideChannelClient, endpoint: str, texts: list[str]) -> "queue.Queue[Answer]":
    answers: queue.Queue[Answer] = queue.Queue()
    for text in texts:
        client.request(endpoint, Describe(text), LONG_S, answers.put)
    return answers


@pytest.mark.parametrize(("before", "after"), [([OLD, NEW], [NEW, OLD]), ([NEW, OLD], [OLD, NEW])], ids=names)
@pytest.mark.parametrize("client", [[OLD, NEW], [NEW, OLD]], ids=names)
def test_a_server_that_comes_back_with_the_other_secret_in_use_is_found_again(
    client: list[bytes], before: list[bytes], after: list[bytes]
) -> None:
    """What was asked while it was away is answered, without a timeout. A connection at rest finds it, too."""
    with asking(client) as asker:
        with serving(before) as listener:
            port = port_of(listener)
            assert_works(asker, listener)
        texts = [str(number) for number in range(100)]
        answers = answers_of(asker, listener.endpoint, texts)
        with serving(after, port) as listener:
            got = [answers.get(timeout=PATIENCE_S) for _ in texts]
            assert got == [GrantRefused(text, retry=False) for text in texts], "in order, and each once"
            asker.rest(listener.endpoint)
        with serving(before, port) as listener:
            assert ask(asker, listener.endpoint, "rested", timeout_s=LONG_S) == GrantRefused("rested", retry=False)


def _serve_without_an_answer(pipe: Connection, lines: list[bytes]) -> None:
    """A server that takes requests and never answers one."""

    def handle(message: Message, peer: ClientConnection) -> Message:
        assert isinstance(message, Describe)
        pipe.send(message.engine_id)
        threading.Event().wait()
        raise AssertionError

    pipe.send(SideChannelServer(HOST, 0, handle, secret=Secret(lines)).endpoint)
    threading.Event().wait()


def test_a_request_that_a_killed_server_had_taken_is_sent_again() -> None:
    ours, theirs = multiprocessing.Pipe()
    spawned = multiprocessing.get_context("spawn")
    process = spawned.Process(target=_serve_without_an_answer, args=(theirs, [OLD, NEW]), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        endpoint = ours.recv()
        with asking([OLD, NEW]) as asker:
            answers = answers_of(asker, endpoint, ["taken"])
            assert ours.poll(PATIENCE_S)
            assert ours.recv() == "taken"
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            with serving([NEW, OLD], int(endpoint.rpartition(":")[2])):
                assert answers.get(timeout=PATIENCE_S) == GrantRefused("taken", retry=False)
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("client", [[NEW], [OLD, NEW]], ids=names)
@pytest.mark.parametrize("before", [None, [OTHER]], ids=["none", "other"])
def test_a_server_that_comes_back_with_the_right_secret_is_found(client: list[bytes], before: list[bytes]) -> None:
    """libzmq itself does not connect again after such a failure."""
    with asking(client) as asker:
        with serving(before) as listener:
            port = port_of(listener)
            answers = answers_of(asker, listener.endpoint, ["x"])
            assert isinstance(ask(asker, listener.endpoint, "y", timeout_s=0.5), SideChannelError)
        with serving([NEW], port):
            assert answers.get(timeout=PATIENCE_S) == GrantRefused("x", retry=False)


@pytest.mark.parametrize("client", [[NEW], [OLD, NEW]], ids=names)
def test_a_server_without_the_secret_is_asked_a_few_times_a_second(client: list[bytes]) -> None:
    accepted = 0

    def hang_up_on_all(listener: socket.socket) -> None:
        nonlocal accepted
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            accepted += 1
            connection.close()

    with socket.create_server((HOST, 0)) as listener, asking(client) as asker:
        threading.Thread(target=hang_up_on_all, args=(listener,), daemon=True).start()
        endpoint = f"tcp://{HOST}:{listener.getsockname()[1]}"
        assert isinstance(ask(asker, endpoint, timeout_s=2.0), SideChannelError)
        assert 2 <= accepted <= 50, "without a pause these are thousands"
        listener.shutdown(socket.SHUT_RDWR)


def test_nothing_is_left_of_a_connection_that_is_forgotten() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with serving([NEW]) as listener, asking([OLD, NEW]) as asker:
        assert_works(asker, listener)
        one = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            asker.forget(listener.endpoint)
            assert_works(asker, listener)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= one, PATIENCE_S)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, PATIENCE_S)
