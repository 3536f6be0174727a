# SPDX-License-Identifier: Apache-2.0
"""How long a client or an engine can stop the proxy: the event loop's longest stop, and memory, under nasty input.

$ python benchmarks/proxy_stalls.py [--cases NAME ...] [--write] [--json]

Each case has a proxy of its own, with a prefill and a decode engine that compute nothing (helpers/stub_engine.py).
Client, proxy and engines are separate processes on 127.0.0.1. A stop is CPU time of the proxy's process between two
turns of its event loop (helpers/watched_proxy.py), so other work of the machine does not count. Meanwhile another
client sends a small request 10 times a second, and all must be answered. Exits with 1 if one is not, or if a bar is
missed and --check was given.
"""

import argparse
import asyncio
import json
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from helpers.report import line, options
from helpers.watched_proxy import NO_ANSWER, STOP
from proxy_overhead import HERE, StreamFailedError, cpu_seconds, process, stream

MAX_STOP_MS = 50.0
MIB = 2**20
BODY = 64 * MIB - 1024  # the largest that the proxy takes, or nearly
BUDGET_MIB = 512  # its memory for all bodies
SPARE_MIB = 64  # for everything else
PROBE_SECONDS = 0.1
WARM_UP = 20
OPENING = 32  # connections of unfinished requests at a time
PIECE = b"x" * 65536  # of these
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Stall:
    case: str
    answers: str  # how often each status
    stop_ms: float
    cpu_s: float
    sent_mib: float  # the largest body
    grown_mib: float  # the most above what the proxy had before
    others: int  # small requests of another client
    others_failed: int
    others_slowest_ms: float
    measure: str = "stall"

    @property
    def fits(self) -> bool:
        return self.grown_mib <= BUDGET_MIB + 2 * self.sent_mib + SPARE_MIB

    @property
    def holds(self) -> bool:
        return self.stop_ms <= MAX_STOP_MS and self.fits and not self.others_failed

    def row(self) -> str:
        return (
            f"{self.case:<44} {self.stop_ms:8.1f} ms {self.cpu_s:7.2f} s {self.grown_mib:+7.0f} MiB  "
            f"{self.others - self.others_failed}/{self.others} in {self.others_slowest_ms:.0f} ms  {self.answers}"
        )


@dataclass(frozen=True)
class Proxy:
    process: psutil.Process
    url: str
    port: int
    shared: mmap.mmap

    def stop_ms(self) -> float:
        """The longest since `forget`."""
        return float(STOP.unpack_from(self.shared)[0]) * 1000

    def forget(self) -> None:
        STOP.pack_into(self.shared, 0, 0.0)
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # the highest memory so far

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024


@contextmanager
def running(case: "Case") -> Iterator[Proxy]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stub = [sys.executable, str(HERE / "helpers" / "stub_engine.py")]
        of_decode = ["--metrics-mib", str(case.metrics_mib)]
        _, prefill = stack.enter_context(process([*stub, "prefill"], folder / "prefill"))
        _, decode = stack.enter_context(process([*stub, "decode", *of_decode], folder / "decode"))
        beats = folder / "beats"
        beats.write_bytes(bytes(STOP.size))
        with beats.open("r+b") as file:
            shared = mmap.mmap(file.fileno(), STOP.size)
        watched = [sys.executable, str(HERE / "helpers" / "watched_proxy.py"), str(beats), "--port", "0"]
        engines = ["--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"]
        proxy, port = stack.enter_context(process([*watched, *engines, *case.options], folder / "proxy"))
        yield Proxy(psutil.Process(proxy.pid), f"http://127.0.0.1:{port}", port, shared)


Answers = Counter[str]


async def posted(client: aiohttp.ClientSession, url: str, body: Any) -> Answers:
    """`body`: bytes, or JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        async with client.post(url, data=data, headers=HEADERS) as answer:
            await answer.read()
            return Counter([str(answer.status)])
    except aiohttp.ClientError:
        return Counter(["closed"])


async def several(client: aiohttp.ClientSession, url: str, body: bytes, number: int) -> Answers:
    return sum(await asyncio.gather(*(posted(client, url, body) for _ in range(number))), Counter())


async def unfinished(port: int, path: str, sizes: list[int], seconds: float) -> Answers:
    """Requests that say that more will come, and wait."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {{}}\r\n\r\n"
    begun = time.monotonic()

    async def one(size: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.format(size + 1024).encode())
            with suppress(ConnectionError):
                for at in range(0, size, len(PIECE)):
                    writer.write(PIECE if at else b'{"prompt":"'.ljust(len(PIECE), b"x"))
                    await writer.drain()
            async with asyncio.timeout(max(0.1, begun + seconds - time.monotonic())):
                return (await reader.read(12))[9:].decode() or "closed"
        except TimeoutError:
            return "waits"
        except ConnectionError:
            return "closed"
        finally:
            writer.close()

    tasks = []
    for number, size in enumerate(sizes):
        tasks.append(asyncio.create_task(one(size)))
        if number % OPENING == OPENING - 1:
            await asyncio.sleep(0.05)
    return Counter(await asyncio.gather(*tasks))


