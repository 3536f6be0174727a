# SPDX-License-Identifier: Apache-2.0
"""What is attacked: our listeners and ranks in processes of their own. Each serves an honest request meanwhile.

`Tickets` is prefill's ticket listener with the bookkeeping of its scheduler's thread, `Client` the side channel's
client, and `Ranks` a prefill and a decode rank.
"""

import ctypes
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil

from harness.attacks import (
    ENGINE,
    HOST,
    PATIENCE_S,
    SECRET,
    Attacker,
    Program,
    Row,
    Target,
    answer_endlessly,
    attack,
    describe_falsely,
    read,
    running,
    sign,
    take_bytes,
    take_descriptions,
    take_messages,
)
from harness.kv import GQA, Prompt, Side
from harness.ranks import Pair, prefill, prompts, run
from harness.tickets import ticket_with
from vllm_ascend_pd.core.caches import BlockNeeds
from vllm_ascend_pd.core.hosts import AnyHost
from vllm_ascend_pd.core.protocol import (
    Acknowledged,
    AskTicket,
    Message,
    OfferTicket,
    TicketTaken,
)
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.prefill.held_prompts import HeldPrompts
from vllm_ascend_pd.prefill.outgoing_transfer import OutgoingPrompt
from vllm_ascend_pd.prefill.ticket_admission import TicketAdmission
from vllm_ascend_pd.prefill.ticket_listener import TicketListener
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelError, SideChannelServer

STEP_S = 0.005
"""Between two steps of the scheduler."""
PROMPT_TOKENS = 48
HONEST_S = 20.0
"""How long an honest ticket may take. After 30 s those that wait in vain make room."""
LURES = 8
"""Made-up tickets at a time."""


@dataclass(frozen=True)
class Usage:
    """`rss`: bytes, as malloc would give back what it keeps. `cpu_s`: of the attacked thread, since it began. `lock_s`:
    the longest that the scheduler's or the model's thread has waited for a lock since it was last asked. `errors`:
    what was logged with a traceback."""

    rss: int
    files: int
    cpu_s: float
    lock_s: float
    errors: list[str]


class TimedLock:
    """Takes the place of a lock. Knows how long one thread has waited for it."""

    def __init__(self, lock: Any, thread: int) -> None:
        self._lock, self._thread = lock, thread
        self.longest_s = 0.0

    def acquire(self, *args: Any) -> bool:
        began = time.perf_counter()
        taken = bool(self._lock.acquire(*args))
        if threading.get_ident() == self._thread:
            self.longest_s = max(self.longest_s, time.perf_counter() - began)
        return taken

    def release(self) -> None:
        self._lock.release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class _Errors(logging.Handler):
    """Keeps what is logged with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.messages.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


class Meter:
    """Measures the process that it is in."""

    def __init__(self, thread: str, locks: list[TimedLock]) -> None:
        """`thread`: the name of the attacked one."""
        self._locks = locks
        [self._attacked] = [each.native_id for each in threading.enumerate() if each.name == thread]
        self._process = psutil.Process()
        self._errors = _Errors()
        logging.getLogger().addHandler(self._errors)

    def usage(self) -> Usage:
        ctypes.CDLL(None).malloc_trim(0)
        stat = Path(f"/proc/self/task/{self._attacked}/schedstat").read_text()
        longest_s = max((lock.longest_s for lock in self._locks), default=0.0)
        for lock in self._locks:
            lock.longest_s = 0.0
        rss, files = self._process.memory_info().rss, self._process.num_fds()
        return Usage(rss, files, int(stat.split()[0]) / 1e9, longest_s, self._errors.messages)


class SubjectProgram(Program):
    """A subject that is one process, which answers calls."""

    def call(self, *message: Any) -> Any:
        self._pipe.send(message)
        return self._take()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def usage(self) -> Usage:
        found = self.call("usage")
        assert isinstance(found, Usage)
        return found


class Tickets(SubjectProgram):
    """Prefill's ticket listener."""

    def __init__(self, secret_file: str | None) -> None:
        super().__init__(_take_tickets, secret_file)
        self._secret_file = secret_file
        self.endpoint = str(self.first)
        self._client = SideChannelClient(secret=read(secret_file))

    def target(self, secret_file: str | None) -> Target:
        return Target(self.endpoint, secret_file, sign(ticket_with(num_tokens=PROMPT_TOKENS), secret_file))

    def honest(self) -> float:
        """A prompt finds its ticket. Returns in how many seconds."""
        transfer_id, began = secrets.token_hex(16), time.perf_counter()
        self.call("prompt", transfer_id)
        ticket = sign(ticket_with(num_tokens=PROMPT_TOKENS, ticket_id=secrets.token_hex(16)), self._secret_file)
        deadline = time.monotonic() + HONEST_S
        while not isinstance(answer := self._ask(OfferTicket(ENGINE, transfer_id, ticket)), TicketTaken):
            assert time.monotonic() < deadline, answer
        while self.call("served", ticket.ticket_id) != transfer_id:
            assert time.monotonic() < deadline
            time.sleep(STEP_S)
        took = time.perf_counter() - began
        assert self._ask(AskTicket(ENGINE, transfer_id, ticket.ticket_id)) == TicketTaken()
        return took

    def _ask(self, message: Message) -> Message | SideChannelError:
        return asked(self._client, self.endpoint, message)

    def close(self) -> None:
        self._client.close()
        super().close()


