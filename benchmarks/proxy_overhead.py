# SPDX-License-Identifier: Apache-2.0
"""What the proxy costs: time to first token, CPU, and whether many streams at once get through.

$ python benchmarks/proxy_overhead.py [--requests 300] [--rate 100] [--seconds 10] [--streams 2000] [--json]

Client, proxy, a prefill and a decode engine are separate processes on 127.0.0.1. The engines compute nothing
(helpers/stub_engine.py). Two ways to the same decode engine take turns, one request at a time:

direct   the decode engine posts its ticket straight to the prefill engine, which answers at once
proxy    the decode engine posts its ticket to the proxy, which has the prefill engine run the prompt

`added` is proxy - direct: what the proxy adds to requests that need a ticket. Exits with 1 if a request failed, or if
a bar is missed and --check was given.
"""

import argparse
import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
import psutil
from helpers.report import line, options

HERE = Path(__file__).resolve().parent
MAX_ADDED_MS, MAX_CPU_SHARE = 3.0, 0.10
PROMPT = "the quick brown fox jumps over the lazy dog " * 12  # about 120 tokens
TOKENS, TOKEN_MS = 16, 5  # of a short stream
START_SECONDS = 30.0
WARM_UP = 20
OPENING = 64  # of the streams that are to be open at once: so many wait for their first token at a time
SPARE_REQUESTS = 1024  # --max-concurrent above the streams: a slow machine has more than it should in flight


@dataclass(frozen=True)
class FirstToken:
    """Milliseconds until the first token, at the median; `added_p90_ms` compares the 90th percentiles."""

    requests: int
    direct_ms: float
    proxy_ms: float
    added_ms: float
    added_p90_ms: float
    of_direct: float  # proxy_ms relative to direct_ms
    measure: str = "first token"

    @property
    def holds(self) -> bool:
        return self.added_ms <= MAX_ADDED_MS

    def row(self) -> str:
        return (
            f"first token  {self.added_ms:+.2f} ms (p90 {self.added_p90_ms:+.2f} ms), {self.of_direct:.1f} x direct: "
            f"direct {self.direct_ms:.2f} ms, proxy {self.proxy_ms:.2f} ms"
        )


@dataclass(frozen=True)
class Cpu:
    """Of the proxy's process, user and system time; `share` of one core."""

    rate: float  # requests a second that were served
    asked: float  # that should have been
    share: float
    ms_per_request: float
    failed: int
    measure: str = "cpu"

    @property
    def holds(self) -> bool:
        return self.failed == 0 and self.share <= MAX_CPU_SHARE and self.rate > 0.95 * self.asked

    def row(self) -> str:
        return (
            f"CPU          {self.share:.1%} of a core at {self.rate:.0f} requests/s: "
            f"{self.ms_per_request:.2f} ms each; {self.failed} failed"
        )


@dataclass(frozen=True)
class Streams:
    """All open at the same time: none gets its second token before all have had the first."""

    streams: int
    failed: int
    seconds: float
    cpu_seconds: float
    memory_mib: float  # of the proxy, with all open, above what it had before
    measure: str = "streams"

    @property
    def holds(self) -> bool:
        return self.failed == 0

    def row(self) -> str:
        return (
            f"streams      {self.streams} at once, {self.failed} failed: {self.seconds:.1f} s, "
            f"{self.cpu_seconds:.1f} s of CPU, {self.memory_mib:+.0f} MiB"
        )


Result = FirstToken | Cpu | Streams


class StreamFailedError(Exception):
    pass