def filled(unit: bytes, before: bytes = b'{"prompt":[', after: bytes = b"1]}") -> bytes:
    return before + unit * ((BODY - len(before) - len(after)) // len(unit)) + after


def many_fields(fields: int) -> bytes:
    unknown = {f"f{number}": 0 for number in range(fields)}
    return json.dumps({"prompt": ["a"] * 4096, "max_tokens": 1, **unknown}, separators=(",", ":")).encode()


def chat(content: Any) -> bytes:
    return json.dumps({"model": "stub", "messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()


@dataclass(frozen=True)
class Case:
    name: str
    attack: Callable[[aiohttp.ClientSession, Proxy], Awaitable[Answers]]
    sent_mib: float
    options: tuple[str, ...] = ()
    metrics_mib: int = 0


def of_body(name: str, make: Callable[[], bytes], number: int = 1, path: str = "/v1/completions") -> Case:
    """A case that sends one body, several times at once."""

    async def attack(client: aiohttp.ClientSession, proxy: Proxy) -> Answers:
        return await several(client, proxy.url + path, await asyncio.to_thread(make), number)

    return Case(name, attack, len(make()) / MIB)


def of_unfinished(name: str, path: str, sizes: list[int], seconds: float) -> Case:
    async def attack(_: aiohttp.ClientSession, proxy: Proxy) -> Answers:
        return await unfinished(proxy.port, path, sizes, seconds)

    return Case(name, attack, max(sizes) / MIB)


async def watch(_: aiohttp.ClientSession, __: Proxy) -> Answers:
    """For engines and names that are nasty by themselves."""
    await asyncio.sleep(5)
    return Counter()


def cases() -> Iterator[Case]:
    yield of_body("4,096 prompts and 30,000 fields", lambda: many_fields(30_000))
    yield of_body("4,096 prompts and 150,000 fields", lambda: many_fields(150_000))
    yield of_body("64 MiB of numbers", lambda: filled(b"11,"))
    yield of_body("64 MiB of messages", lambda: filled(b"{},", b'{"messages":[', b"{}]}"), path=CHAT)
    yield of_body("64 MiB of nested lists", lambda: filled(b"[" * 500 + b"]" * 500 + b","))
    yield of_body("1.5 million token ids", lambda: filled_ids(1_500_000))
    yield of_body("64 MiB of text", lambda: filled(b"word ", b'{"max_tokens":1,"prompt":"', b'"}'))
    yield of_body("a picture of 64 MiB", lambda: chat_of_picture(BODY - 1024), path=CHAT)
    yield of_body("12 requests of 60 MiB at once", lambda: chat_of_picture(60 * MIB), number=12, path=CHAT)
    yield of_body("4,096 prompts with a field of 100 KB", lambda: shared_field(100_000))
    yield of_unfinished("40 tickets of 15 MiB that do not end", "/v1/metaserver", [15 * MIB] * 40, 30)
    yield of_unfinished("40 requests of 60 MiB that do not end", "/v1/completions", [60 * MIB] * 40, 30)
    yield of_unfinished("1,024 heads without a body", "/v1/completions", [0] * 1024, 5)
    yield Case("16 MiB of an engine's metrics", watch, 16, metrics_mib=16)
    hanging = [f"dns+http://{number}.{NO_ANSWER}:8000" for number in range(8)]
    yield Case("8 names whose lookups hang", watch, 0, tuple(word for url in hanging for word in ("--prefill", url)))


CHAT = "/v1/chat/completions"


def filled_ids(number: int) -> bytes:
    return json.dumps({"max_tokens": 1, "prompt": [100_000 + each for each in range(number)]}).encode()


def chat_of_picture(size: int) -> bytes:
    return chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}])


def shared_field(size: int) -> bytes:
    return json.dumps({"prompt": ["a"] * 4096, "max_tokens": 1, "user": "x" * size}).encode()


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=180))


async def probe(client: aiohttp.ClientSession, proxy: Proxy, took: list[float | None]) -> None:
    body = {"model": "stub", "prompt": "a", "max_tokens": 1, "stream": True}
    while True:
        begun = time.perf_counter()
        try:
            await stream(client, f"{proxy.url}/v1/completions", body)
            took.append((time.perf_counter() - begun) * 1000)
        except StreamFailedError as error:
            print(f"another client's request failed: {error}", file=sys.stderr)
            took.append(None)
        await asyncio.sleep(PROBE_SECONDS)


