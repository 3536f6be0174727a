# SPDX-License-Identifier: Apache-2.0
"""Attacks a TCP port in one way, in a process of its own. `python attackers.py KIND PORT COUNT SEED`.

Prints `ready` once the attack runs, goes on until its standard input ends, then prints how often it attacked (`done
N`). It needs only Python, so its files, memory and interpreter are apart from those of the attacked process.
"""

import random
import resource
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
ROUTERS_GREETING_BYTES = 107
DESCRIBE = b"\x93\x01\x01\x82\xa4type\xa8Describe\xa9engine_id\xa8decode-0"
PATIENCE_S = 10.0
UNREAD_BYTES = 4096
"""Answers that wait in the kernel for who never reads. With the least it takes, 1, Linux 6.18 drops the other side's
acknowledgements too: one run in thirty stood still after 284 questions, with a window that it never saw open again."""

GREETINGS = [
    b"", b"\xff", GREETING[:10], GREETING[:11], GREETING[:63], b"\0" * 64, b"\xff" * 64,
    GREETING[:40] + b"\xff" * 24,
    GREETING.replace(b"NULL", b"CURV"), GREETING.replace(b"NULL\0", b"PLAIN"),
    GREETING.replace(b"\x7f\x03", b"\x7f\x09"),
    b"\xff" + b"\xff" * 8 + b"\x7f\x01\x05", b"\x01\x00", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    GREETING + b"\x04\xff" + b"x" * 255, GREETING + b"\x06" + b"\xff" * 8, GREETING + READY[:9],
    GREETING + READY.replace(b"DEALER", b"PUBSUB"), GREETING + b"\x00\x05hello",
    GREETING + READY + b"\x06" + b"\xff" * 8,
    GREETING + b"\x04\x1c\x05READY\x0bSocket-Type\xff\xff\xff\xffDEALER", GREETING + READY + READY,
]  # fmt: skip


def main() -> None:
    kind, port, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    done, told = 0, False
    for number in ATTACKS[kind](port, count, random.Random(seed), ended):
        done = number
        if not told:
            print("ready", flush=True)
            told = True
        if ended.is_set():
            break
    print("done", done, flush=True)
    sys.stdin.read()


def _connect(port: int, source: int = 1) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S, (f"127.0.0.{source}", 0))


def _send(connection: socket.socket, data: bytes) -> bool:
    """Sends. Returns False if the other side has closed the connection."""
    try:
        connection.sendall(data)
    except OSError:
        return False
    return True


def _until_closed(connection: socket.socket) -> None:
    """Reads for a moment, or until the other side closes."""
    connection.settimeout(0.2)
    try:
        while connection.recv(65536):
            pass
    except OSError:
        pass


def scan(port: int, count: int, chance: random.Random, ended: threading.Event) -> Iterator[int]:
    """Connects and closes at once, with or without a proper end."""
    for number in range(1, count + 1):
        with _connect(port, 1 + number % 200) as connection:
            if number % 2:  # with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        yield number


def greetings(port: int, count: int, chance: random.Random, ended: threading.Event) -> Iterator[int]:
    """Sends half ZMTP greetings, wrong ones, and noise."""
    for number in range(1, count + 1):
        data = GREETINGS[number % len(GREETINGS)]
        if number % 3 == 0:
            data = bytearray(GREETING + READY)
            for _ in range(3):
                data[chance.randrange(len(data))] = chance.randrange(256)
        elif number % 3 == 1:
            data = chance.randbytes(chance.randrange(300))
        with _connect(port) as connection:
            if _send(connection, data) and number % 50 == 0:
                _until_closed(connection)
        yield number


def flood(port: int, count: int, chance: random.Random, ended: threading.Event) -> Iterator[int]:
    """Holds as many connections as the other side allows, with half a greeting or nothing. Replaces those that end."""
    made = 0
    poll = select.epoll()
    held: dict[int, socket.socket] = {}
    while not ended.is_set():
        while len(held) < count and not ended.is_set():
            connection = socket.socket()
            connection.setblocking(False)
            connection.bind((f"127.0.0.{2 + made % 200}", 0))
            connection.connect_ex(("127.0.0.1", port))
            held[connection.fileno()] = connection
            poll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
            made += 1
            if made <= count:
                if made == count:
                    yield 1
            elif made % 100 == 0:
                break
        for fd, _ in poll.poll(0.05):
            poll.unregister(fd)
            held.pop(fd).close()
    yield made


def drip(port: int, count: int, chance: random.Random, ended: threading.Event) -> Iterator[int]:
    """Sends a byte now and then on many connections (slow loris). The bytes begin like ZMTP or like HTTP."""
    starts = [GREETING + READY, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 1000]
    held: list[tuple[socket.socket, int]] = []
    made = 0
    while not ended.is_set():
        while len(held) < count:
            held.append((_connect(port, 1 + made % 200), 0))
            made += 1
        yield made
        still = []
        for connection, sent in held:
            data = starts[made % 2]
            if _send(connection, data[sent % len(data)].to_bytes(1, "big")):
                still.append((connection, sent + 1))
            else:
                connection.close()
        held = still
        ended.wait(0.5)
    yield made


def announced(port: int, count: int, chance: random.Random, ended: threading.Event) -> Iterator[int]:
    """Sends ZMTP frames that announce 100 MB and more, and as much of their content as the other side reads."""
    for number in range(1, count + 1):
        with _connect(port) as connection:
            _send(connection, GREETING + READY + b"\x02" + struct.pack(">Q", (100 << 20) << number % 20))
            for _ in range(100):
                if not _send(connection, b"x" * (1 << 20)):
                    break
        yield number


def endless(port: int, count: int, chance: random.Random, ended: threading.Event) -> Iterator[int]:
    """Sends ZMTP messages of ever more parts, each short enough: `count` MB in each message, if they are read.

    Comes from an address that is not a peer's.
    """
    part = b"\x03" + struct.pack(">Q", 32768) + b"x" * 32768
    number = 0
    while not ended.is_set():
        with _connect(port, 2 + number % 200) as connection:
            _send(connection, GREETING + READY)
            for _ in range(count << 20 >> 15):
                if not _send(connection, part):
                    break
        number += 1
        yield number


def deaf(
    port: int, count: int, chance: random.Random, ended: threading.Event, question: bytes = DESCRIBE
) -> Iterator[int]:
    """Sends requests as fast as the other side reads them, and never reads an answer."""
    frame = b"\x02" + struct.pack(">Q", len(question)) + question
    unsent: dict[socket.socket, bytes] = {}
    for _ in range(count):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)
        connection.connect(("127.0.0.1", port))
        connection.sendall(GREETING + READY)
        connection.recv(ROUTERS_GREETING_BYTES, socket.MSG_WAITALL)  # libzmq hangs up on who does not wait for it
        connection.setblocking(False)
        unsent[connection] = b""
    made = 0
    while not ended.is_set():
        _, writable, _ = select.select([], unsent, [], 0.05)
        for connection in writable:
            if not unsent[connection]:
                unsent[connection] = frame * 100
                made += 100
            unsent[connection] = unsent[connection][connection.send(unsent[connection]) :]
        yield made


def deaf_babble(port: int, count: int, chance: random.Random, ended: threading.Event) -> Iterator[int]:
    """Like `deaf`, with requests that cannot be read. An error about them may quote a lot of them."""
    return deaf(port, count, chance, ended, b"\x93\x01\x01\x81\xa4type\xda\x03\xe8" + b"x" * 1000)


ATTACKS = {f.__name__: f for f in (scan, greetings, flood, drip, announced, endless, deaf, deaf_babble)}

if __name__ == "__main__":
    main()