def asked(client: SideChannelClient, endpoint: str, message: Message) -> Message | SideChannelError:
    answers: queue.Queue[Message | SideChannelError] = queue.Queue()
    client.request(endpoint, message, PATIENCE_S / 2, answers.put)
    return answers.get(timeout=PATIENCE_S)


def _take_tickets(pipe: Connection, secret_file: str | None) -> None:
    secret = read(secret_file)
    admission = TicketAdmission(AnyHost(), secret)
    listener = TicketListener(ENGINE, HOST, 0, admission.check, secret, AnyHost())
    listener._lock = lock = TimedLock(listener._lock, threading.get_ident())  # type: ignore[assignment]
    engine: Any = SimpleNamespace(is_ready=lambda request: True)
    held = HeldPrompts(listener, ENGINE, 600.0, engine, engine, BlockNeeds((), 1000), 0)
    served: dict[str, str] = {}

    def serve(prompt: OutgoingPrompt, ticket: Ticket) -> None:
        admission.admit(ticket)
        assert prompt.transfer_id is not None
        served[ticket.ticket_id] = prompt.transfer_id

    meter = Meter("pd-ticket-listener", [lock])
    pipe.send(listener.endpoint)
    while True:  # the scheduler's steps
        held.match(serve)
        if not pipe.poll(STEP_S):
            continue
        what, *named = pipe.recv()
        if what == "prompt":
            request: Any = SimpleNamespace(request_id=named[0], num_prompt_tokens=PROMPT_TOKENS, max_tokens=1)
            held.add(OutgoingPrompt(request, (0, False)), named[0])
            pipe.send(None)
        else:
            pipe.send(served.get(named[0]) if what == "served" else meter.usage())


class Client(SubjectProgram):
    """The side channel's client, as a prefill rank and decode's scheduler have it."""

    def __init__(self, secret_file: str | None) -> None:
        self._server = SideChannelServer(HOST, 0, lambda message, peer: Acknowledged(), secret=read(secret_file))
        super().__init__(_ask_peers, secret_file)

    def lure(self, port: int) -> None:
        """Makes it ask who listens on `port`."""
        self.call("lure", f"tcp://{HOST}:{port}")

    def honest(self) -> float:
        """Another peer answers. Returns in how many seconds."""
        began = time.perf_counter()
        answer = self.call("ask", self._server.endpoint)
        assert answer == Acknowledged()
        return time.perf_counter() - began

    def close(self) -> None:
        super().close()
        self._server.close()


def _ask_peers(pipe: Connection, secret_file: str | None) -> None:
    client = SideChannelClient(name="pd-client", secret=read(secret_file))
    meter = Meter("pd-client", [])
    pipe.send(None)
    question = AskTicket(ENGINE, "t", "0" * 32)
    while True:
        what, *named = pipe.recv()
        if what == "lure":
            client.request(named[0], question, 600.0, lambda answer: None)
            pipe.send(None)
        else:
            pipe.send(asked(client, named[0], question) if what == "ask" else meter.usage())


class Ranks:
    """A prefill and a decode rank, of which one is attacked."""

    def __init__(self, secret_file: str | None) -> None:
        self.pair = Pair(GQA, Side(1), Side(1), {} if secret_file is None else {"secret_file": secret_file})
        self._bait, *self._honest = prompts(self.pair, [64, 40, 50])
        self._lured = 0

    def attack(self, attacked: str) -> None:
        [self._rank] = self.pair.d_ranks if attacked == "decode rank" else self.pair.p_ranks
        self._rank.call("do", _start_meter, attacked)

    @property
    def pid(self) -> int:
        pid = self._rank._host.process.pid
        assert pid is not None
        return pid

    def description(self) -> Any:
        """Plain data."""
        return msgspec.to_builtins(self.pair.listener.description)

    def target(self, secret_file: str | None) -> Target:
        """The decode rank, with a ticket that is valid and that nobody serves."""
        [ticket] = self.pair.announce([self._bait]).values()
        return Target(self.pair.descriptions[0].control, secret_file, ticket)

    def lure(self, port: int, made_up: Callable[[int], dict[str, object]]) -> None:
        """Has prefill compute prompts whose made-up tickets name a decode engine at `port`, and what `made_up` says."""
        made = {}
        for _ in range(LURES):
            prompt = Prompt(f"lured-{self._lured}", 0, 16, [self._bait.p_blocks[0]], [1])
            ticket = msgspec.structs.replace(
                self.pair.ticket(prompt),
                remote_engine_id=f"made-up-{self._lured}",
                remote_port=port,
                **made_up(self._lured),
            )
            self._lured += 1
            made[prompt.request_id] = (prompt, ticket)
        prefill(self.pair, [prompt for prompt, _ in made.values()], {name: each[1] for name, each in made.items()})

    def honest(self) -> float:
        """Two prompts are pushed. Returns in how many seconds."""
        pair = self.pair
        pair.each(pair.d_ranks, "clear")
        began = time.perf_counter()
        run(pair, self._honest)
        mine = {prompt.request_id for prompt in self._honest}
        received: set[str] = set()
        deadline = time.monotonic() + PATIENCE_S
        while not mine <= received:
            assert time.monotonic() < deadline, f"only {received} came"
            finished, failed, reasons = pair.d_ranks[0].call("arrivals")
            assert not mine & failed, reasons
            received |= finished
            pair.p_ranks[0].call("sent")
            time.sleep(0.002)
        took = time.perf_counter() - began
        assert pair.differences(self._honest) == []
        return took

    def usage(self) -> Usage:
        found = self._rank.call("do", _usage)
        assert isinstance(found, Usage)
        return found

    def close(self) -> None:
        self.pair.close()


