# SPDX-License-Identifier: Apache-2.0
"""What the control plane costs a request, with more and more requests open at once, and with more and more decode
engines known to one prefill engine.

$ python benchmarks/scale.py [--requests 1 8 64 256] [--engines 1 4 16 64] [--at 64] [--rounds 5] [--json] [--check]

A wave of requests arrives at a decode engine at once; all are open on both sides until the last prompt is computed:
1024 tokens each in blocks of 128, in 4 steps that all of the wave are in. Rows with more engines: those have described
themselves and stay connected, the wave of AT requests goes to the first. `spread`: the wave goes to all of them.

Ours is what vLLM drives: `LayerwisePushConnector` in the scheduler's role with vLLM's own requests and scheduler
outputs, and one rank (`PrefillWorker`, `DecodeWorker`) with all of its threads, on both sides. Tickets are posted
over HTTP to a metaserver, messages go over ZMQ on 127.0.0.1. There is no model, and Mooncake's engine is one that does
nothing, at Mooncake's interface. The prefill engines are in this process, the decode engines in another one.

Of each request, medians of the rounds in which all rows take turns:

messages  on the side channel, both ways, and bytes of them; posts to the metaserver, and bytes of a ticket
step      bytes that the scheduler sends ranks with its steps (pickled, as vLLM does), and ranks send back
sched     CPU microseconds of the scheduler's five calls into the connector
rank      of the model's thread in the connector without layers, which benchmarks/plan.py is for
control   of the threads of the side channel: pd-control on prefill, pd-grants on decode
send      of prefill's threads that write, one for each engine it has tickets of (pd-sender): the layers of all of the
          wave at once, and each request's end
post      of the thread that posts tickets
empty     not of a request: of a step in which nothing happens while the wave is open, scheduler and rank together
memory    bytes of Python objects while it is open; and once, what a known engine takes

Bars: of a request, nothing takes more than BAR times as much with the most requests as with 8 (or the fewest above 1),
nor with the most engines as with the fewest; nor does an empty step.

--check exits with 1 where a bar is missed.
"""

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest import mock

from helpers.report import options
from helpers.scale_parts import BLOCKS, HOST, TIMEOUT_S, Configs, Memory

from harness.waiting import wait_until

BAR = 1.25
EMPTY_STEPS = 20
REST_S = 2.5
"""Connections that nothing is expected from rest after a second or two."""


