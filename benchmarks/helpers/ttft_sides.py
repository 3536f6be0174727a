# SPDX-License-Identifier: Apache-2.0
"""What `ttft.py` compares: a single vLLM instance, our connector and proxy, vLLM's MooncakeConnector, and none."""

import dataclasses
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

import httpx

from harness.agreement import listed_logprobs
from harness.client import Client, Completion, Prompt, StreamError
from harness.clusters import ClusterConfig, running_cluster
from harness.engines import HOST, PATIENT, EngineConfig, Role, Server, running_engines, wait_ready
from harness.models import WIDE, ModelSpec
from harness.ports import reserve_port
from harness.processes import ManagedProcess, StartupError

HERE = Path(__file__).resolve().parent

MODELS = {
    "small": ModelSpec("small", max_positions=8192),
    "wide": dataclasses.replace(WIDE, name="wide-16", layers=16, max_positions=8192),
}
"""Llamas in float32: 4 layers of hidden size 256 and 4 KiB of KV per token, 16 layers of 1024 and 64 KiB."""

STEP_TOKENS = 2048
LONGEST = 4096 + 64
KV_BYTES = {"small": 256 << 20, "wide": 1 << 30}
REQUEST_SECONDS = 180.0
WAKE_SECONDS = 0.3
"""In which connections that have been idle for too long meanwhile are closed."""
ALL_TO_PREFILL = ("who_computes", "prefill")
"""Decode's setting."""
Pairs = tuple[tuple[str, object], ...]


class SideFailedError(Exception):
    """A side did not start, or did not answer rightly."""

    @classmethod
    def to_start(cls, error: StartupError) -> "SideFailedError":
        """With the first error in its log: those after it follow from it."""
        log = error.log.read_text(errors="replace")
        found = re.search(r"ERROR .*?(\w+Error: .*)", log)
        return cls(f"{error.summary}: {found[1] if found else log[-200:]!r}")


@dataclasses.dataclass(frozen=True)
class Pair:
    """The tensor-parallel sizes of prefill and decode."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> "Pair":
        prefill, _, decode = text.partition("/")
        return cls(int(prefill), int(decode))

    def __str__(self) -> str:
        return f"{self.prefill}/{self.decode}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings that all sides of a comparison share. `folder`: of checkpoint and logs."""

    model: str
    path: Path
    pair: Pair
    logs: Path

    def engine(self) -> EngineConfig:
        return EngineConfig(
            max_model_len=LONGEST, max_num_batched_tokens=STEP_TOKENS, kv_cache_bytes=KV_BYTES[self.model]
        )


class TakesTurns:
    """Some processes. Between their turns they are stopped (SIGSTOP), so that they cost nothing."""

    def __init__(self, processes: Sequence[ManagedProcess]) -> None:
        self.processes = processes

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        time.sleep(WAKE_SECONDS)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Before its processes are ended: stopped ones do not end in order."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            process.signal_group(number)


