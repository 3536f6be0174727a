# SPDX-License-Identifier: Apache-2.0
"""Real prefill and decode engines with a relay between each two of them, and a single engine that gives the right
answers.
"""

import contextlib
import dataclasses
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from faults.level import Level, measure
from faults.traffic import DEADLINE_S, Answer, Ask, Outcome, Volley, ask, asks
from harness import remote
from harness.client import Client, at_once
from harness.clusters import Proxy
from harness.engines import HOST, Engine, EngineConfig, Role, Server, stop_all, wait_ready
from harness.models import TINY, ModelSpec, make_model
from harness.plain_http import PLAIN_HTTP
from harness.routers import VllmRouter
from harness.wire import Relay, Sessions, SideChannel, Wire

LIMITS = (
    ("lease_s", 5.0),
    ("write_timeout_s", 2.0),
    ("control_timeout_s", 1.5),
    ("grant_timeout_s", 12.0),
    ("settle_timeout_s", 6.0),
    ("transfer_timeout_s", 40.0),
    ("collective_timeout_s", 10.0),
)
"""Short, so that every fault is over in seconds: `DEADLINE_S` is far above the longest of them."""
SILENCE_S = 45
"""The proxy's `--read-timeout`: a request for which decode has no blocks ends by it. The proxy makes it anew once, so
twice this and the failure of each transfer must be below `DEADLINE_S`."""
SHORT_QUEUE = ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "124")
"""Mooncake's, for a peer: a write needs several batches, and what failed ones leave in it counts."""
RECOVERS_WITHIN_S = 60.0
QUIET_WITHIN_S = 90.0
LEVEL_WITHIN_S = 25.0
"""After the last request: idle connections are closed, threads have ended."""
KEEP_ALIVE_S = 6.0
"""vLLM and the proxy, as it is started here, keep idle connections for up to 5 s."""

