# SPDX-License-Identifier: Apache-2.0
"""Runs the soak: the right answers, then all requests, with one prefill engine's end and return in the middle."""

import asyncio
import dataclasses
import enum
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec

from harness.clusters import Cluster, ClusterConfig, running_cluster
from harness.engines import START_SECONDS, Engine, EngineConfig, Role, running_engines
from harness.failures import FREE_WITHIN_S
from harness.models import TINY, make_model
from harness.plain_http import PLAIN_HTTP
from harness.processes import ManagedProcess, StartupError
from harness.soak import samples
from harness.soak.answers import Answers
from harness.soak.ledger import Back, Drained, Killed, Ledger, Started, Summary, summarize
from harness.soak.load import Load
from harness.soak.plot import plot
from harness.soak.tasks import together
from harness.soak.workload import MAX_MODEL_LEN, Request, Workload

TIMES = (
    # Shorter than `load.HANG_SECONDS`, and long enough for a machine that others use too.
    ("transfer_timeout_s", 150.0),
    ("control_timeout_s", 15.0),
    ("grant_timeout_s", 60.0),
    ("verify_kv", "all"),
)
STOP_SECONDS = 30
"""What a prefill engine that gets a SIGTERM has."""
POLL_SECONDS = 0.2
LONG_PROMPT = 800

SINGLE = EngineConfig(block_size=64, max_model_len=MAX_MODEL_LEN)
_DECODE = dataclasses.replace(SINGLE, role=Role.DECODE, connector_extra=TIMES)
_PREFILL = dataclasses.replace(_DECODE, role=Role.PREFILL)
CLUSTER = ClusterConfig("soak", (dataclasses.replace(_PREFILL, tp=2), _PREFILL), (_DECODE,))
"""Prefix caching is on, and prompts longer than 512 tokens are prefilled in chunks."""


class Signal(enum.StrEnum):
    TERM = "TERM"
    KILL = "KILL"


class Settings(msgspec.Struct, frozen=True):
    """The settings of a run. They are kept in its folder, so that it can be resumed."""

    seed: int
    concurrency: int
    signal: Signal
    sample_seconds: float


class SoakError(RuntimeError):
    """Ends the run with its message."""


class FolderError(SoakError):
    """The folder cannot be used for this run."""


class Events:
    """Callbacks for an observer, which overrides them."""

    def ready(self, process: ManagedProcess, seconds: float) -> None:
        """It is healthy."""

    def say(self, text: str) -> None:
        """Something that happens once."""

    def answered(self, missing: int) -> None:
        """The single instance gave an answer, and so many are missing."""

    def finished(self, ledger: Ledger) -> None:
        """A request did."""