async def measure(case: Case) -> Stall:
    with running(case) as proxy:
        async with session() as client, session() as other:
            body = {"model": "stub", "prompt": "a", "max_tokens": 1, "stream": True}
            for _ in range(WARM_UP):
                await stream(other, f"{proxy.url}/v1/completions", body)
            took: list[float | None] = []
            probing = asyncio.create_task(probe(other, proxy, took))
            memory, cpu = proxy.process.memory_info().rss / MIB, cpu_seconds(proxy.process)
            proxy.forget()
            answers = await case.attack(client, proxy)
            await asyncio.sleep(2 * PROBE_SECONDS)
            stop_ms, grown = proxy.stop_ms(), proxy.peak_mib() - memory
            used = cpu_seconds(proxy.process) - cpu
            probing.cancel()
    found = [each for each in took if each is not None]
    said = ", ".join(f"{status} x {number}" for status, number in sorted(answers.items()))
    failed, slowest = len(took) - len(found), max(found, default=0.0)
    return Stall(case.name, said, stop_ms, used, case.sent_mib, grown, len(took), failed, slowest)


async def measured(names: list[str]) -> AsyncIterator[Stall]:
    for case in cases():
        if not names or any(name in case.name for name in names):
            yield await measure(case)


def results(stalls: list[Stall]) -> dict[str, Any]:
    """For benchmarks/results, from which docs/performance.md has its rows."""
    today = datetime.now(tz=UTC).date().isoformat()
    longest, most = max(stalls, key=lambda each: each.stop_ms), max(stalls, key=lambda each: each.grown_mib)
    failed, others = (
        sum(values) for values in zip(*((each.others_failed, each.others) for each in stalls), strict=True)
    )
    missed = [each.case for each in stalls if each.stop_ms > MAX_STOP_MS]
    state = f"**missed** at {', '.join(missed)}" if missed else True
    stop = f"{longest.stop_ms:.0f} ms ({longest.case})"
    cases = f"longest stop of its event loop under {len(stalls)} nasty inputs"
    grown, bar = f"{most.grown_mib:.0f} MiB ({most.case})", BUDGET_MIB + SPARE_MIB
    latest = [
        (cases, stop, f"{MAX_STOP_MS:.0f} ms", state),
        ("memory", grown, f"{bar} MiB and twice the body", all(each.fits for each in stalls)),
        ("small requests of others meanwhile", f"{failed} of {others} failed", "0", failed == 0),
    ]
    rows = [
        {
            "case": each.case,
            "stop": f"{each.stop_ms:.0f} ms",
            "cpu": f"{each.cpu_s:.1f} s",
            "memory": f"{each.grown_mib:.0f} MiB",
            "answers": each.answers,
            "holds": each.holds,
        }
        for each in stalls
    ]
    machine = f"{os.cpu_count()} virtual cores, load average {os.getloadavg()[0]:.1f} at the end"
    columns = {"case": "", "stop": "longest stop", "cpu": "CPU", "memory": "memory", "answers": "answers", "holds": ""}
    return {
        "question": "How long can a client or an engine stop the proxy?",
        "latest": [
            {"date": today, "case": case, "figure": figure, "bar": bar, "state": state}
            for case, figure, bar, state in latest
        ],
        "tables": {
            "all": {
                "date": today,
                "machine": machine,
                "command": "python benchmarks/proxy_stalls.py",
                "columns": columns,
                "rows": rows,
            }
        },
    }


async def show(args: argparse.Namespace) -> int:
    """The exit code."""
    stalls = []
    if not args.json:
        print(f"{'case':<44} {'longest stop':>11} {'CPU':>7} {'memory':>13}  others answered")
    async for stall in measured(args.cases):
        print(line(stall, stall.holds, args.json, load_average=os.getloadavg()[0]), flush=True)
        stalls.append(stall)
    if args.write:
        (HERE / "results" / "proxy_stalls.json").write_text(json.dumps(results(stalls), indent=2) + "\n")
    return int(any(stall.others_failed or (args.check and not stall.holds) for stall in stalls))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--cases", nargs="*", default=[], help="those whose names contain one of these words")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/proxy_stalls.json")
    args = parser.parse_args()
    if args.write and args.cases:
        parser.error("--write needs all cases")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # the stubs' too
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what was started, too
    sys.exit(asyncio.run(show(args)))


if __name__ == "__main__":
    main()