_meters: dict[str, Meter] = {}
"""Of a rank's process."""


def _start_meter(rank: Any, attacked: str) -> None:
    thread = threading.get_ident()
    if attacked == "decode rank":
        arrivals = rank.worker._arrivals
        lock = TimedLock(threading.Lock(), thread)
        arrivals._changed = threading.Condition(lock)
        name = "pd-grants"
    else:
        control = rank.worker._control
        control._lock = lock = TimedLock(control._lock, thread)
        name = "pd-control" if attacked == "prefill rank" else threading.current_thread().name
    _meters["rank"] = Meter(name, [lock])


def _usage(rank: Any) -> Usage:
    return _meters["rank"].usage()


Subject = Tickets | Client | Ranks


def subject_of(row: Row, secret_file: str | None) -> Subject:
    """Starts what a row attacks."""
    secret_file = secret_file if row.engine_has_secret else None
    if row.against == "tickets":
        return Tickets(secret_file)
    return Client(secret_file) if row.against == "client" else Ranks(secret_file)


@dataclass(frozen=True)
class Outcome:
    """Of an attack. `before_s`, `during_s`, `after_s`: what each honest request took. `sent`: messages of the
    attacker. `grown`: the most bytes of memory above those before. `files`: the most that were open above those
    before. `cpu_s`: of the attacked thread, meanwhile. `lock_s`, `errors`: as in `Usage`."""

    before_s: list[float]
    during_s: list[float]
    after_s: list[float]
    sent: int
    grown: int
    files: int
    cpu_s: float
    lock_s: float
    errors: list[str]


def outcome(row: Row, subject: Any, secret_file: str | None, rounds: int, sink: bool = False) -> Outcome:
    """Attacks a subject, or a sink beside it, during `rounds` honest requests and until the attack is over."""
    if isinstance(subject, Ranks):
        subject.attack(row.against)
    before_s = [subject.honest() for _ in range(rounds)]
    before, during_s, most_files = subject.usage(), [], 0
    process = psutil.Process(subject.pid)
    Path(f"/proc/{subject.pid}/clear_refs").write_text("5")  # the highest memory so far
    with _begun(row, subject, secret_file, sink) as (attacker, again):
        while len(during_s) < rounds or (row.ends and not attacker.is_done):
            again()
            during_s.append(subject.honest())
            most_files = max(most_files, process.num_fds())
        sent = attacker.finish()
    status = Path(f"/proc/{subject.pid}/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) << 10
    usage = subject.usage()
    return Outcome(
        before_s,
        during_s,
        [subject.honest() for _ in range(rounds)],
        sent,
        peak - before.rss,
        most_files - before.files,
        usage.cpu_s - before.cpu_s,
        usage.lock_s,
        usage.errors,
    )


@contextmanager
def _begun(
    row: Row, subject: Any, secret_file: str | None, sink: bool
) -> Iterator[tuple[Attacker, Callable[[], None]]]:
    """Begins an attack. Yields the attacker, and what to do before each honest request."""
    known = secret_file if row.who == SECRET else None
    with ExitStack() as stack:
        if row.attack is not None:
            target = subject.target(known)
            if sink:
                takes = (take_bytes,) if row.is_on_connections else (take_messages, known)
                target = replace(target, endpoint=f"tcp://{HOST}:{stack.enter_context(running(*takes)).first}")
            yield stack.enter_context(running(attack, row.attack, target)), lambda: None
            return
        if row.answer is not None:
            host = stack.enter_context(running(describe_falsely, row.answer, subject.description(), known))
        else:
            host = stack.enter_context(running(answer_endlessly))
        if not sink:
            made_up = () if row.answer is None else (row.ticket,)
            yield host, lambda: subject.lure(host.first, *made_up)
        elif row.answer is not None:
            yield host, stack.enter_context(running(take_descriptions, host.first, LURES, known)).again
        else:
            stack.enter_context(running(take_bytes, host.first))
            yield host, lambda: None