@dataclass(frozen=True)
class Case:
    requests: int
    engines: int
    spread: bool = False

    @property
    def shares(self) -> list[int]:
        """Requests of each engine that gets any."""
        used = min(self.requests, self.engines) if self.spread else 1
        return [self.requests // used + (i < self.requests % used) for i in range(used)]

    def __str__(self) -> str:
        return f"{self.requests:>8}{self.engines:>8}{' spread' if self.spread else '':<7}"


@dataclass(frozen=True)
class Cost:
    """Of a request, but for `empty` steps. Bytes, and microseconds of CPU; `p`: prefill's, `d`: decode's."""

    messages: float
    message_bytes: float
    posts: float
    ticket_bytes: float
    p_step_bytes: float
    d_step_bytes: float
    report_bytes: float
    p_sched: float
    d_sched: float
    p_rank: float
    d_rank: float
    p_control: float
    d_control: float
    p_send: float
    post: float
    p_empty: float
    d_empty: float

    @classmethod
    def median(cls, costs: list["Cost"]) -> "Cost":
        return cls(*(statistics.median(column) for column in zip(*(asdict(c).values() for c in costs), strict=True)))


@dataclass(frozen=True)
class Result:
    """`p_memory`, `d_memory`: bytes."""

    case: Case
    cost: Cost
    p_memory: float
    d_memory: float

    @property
    def compared(self) -> dict[str, float]:
        return {**asdict(self.cost), "p_memory": self.p_memory, "d_memory": self.d_memory}

    def as_json(self) -> dict[str, Any]:
        return {"measure": "wave", **asdict(self.case), **self.compared}


class Wire:
    """Counts what this process's side channels send and receive: prefill's, both ways."""

    def __init__(self) -> None:
        from vllm_ascend_pd.transport import side_channel

        self.messages: Counter[str] = Counter()
        self.bytes = 0
        self._encode, self._decode = side_channel.encode, side_channel.decode
        self._lock = threading.Lock()

    def encode(self, seq: int, message: Any) -> bytes:
        return self._count(message, self._encode(seq, message))

    def decode(self, frame: bytes) -> tuple[int, Any]:
        seq, message = self._decode(frame)
        self._count(message, frame)
        return seq, message

    def _count(self, message: Any, frame: bytes) -> bytes:
        with self._lock:
            self.messages[type(message).__name__] += 1
            self.bytes += len(frame)
        return frame

    def begin(self) -> None:
        with self._lock:
            self.messages.clear()
            self.bytes = 0


class Posts:
    """Tickets that were posted; answered when prefill has ended."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.prefilled = threading.Event()

    def answer(self, post: BaseHTTPRequestHandler, body: bytes) -> None:
        self.bodies.append(body)
        self.prefilled.wait(TIMEOUT_S)
        post.send_response(200)
        post.send_header("Content-Length", "0")
        post.end_headers()


class Bench:
    """`known`: numbers of decode engines; for each there is a prefill engine that knows so many."""

    def __init__(self, layers: int, most_requests: int, known: list[int], stack: ExitStack) -> None:
        from helpers.scale_decode import DecodeEngines
        from helpers.scale_prefill import Prefill

        from harness.metaserver import metaserver
        from harness.models import TINY, make_model
        from harness.ports import release_port, reserve_port
        from harness.rank_hosts import Rank

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = str(make_model(TINY, folder))
        blocks = most_requests * BLOCKS + 1
        ports = [reserve_port() for _ in range(max(known))]
        for port in ports:
            stack.callback(release_port, port)
        self._decode = Rank(DecodeEngines, model, layers, blocks, ports, device="cpu")
        stack.callback(self._end_decode)
        configs = Configs(model, layers, blocks)
        self._decode.receive(2 * TIMEOUT_S)
        self._wire = Wire()
        stack.enter_context(
            mock.patch.multiple(
                "vllm_ascend_pd.transport.side_channel", encode=self._wire.encode, decode=self._wire.decode
            )
        )
        self._posts = Posts()
        self._url = stack.enter_context(metaserver(self._posts.answer))
        stack.callback(self._posts.prefilled.set)
        self._waves = 0
        self._spread = False  # was the last wave
        self._prefills: dict[int, Prefill] = {}
        self.engine_bytes: dict[int, float] = {}
        memory = Memory()
        for count in known:
            self._prefills[count] = prefill = Prefill(configs, f"prefill-{count}")
            stack.callback(prefill.close)
            self.wave(Case(1, count))  # connects the first one, and maps ranks
            memory.begin()
            self.wave(Case(count, count, spread=True))
            self.engine_bytes[count] = memory.end() / max(1, count - 1)

    def _end_decode(self) -> None:
        self._decode.retire()
        self._decode.stop()
        self._decode.stopped()

    def wave(self, case: Case, memory: bool = False) -> tuple[Cost, tuple[float, float]]:
        """Cost, and where asked for, the memory that each request takes (prefill, decode)."""
        prefill, decode = self._prefills[case.engines], self._decode
        if self._spread and not case.spread:  # engines that are merely known have not been heard of just now
            time.sleep(REST_S)
        self._spread = case.spread
        self._waves += 1
        self._posts.bodies, self._posts.prefilled = [], threading.Event()
        decode.call("begin", str(self._waves), case.shares, self._url, memory)
        decode.call("issue")
        wait_until(lambda: len(self._posts.bodies) == case.requests, TIMEOUT_S, "tickets are posted")
        bodies = list(self._posts.bodies)
        prefill.begin([json.loads(body) for body in bodies])
        held, here = (0.0, 0.0), Memory()
        self._wire.begin()
        prefill.meter.begin()
        if memory:
            here.begin()
        prefill.start()
        if memory:
            held = here.end() / case.requests, decode.call("held") / case.requests
        decode.call("empty_steps", EMPTY_STEPS)
        prefill.empty_steps(EMPTY_STEPS)
        prefill.go_on()
        self._posts.prefilled.set()
        p, d = prefill.finish(), decode.call("finish")
        return self._cost(case, p, d, bodies), held

    def _cost(self, case: Case, p: dict[str, Any], d: dict[str, Any], bodies: list[bytes]) -> Cost:
        n, micro = case.requests, 1e6
        return Cost(
            messages=self._wire.messages.total() / n,
            message_bytes=self._wire.bytes / n,
            posts=len(bodies) / n,
            ticket_bytes=sum(map(len, bodies)) / n,
            p_step_bytes=p["bytes"]["down"] / n,
            d_step_bytes=d["bytes"]["down"] / n,
            report_bytes=(p["bytes"].get("up", 0) + d["bytes"].get("up", 0)) / n,
            p_sched=micro * p["scheduler"] / n,
            d_sched=micro * d["scheduler"] / n,
            p_rank=micro * p["rank"] / n,
            d_rank=micro * d["rank"] / n,
            p_control=micro * p["threads"]["pd-control"] / n,
            d_control=micro * d["threads"]["pd-grants"] / n,
            p_send=micro * p["threads"]["pd-sender"] / n,
            post=micro * d["threads"]["metaserver-client"] / n,
            p_empty=micro * p["empty_step"],
            d_empty=micro * d["empty_step"],
        )


def measure(cases: list[Case], layers: int, rounds: int) -> tuple[list[Result], dict[int, float]]:
    """Raises where a side does not do its work. The second: bytes that a known engine takes, by how many there are."""
    with ExitStack() as stack:
        known = sorted({case.engines for case in cases})
        bench = Bench(layers, max(case.requests for case in cases), known, stack)
        found: dict[Case, list[Any]] = {case: [] for case in cases}
        memory = {}
        for case in cases:
            bench.wave(case)
            *_, memory[case] = bench.wave(case, memory=True)
        for _ in range(rounds):
            for case in cases:
                found[case].append(bench.wave(case))
        results = []
        for case, waves in found.items():
            results.append(Result(case, Cost.median([cost for cost, _ in waves]), *memory[case]))
        return results, bench.engine_bytes


@dataclass(frozen=True)
class Growth:
    """Of one measure, from a case to a larger one."""

    what: str
    smaller: Case
    larger: Case
    times: float

    @property
    def holds(self) -> bool:
        return self.times <= BAR

    def as_json(self) -> dict[str, Any]:
        return {"measure": "growth", **asdict(self), "bar": BAR, "holds": self.holds}

    def row(self) -> str:
        way = f"{self.smaller.requests} requests, {self.smaller.engines} engines -> "
        way += f"{self.larger.requests} requests, {self.larger.engines} engines"
        return f"{self.what:<16}{way:<48}{self.times:>6.2f}x{BAR:>7g}x  {'holds' if self.holds else 'missed'}"


def growths(results: list[Result]) -> Iterator[Growth]:
    one = sorted((r for r in results if r.case.engines == 1 and r.case.requests > 1), key=lambda r: r.case.requests)
    several = sorted((r for r in results if not r.case.spread), key=lambda r: r.case.engines)
    several = [r for r in several if r.case.requests == several[-1].case.requests]
    pairs = [(next((r for r in one[:-1] if r.case.requests >= 8), one[0]), one[-1])] if one else []
    for small, large in [*pairs, (several[0], several[-1])]:
        if small.case == large.case:
            continue
        for what, least in small.compared.items():
            times = large.compared[what] / least if least else 1.0
            yield Growth(what, small.case, large.case, times)


SENT = ("messages", "message_bytes", "posts", "ticket_bytes", "p_step_bytes", "d_step_bytes", "report_bytes")
TAKEN = (
    *("p_sched", "d_sched", "p_rank", "d_rank", "p_control", "d_control", "p_send", "post", "p_empty", "d_empty"),
    *("p_memory", "d_memory"),
)


def table(results: list[Result], columns: tuple[str, ...]) -> Iterator[str]:
    yield f"{'requests':>8}{'engines':>8}{'':7}" + "".join(f"{name:>15}" for name in columns)
    for result in results:
        figures = (result.compared[name] for name in columns)
        yield str(result.case) + "".join(f"{figure:>15.{1 if figure < 100 else 0}f}" for figure in figures)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 64, 256], help="open at once, one engine")
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 4, 16, 64], help="decode engines known")
    parser.add_argument("--at", type=int, default=64, help="requests where engines differ")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if min(*args.requests, *args.engines, args.at, args.layers, args.rounds) < 1:
        parser.error("all numbers must be positive")
    os.environ["VLLM_HOST_IP"] = HOST
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM logs to standard output

    cases = [Case(requests, 1) for requests in args.requests]
    cases += [Case(args.at, engines) for engines in sorted(args.engines)]
    if max(args.engines) > 1:
        cases.append(Case(args.at, max(args.engines), spread=True))
    begun = time.monotonic()
    results, engine_bytes = measure(list(dict.fromkeys(cases)), args.layers, args.rounds)
    grown = list(growths(results))
    if args.json:
        for each in [*results, *grown]:
            print(json.dumps(each.as_json()))
        print(json.dumps({"measure": "known engine", "bytes": engine_bytes, "load_average": os.getloadavg()[0]}))
    else:
        print(f"{time.monotonic() - begun:.0f} s; load average {os.getloadavg()[0]:.1f}; of each request:")
        for columns in (SENT, TAKEN):
            print("\n".join(table(results, columns)) + "\n")
        print("\n".join(growth.row() for growth in grown))
        for count, size in engine_bytes.items():
            print(f"of {count} known engines, each takes {size / 1024:.0f} KiB of Python objects at prefill")
    missed = [growth for growth in grown if not growth.holds]
    for growth in missed:
        print(growth.row(), file=sys.stderr)
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