class Folder:
    """The folder in which a run keeps everything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "settings.json"
        self.answers = path / "answers.jsonl"
        self.ledger = path / "results.jsonl"
        self.samples = path / "samples.csv"
        self.summary = path / "summary.json"
        self.plot = path / "soak.png"
        self.logs = path / "logs"
        self.models = path / "models"

    def prepare(self, settings: Settings) -> None:
        """Prepares the folder. Raises FolderError if it has a run with other settings, or anything else."""
        if self.settings.exists():
            before = msgspec.json.decode(self.settings.read_bytes(), type=Settings)
            if before != settings:
                raise FolderError(
                    f"{self.path} has a run with {_differences(before, settings)}: "
                    "give the same options to resume it, or --fresh to discard it"
                )
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise FolderError(f"{self.path} is neither empty nor a run to resume")
        self.logs.mkdir(parents=True, exist_ok=True)
        self.settings.write_bytes(msgspec.json.encode(settings))


def _differences(before: Settings, now: Settings) -> str:
    pairs = zip(msgspec.to_builtins(before).items(), msgspec.to_builtins(now).values(), strict=True)
    return ", ".join(f"{name} {old}, not {new}" for (name, old), new in pairs if old != new)


def soak(path: Path, requests: int, settings: Settings, events: Events) -> Summary:
    """Does what is left of the run in the folder `path`.

    If it is interrupted, it leaves no process, and the folder has what has been done so far.
    """
    folder = Folder(path)
    folder.prepare(settings)
    answers = Answers(folder.answers, Workload(settings.seed))
    ledger = Ledger(folder.ledger)
    if not _is_complete(ledger, requests):
        model = make_model(TINY, folder.models)
        if answers.missing(requests):
            _ask_single(answers, requests, model, folder, events)
        try:
            with running_cluster(model, CLUSTER, folder.logs, on_healthy=events.ready) as cluster:
                run = Run(cluster, folder, requests, settings, answers, ledger, events)
                asyncio.run(run.serve())
        finally:
            report(folder, requests, ledger)
    return report(folder, requests, ledger)


def _is_complete(ledger: Ledger, requests: int) -> bool:
    return ledger.leaked_blocks is not None and all(number in ledger.finished for number in range(requests))


def _ask_single(answers: Answers, requests: int, model: Path, folder: Folder, events: Events) -> None:
    missing = len(answers.missing(requests))
    events.say(f"a single instance answers {missing} prompts")

    def on_answer() -> None:
        events.answered(len(answers.missing(requests)))

    with running_engines(model, [SINGLE], folder.logs, events.ready) as [engine]:
        asyncio.run(answers.ask(engine.url, str(model), requests, on_answer))


def report(folder: Folder, requests: int, ledger: Ledger) -> Summary:
    """Writes the results so far to the folder, and returns them."""
    taken = samples.read(folder.samples)
    summary = summarize(ledger, requests, samples.total_retries(taken), samples.growth(taken))
    folder.summary.write_bytes(summary.as_json())
    if taken:
        title = f"{summary.outcomes.total():,} requests, 2 prefill engines (TP 2, TP 1) and 1 decode engine (TP 1)"
        plot(taken, ledger.restarts, title, folder.plot)
    return summary


class Run:
    """A running cluster under load."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Folder,
        requests: int,
        settings: Settings,
        answers: Answers,
        ledger: Ledger,
        events: Events,
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._requests = requests
        self._settings = settings
        self._answers = answers
        self._ledger = ledger
        self._events = events
        self._restarting: Engine | None = None
        self._restarted = asyncio.Event()
        self._long_prompt_sent = asyncio.Event()

    async def serve(self) -> None:
        """Serves until all requests have ended and the engines hold nothing any more."""
        self._ledger.add(Started(time.time()))
        # A connection per request: on a busy machine this process may be stopped for longer than an idle one lives.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=self._cluster.url, timeout=None, limits=limits, **PLAIN_HTTP) as http,
            httpx.AsyncClient(**PLAIN_HTTP) as engines,
        ):
            sampling = asyncio.create_task(self._sample(engines))
            serving = asyncio.create_task(self._serve_all(http, engines))
            try:
                await asyncio.wait((sampling, serving), return_when=asyncio.FIRST_COMPLETED)
                if sampling.done():  # it only ends by an error
                    sampling.result()
                serving.result()
            finally:
                for task in (sampling, serving):
                    task.cancel()
                await asyncio.gather(sampling, serving, return_exceptions=True)

    async def _serve_all(self, http: httpx.AsyncClient, engines: httpx.AsyncClient) -> None:
        load = Load(http, str(self._cluster.model))
        pending = (
            request
            for request in Workload(self._settings.seed).requests(self._requests)
            if request.number not in self._ledger.finished
        )
        asking = (self._ask_next(load, pending) for _ in range(self._settings.concurrency))
        await together([self._restart_in_the_middle(engines), *asking])
        leaked = await self._leaked_blocks(engines)
        await self._take_sample(engines)
        self._ledger.add(Drained(time.time(), leaked))

    async def _ask_next(self, load: Load, pending: Iterator[Request]) -> None:
        for request in pending:
            if request.number >= self._requests * 3 // 4:  # the last quarter has all engines again
                await self._restarted.wait()
            prompt, right = self._answers.prompt(request.prompt), self._answers.tokens(request.prompt)
            if len(prompt) > LONG_PROMPT:
                self._long_prompt_sent.set()
            self._ledger.add(await load.ask(request, prompt, right))
            self._events.finished(self._ledger)

    async def _restart_in_the_middle(self, http: httpx.AsyncClient) -> None:
        if self._ledger.completed_restarts == 0:
            while len(self._ledger.finished) < self._requests // 2:
                await asyncio.sleep(POLL_SECONDS)
            await self._restart(self._cluster.prefill[0], http)
        self._restarted.set()

    async def _restart(self, engine: Engine, http: httpx.AsyncClient) -> None:
        """Kills and restarts the engine, just after a long prompt was sent to it, so that it is busy."""
        self._long_prompt_sent.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._long_prompt_sent.wait(), 10)
        await asyncio.sleep(POLL_SECONDS)
        name, signal = samples.name(engine), self._settings.signal
        self._restarting = engine
        self._ledger.add(Killed(time.time(), name, signal.value))
        self._events.say(f"SIG{signal.value} to {name} after {len(self._ledger.finished):,} requests")
        if signal is Signal.KILL:
            await asyncio.to_thread(engine.process.kill)
        else:
            await asyncio.to_thread(engine.process.stop, STOP_SECONDS)
        engine.start()
        start = time.monotonic()
        while not await _is_healthy(engine, http):
            if engine.process.exit_code is not None or time.monotonic() - start > START_SECONDS:
                raise StartupError(engine.process, "did not come back")
            await asyncio.sleep(POLL_SECONDS)
        self._restarting = None
        self._ledger.add(Back(time.time()))
        self._events.say(f"{name} is back after {time.monotonic() - start:.0f} s")

    async def _leaked_blocks(self, http: httpx.AsyncClient) -> int:
        """Returns 0 as soon as no engine is busy or holds a block. After `FREE_WITHIN_S`, returns what they hold."""
        deadline = time.monotonic() + FREE_WITHIN_S
        while True:
            used, working = 0, False
            for engine in (*self._cluster.prefill, *self._cluster.decode):
                held, _ = await samples.blocks(engine, http)
                requests = await samples.busy(engine, http)
                if held is None or requests is None:
                    raise SoakError(f"{engine.name} does not say what it holds")
                used += held
                working = working or requests > 0
            if not (used or working):
                return 0
            if time.monotonic() > deadline:
                return max(used, 1)
            await asyncio.sleep(POLL_SECONDS)

    async def _sample(self, http: httpx.AsyncClient) -> None:
        """Takes samples until it is cancelled, or a process has ended by itself."""
        while True:
            for name, server in samples.servers(self._cluster):
                if server is not self._restarting and server.process.exit_code is not None:
                    raise SoakError(
                        f"{name} ended with code {server.process.exit_code}; the end of {server.log}:\n"
                        f"{server.process.tail()}"
                    )
            await self._take_sample(http)
            await asyncio.sleep(self._settings.sample_seconds)

    async def _take_sample(self, http: httpx.AsyncClient) -> None:
        taken = await samples.take(self._cluster, http, len(self._ledger.finished))
        samples.append(self._folder.samples, taken)


async def _is_healthy(engine: Engine, http: httpx.AsyncClient) -> bool:
    with suppress(httpx.TransportError):
        return (await http.get(f"{engine.url}/health", timeout=2)).is_success
    return False