# It must notice soon that an engine is back, and send what comes.
ROUTER = (
    *("vllm-router", "--vllm-pd-disaggregation", "--disable-circuit-breaker", "--health-check-interval-secs", "1"),
    *("--kv-connector", "nixl"),
)
PREFILL = EngineConfig(Role.PREFILL, tp=2, connector_extra=LIMITS, engine_id="prefill")
DECODE = EngineConfig(Role.DECODE, connector_extra=LIMITS, engine_id="decode")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The engines that run.

    longest: tokens of a request that surely fits.
    routed: clients ask vllm-router, which asks prefill first, instead of our proxy.
    """

    name: str
    prefill: EngineConfig = PREFILL
    decode: EngineConfig = DECODE
    model: ModelSpec = TINY
    longest: int = 2000
    routed: bool = False

    def __str__(self) -> str:
        return self.name


class World:
    """All processes of a test. `channel`: relay of the side channel; `sessions`: relay of Mooncake's connections to
    decode.
    """

    def __init__(self, shape: Shape, models: Path, logs: Path) -> None:
        self.shape = shape
        self._number = itertools.count()
        self._stack = contextlib.ExitStack()
        self._levels: dict[Server, Level] = {}
        self.control = Path(tempfile.mkdtemp(prefix="pd-faults-"))  # a socket's path must be short
        self._stack.callback(shutil.rmtree, self.control)
        self._wire = wire = Wire()
        self._stack.callback(wire.close)
        self.channel, self.sessions = SideChannel(wire), Sessions(wire)
        self.tickets = SideChannel(wire)  # what decode sends to prefill
        self.front, self.to_prefill, self.to_decode, self.metaserver = (Relay(wire) for _ in range(4))
        folder = make_model(shape.model, models)
        common = (("VLLM_ASCEND_PD_TEST_CONTROL", str(self.control)),)
        socks = ("VLLM_ASCEND_PD_TEST_SOCKS", f"{HOST}:{self.channel.port}")
        to_prefill = ("VLLM_ASCEND_PD_TEST_SOCKS", f"{HOST}:{self.tickets.port}")
        session = ("VLLM_ASCEND_PD_TEST_SESSION", f"{HOST}:{self.sessions.port}")
        configs = (
            dataclasses.replace(shape.prefill, env=(*shape.prefill.env, *common, socks, SHORT_QUEUE)),
            dataclasses.replace(shape.decode, env=(*shape.decode.env, *common, session, to_prefill)),
        )
        single = EngineConfig(max_model_len=shape.decode.max_model_len)
        try:
            engines: list[Server] = []
            self._stack.callback(lambda: stop_all(engines))
            self.prefill, self.decode, truth = (Engine(config, folder, logs) for config in (*configs, single))
            engines += [self.prefill, self.decode, truth]
            url = f"{self.metaserver.url}/v1/metaserver"
            self.proxy = Proxy(
                [self.to_prefill],
                [self.to_decode],
                logs,
                args=("--metaserver-url", url, "--read-timeout", str(SILENCE_S), "--keep-alive-timeout", "5"),
            )
            self.to_prefill.target, self.to_decode.target = self.prefill.port, self.decode.port
            self.front.target = self.metaserver.target = self.proxy.port
            engines.append(self.proxy)
            wait_ready(engines)
            self.router: VllmRouter | None = None
            if shape.routed:
                command = [*ROUTER, "--prefill", self.to_prefill.url, "--decode", self.to_decode.url]
                self.router = VllmRouter("vllm-router", command, logs)
                engines.append(self.router)
                wait_ready([self.router])
                self.front.target = self.router.port
            self._truth = self._stack.enter_context(Client(truth.url))
            self._find_session()
            patience = httpx.Timeout(DEADLINE_S, connect=5)
            self.client = self._stack.enter_context(Client(self.front.url, model=str(folder), timeout=patience))
            self.warm_up()
        except BaseException:
            self.close()
            raise

    @property
    def servers(self) -> list[Server]:
        """Ours."""
        return [self.prefill, self.decode, self.proxy]

    def close(self) -> None:
        self._stack.close()

    # Requests.

    def requests(self, count: int = 12, name: str = "") -> list[tuple[Ask, tuple[int, ...]]]:
        """Returns new requests with the right answers."""
        made = asks(f"{name}{next(self._number)}", count, self.shape.longest)
        answers = at_once(lambda one: self._truth.complete(one.prompt, one.max_tokens).token_ids, made, 4)
        return list(zip(made, answers, strict=True))

    def send(self, requests: Sequence[tuple[Ask, tuple[int, ...]]]) -> Volley:
        return Volley(self.client, [one for one, _ in requests], [tokens for _, tokens in requests])

    def complete(self, count: int) -> list[Answer]:
        return self.send(self.requests(count)).answers()

    def first_right_answer(
        self, since: float, probes: Sequence[tuple[Ask, tuple[int, ...]]]
    ) -> tuple[float, list[Answer]]:
        """Returns seconds from `since` to the first right answer, and the failures before it. Raises TimeoutError."""
        failures: list[Answer] = []
        deadline = time.monotonic() + RECOVERS_WITHIN_S
        for request, expected in itertools.cycle(probes):
            answer = ask(self.client, dataclasses.replace(request, stream=False), expected)
            if answer.outcome is Outcome.RIGHT:
                return time.monotonic() - since, failures
            failures.append(answer)
            if answer.outcome is Outcome.WRONG:
                raise AssertionError(f"a wrong answer after the fault: {answer.detail}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no right answer within {RECOVERS_WITHIN_S:g} s: {answer.detail}")
            time.sleep(0.1)
        raise AssertionError("no probes")

    # Processes.

    def ranks(self, engine: Engine) -> list[int]:
        """Returns the processes of an engine's ranks."""
        return [pid for pid in engine.process.members() if self._session_of(pid) is not None]

    def tell(self, engine: Engine, name: str, *args: Any) -> list[Any]:
        """Sends a command of `remote_control.py` to every rank."""
        return [remote.call(self.control, pid, name, *args) for pid in self.ranks(engine)]

    def set_writes(self, fault: str, times: int | None = None, seconds: float = 0.0) -> list[int]:
        """Sets what happens to the next batches of each of prefill's ranks. Returns of how many it did, as set before,
        for each rank that is alive."""
        return self.tell(self.prefill, "set_writes", fault, times, seconds)

    @contextlib.contextmanager
    def writes(self, fault: str, times: int | None = None, seconds: float = 0.0) -> Iterator[None]:
        self.set_writes(fault, times, seconds)
        try:
            yield
        finally:
            hit = self.set_writes("")
        assert not hit or sum(hit), f"no batch met the fault {fault}"

    def restart(self, server: Server) -> None:
        """Restarts a server that was killed. Returns when it is healthy."""
        assert isinstance(server, Engine | Proxy | VllmRouter)
        if server is self.decode:  # its session has another port, as it would without relays
            self.sessions = Sessions(self._wire)
            self.decode.environment["VLLM_ASCEND_PD_TEST_SESSION"] = f"{HOST}:{self.sessions.port}"
        server.start()
        wait_ready([server])
        self._levels.pop(server, None)
        if server is self.decode:
            self._find_session()

    def running(self, engine: Engine) -> float:
        return engine.metric("vllm:num_requests_running")

    def _find_session(self) -> None:
        [session] = self.tell(self.decode, "session")
        self.sessions.target = int(session.rpartition(":")[2])

    def _session_of(self, pid: int) -> Any:
        try:
            return remote.call(self.control, pid, "session")
        except OSError:  # not a process of vLLM's
            return None

    # What must be as it was.

    def warm_up(self) -> None:
        """Sends requests that end in every way, so that engines start everything that they start on first use."""
        with self.writes("fail", times=1):
            self.complete(16)
        leaving = [one for one, _ in self.requests(8)]
        at_once(lambda one: leave(self, one, 0.3), leaving, 8)
        self.complete(16)
        self.leaked_blocks()
        time.sleep(KEEP_ALIVE_S)
        for server in self.servers:
            if server not in self._levels:  # the level of those that were there before a restart stays what it was
                self._levels[server] = self._measure(server)

    def _measure(self, server: Server) -> Level:
        """Measures the servers, without connections that Mooncake keeps. Over TCP it closes a connection to an engine
        that has died only when it uses it again, which never happens here. These connections all go to a relay.
        """
        level = measure(server, self.control)
        ours = {each.port for each in vars(self).values() if hasattr(each, "port")}

        def is_kept(socket: str) -> bool:
            return "CLOSE_WAIT" in socket and not ours & {int(word) for word in socket.split() if word.isdigit()}

        if server is not self.prefill:
            return level
        return dataclasses.replace(
            level, sockets={name: socket for name, socket in level.sockets.items() if not is_kept(socket)}
        )

    def leaked_blocks(self) -> int:
        """Returns how many blocks are in use after `QUIET_WITHIN_S` without requests; 0 as soon as none are."""
        deadline = time.monotonic() + QUIET_WITHIN_S
        while (held := sum(blocks_in_use(engine) for engine in (self.prefill, self.decode))) > 0:
            if time.monotonic() > deadline:
                return held
            time.sleep(0.2)
        return 0

    def leaks(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns what servers hold more of than after the warm-up, for good, and bytes of memory more, by server."""
        if len(self._levels) < len(self.servers):  # one was restarted
            self.warm_up()
        deadline = time.monotonic() + LEVEL_WITHIN_S
        while True:
            now = {server: self._measure(server) for server in self.servers}
            more = {
                f"{server.name}: {what}": count
                for server in self.servers
                for what, count in now[server].above(self._levels[server]).items()
            }
            if not more or time.monotonic() > deadline:
                break
            time.sleep(1.0)
        if more:
            print("relays:", {name: relay.port for name, relay in vars(self).items() if hasattr(relay, "port")})
            print("new:", {server.name: now[server].new_sockets(self._levels[server]) for server in self.servers})
        return more, {server.name: now[server].memory - self._levels[server].memory for server in self.servers}


class Worlds:
    """Keeps at most one world running."""

    def __init__(self, models: Path, logs: Path) -> None:
        self._models, self._logs = models, logs
        self._world: World | None = None

    def get(self, shape: Shape) -> World:
        if self._world is None or self._world.shape != shape:
            self.close()
            self._world = World(shape, self._models, self._logs)
        return self._world

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()


def blocks_in_use(engine: Engine) -> int:
    """Returns the engine's blocks in use: at least 1 as long as it works."""
    if engine.metric("vllm:num_requests_running") + engine.metric("vllm:num_requests_waiting") > 0:
        return 1
    [(labels, _)] = engine.samples("vllm:cache_config_info")
    return round(engine.metric("vllm:kv_cache_usage_perc") * int(labels["num_gpu_blocks"]))


def leave(world: World, request: Ask, patience_s: float) -> Answer:
    """Sends a request and closes its connection after a while."""
    body = {"model": world.client.model, "prompt": request.prompt, "max_tokens": request.max_tokens}
    end = time.monotonic() + patience_s
    outcome, detail = Outcome.LEFT, ""
    try:
        with httpx.stream(
            "POST",
            f"{world.front.url}/v1/completions",
            json={**body, "temperature": 0, "ignore_eos": True, "stream": True},
            timeout=httpx.Timeout(20, read=patience_s),
            **PLAIN_HTTP,
        ) as response:
            for _ in response.iter_lines():
                if time.monotonic() > end:
                    break
    except httpx.TransportError as error:
        detail = repr(error)
    return Answer(request, outcome, detail)