class Side(TakesTurns):
    """Takes requests at `url`, in its turn."""

    answers_rightly = True

    def __init__(
        self, name: str, url: str, model: Path, processes: Sequence[ManagedProcess], logprobs: int = 0
    ) -> None:
        super().__init__(processes)
        self.name = name
        timeout = httpx.Timeout(REQUEST_SECONDS, connect=10)
        self._client = Client(url, model=str(model), timeout=timeout, logprobs=logprobs)

    def ask(self, prompt: Prompt, max_tokens: int, **fields: object) -> Completion:
        """Streams an answer. `fields`: more of the request's body."""
        try:
            return self._client.complete(prompt, max_tokens, stream=True, **fields)
        except (httpx.HTTPError, StreamError) as error:
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            raise SideFailedError(f"{self.name}: {len(prompt)} prompt tokens: {message}") from error

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of all threads that its processes have now, since each began. To the nanosecond:
        a process's own figure counts ticks of 10 ms."""
        pids = [pid for process in self.processes for pid in process.members()]
        nanoseconds = 0
        for file in (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")):
            with suppress(OSError):  # the thread has just ended
                nanoseconds += int(file.read_text().split()[0])
        return nanoseconds / 1e9

    def close(self) -> None:
        super().close()
        self._client.http.close()


@contextmanager
def single(setting: Setting) -> Iterator[Side]:
    """A vLLM instance of prefill's size, without a connector."""
    config = dataclasses.replace(setting.engine(), tp=setting.pair.prefill)
    with (
        running_engines(setting.path, [config], setting.logs) as [engine],
        _taking_turns("single", engine.url, setting, [engine]) as side,
    ):
        yield side


@contextmanager
def ours(setting: Setting, name: str = "ours", extra: Pairs = ()) -> Iterator[Side]:
    """LayerwisePushConnector behind `vllm-ascend-pd proxy`. Prefill computes all prompts, as the peers' does."""
    engine, pair = setting.engine(), setting.pair
    prefill = dataclasses.replace(engine, role=Role.PREFILL, tp=pair.prefill, connector_extra=(*PATIENT, *extra))
    extra = (*PATIENT, ALL_TO_PREFILL, *extra)
    decode = dataclasses.replace(engine, role=Role.DECODE, tp=pair.decode, connector_extra=extra)
    config = ClusterConfig(name, (prefill,), (decode,))
    with running_cluster(setting.path, config, setting.logs) as cluster:
        servers = [cluster.proxy, *cluster.prefill, *cluster.decode]
        with _taking_turns(name, cluster.url, setting, servers) as side:
            yield side


@dataclasses.dataclass(frozen=True)
class PeerEngine(EngineConfig):
    """An engine with another connector than ours."""

    transfer: Pairs = ()

    def transfer_config(self, kv_port: int | None) -> dict[str, object]:
        return {"kv_port": kv_port, **dict(self.transfer), "kv_role": self.role.value}


class PullProxy(Server):
    def __init__(self, logs: Path, *options: str) -> None:
        super().__init__("pull-proxy", None, logs)
        command = [sys.executable, str(HERE / "pull_proxy.py"), *options, "--port", str(self.port)]
        self.process = ManagedProcess(self.name, command, os.environ, self.log)


@contextmanager
def mooncake(setting: Setting) -> Iterator[Side]:
    """vLLM's MooncakeConnector over TCP. It asks for the current accelerator's number, and a plugin says 0: a CPU has
    none."""
    port = reserve_port()
    transfer = {"kv_connector": "MooncakeConnector", "kv_connector_extra_config": {"mooncake_protocol": "tcp"}}
    env = (("VLLM_ASCEND_PD_TEST_ACCELERATOR_0", "1"), ("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(port)))
    base = setting.engine()
    configs = [
        PeerEngine(
            **dataclasses.asdict(base) | {"role": role, "tp": tp, "env": (*base.env, *env)},
            transfer=tuple(transfer.items()),
        )
        for role, tp in ((Role.PREFILL, setting.pair.prefill), (Role.DECODE, setting.pair.decode))
    ]
    with (
        running_engines(setting.path, configs, setting.logs) as engines,
        _pulling(setting, "mooncake", engines, "--bootstrap", f"http://{HOST}:{port}") as side,
    ):
        yield side


@contextmanager
def bare(setting: Setting) -> Iterator[Side]:
    """Two engines without a connector: the cost of there being two, whatever carries KV from one to the other."""
    configs = [dataclasses.replace(setting.engine(), tp=tp) for tp in (setting.pair.prefill, setting.pair.decode)]
    with (
        running_engines(setting.path, configs, setting.logs) as engines,
        _pulling(setting, "bare", engines) as side,
    ):
        side.answers_rightly = False
        yield side


@contextmanager
def _pulling(setting: Setting, name: str, engines: Sequence[Server], *options: str) -> Iterator[Side]:
    urls = [f"--{role}={engine.url}" for role, engine in zip(("prefill", "decode"), engines, strict=True)]
    with _behind(PullProxy(setting.logs, *urls, *options), name, setting, engines) as side:
        yield side


@contextmanager
def _behind(proxy: Server, name: str, setting: Setting, engines: Sequence[Server]) -> Iterator[Side]:
    try:
        wait_ready([proxy])
        with _taking_turns(name, proxy.url, setting, [proxy, *engines]) as side:
            yield side
    finally:
        proxy.stop()


@contextmanager
def _taking_turns(name: str, url: str, setting: Setting, servers: Sequence[Server]) -> Iterator[Side]:
    logprobs = listed_logprobs(setting.engine().dtype)
    with closing(Side(name, url, setting.path, [server.process for server in servers], logprobs)) as side:
        yield side


SIDES: dict[str, Callable[[Setting], AbstractContextManager[Side]]] = {
    "ours": ours,
    "mooncake": mooncake,
    "bare": bare,
    "verified": lambda setting: ours(setting, "verified", (("verify_kv", "all"),)),
}