@contextmanager
def process(command: list[str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yields it and its port: the last number on its first line that has one."""
    with log.open("wb") as output:
        # In this checkout, whose proxy `-m` takes then, wherever another is installed.
        running = subprocess.Popen(command, cwd=HERE.parent, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (
            line := next((text for text in log.read_text().splitlines() if "port" in text or text.isdigit()), "")
        ):
            if running.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[1:4]} did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield running, int(line.split("port ")[-1].split(";")[0])
    finally:
        running.terminate()
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


@dataclass(frozen=True)
class Setup:
    proxy: psutil.Process
    proxy_url: str
    decode_url: str
    prefill_url: str
    log: Path

    def request(self, way: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": "stub", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, **fields}
        if way == "direct":
            body["kv_transfer_params"] = {"metaserver": f"{self.prefill_url}/v1/metaserver"}
        url = self.proxy_url if way == "proxy" else self.decode_url
        return f"{url}/v1/completions", body


@contextmanager
def running(max_concurrent: int) -> Iterator[Setup]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stub = [sys.executable, str(HERE / "helpers" / "stub_engine.py")]
        stubs = [stack.enter_context(process([*stub, role], folder / role)) for role in ("prefill", "decode")]
        prefill, decode = (f"http://127.0.0.1:{port}" for _, port in stubs)
        command = [sys.executable, "-m", "vllm_ascend_pd.cli", "proxy", "--port", "0"]
        options = ["--prefill", prefill, "--decode", decode, "--max-concurrent", str(max_concurrent)]
        proxy, port = stack.enter_context(process([*command, *options], folder / "proxy"))
        yield Setup(psutil.Process(proxy.pid), f"http://127.0.0.1:{port}", decode, prefill, folder / "proxy")


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=180))


async def stream(
    client: aiohttp.ClientSession, url: str, body: dict[str, Any], on_first: Callable[[], None] = lambda: None
) -> float:
    """Seconds until the first token. Raises StreamFailedError unless all tokens and the end have come."""
    begun, first, received = time.perf_counter(), None, b""
    try:
        async with client.post(url, json=body, headers={"X-Request-Id": f"bench-{begun}"}) as answer:
            async for chunk in answer.content.iter_any():
                if first is None:
                    first = time.perf_counter()
                    on_first()
                received += chunk
            status = answer.status
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StreamFailedError(f"{type(error).__name__}: {error}") from error
    if (
        status != 200
        or first is None
        or received.count(b"data: ") != body["max_tokens"] + 1
        or b"[DONE]" not in received
    ):
        raise StreamFailedError(f"HTTP {status}: {received[:300]!r}")
    return first - begun


async def measure_first_token(setup: Setup, requests: int) -> FirstToken:
    ways = ("direct", "proxy")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    async with session() as client:
        for number in range(WARM_UP + requests):
            for turn in range(len(ways)):
                way = ways[(number + turn) % len(ways)]
                taken = await stream(client, *setup.request(way, max_tokens=1))
                if number >= WARM_UP:
                    seconds[way].append(taken * 1000)
    direct, proxy = (median(seconds[way]) for way in ways)
    p90 = {way: quantiles(seconds[way], n=10)[-1] for way in ways}
    added_p90 = p90["proxy"] - p90["direct"]
    return FirstToken(requests, direct, proxy, proxy - direct, added_p90, proxy / direct)


async def measure_cpu(setup: Setup, rate: float, seconds: float) -> Cpu:
    """Requests begin at fixed times, however long those before take."""
    number = round(rate * seconds)
    async with session() as client:
        await asyncio.gather(*(stream(client, *setup.request("proxy")) for _ in range(WARM_UP)))
        before, begun = cpu_seconds(setup.proxy), time.perf_counter()
        tasks = []
        for index in range(number):
            await asyncio.sleep(max(0.0, begun + index / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(stream(client, *setup.request("proxy", token_ms=TOKEN_MS))))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        elapsed = time.perf_counter() - begun
        used = cpu_seconds(setup.proxy) - before
    failed = report_failures(setup, ends)
    return Cpu((number - failed) / elapsed, rate, used / elapsed, used / number * 1000, failed)


async def measure_streams(setup: Setup, streams: int) -> Streams:
    memory, before, begun = setup.proxy.memory_info().rss, cpu_seconds(setup.proxy), time.perf_counter()
    async with session() as client:
        request = setup.request("proxy", wait_for_streams=streams)
        opening, tasks = asyncio.Semaphore(OPENING), []
        for _ in range(streams):
            await opening.acquire()
            tasks.append(asyncio.create_task(stream(client, *request, opening.release)))
            tasks[-1].add_done_callback(lambda task: opening.release() if task.exception() else None)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    failed = report_failures(setup, ends)
    grown = (setup.proxy.memory_info().rss - memory) / 2**20
    taken = time.perf_counter() - begun
    return Streams(streams, failed, taken, cpu_seconds(setup.proxy) - before, grown)


def report_failures(setup: Setup, ends: Sequence[float | BaseException]) -> int:
    failures = [end for end in ends if isinstance(end, BaseException)]
    if failures:
        print(f"a stream failed: {failures[0]}\nthe proxy's log:\n{setup.log.read_text()[-2000:]}", file=sys.stderr)
    return len(failures)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(setup: Setup, args: argparse.Namespace) -> AsyncIterator[Result]:
    yield await measure_first_token(setup, args.requests)
    yield await measure_cpu(setup, args.rate, args.seconds)
    yield await measure_streams(setup, args.streams)


async def show(setup: Setup, args: argparse.Namespace) -> int:
    """The exit code."""
    code = 0
    async for result in measure(setup, args):
        print(line(result, result.holds, args.json, load_average=os.getloadavg()[0]), flush=True)
        if getattr(result, "failed", 0) or (args.check and not result.holds):
            code = 1
    return code


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, default=300, help="one after the other, for each way")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second, for the CPU")
    parser.add_argument("--seconds", type=float, default=10.0, help="of that")
    parser.add_argument("--streams", type=int, default=2000, help="at once")
    args = parser.parse_args()
    if min(args.requests - 1, args.rate, args.seconds, args.streams) <= 0:
        parser.error("--requests must be at least 2, the others greater than 0")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # the stubs' too
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what was started, too
    with running(args.streams + SPARE_REQUESTS) as setup:
        sys.exit(asyncio.run(show(setup, args)))


if __name__ == "__main__":
    main()
