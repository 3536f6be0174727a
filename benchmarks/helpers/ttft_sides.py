# SPDX-License-Identifier: Apache-2.0
"""What `ttft.py` compares: a single vLLM instance, our connector and proxy, vLLM's own connectors and vllm-ascend's."""

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import httpx

from harness import ascend
from harness.agreement import listed_logprobs
from harness.client import Client, Completion, Prompt, StreamError
from harness.clusters import PATIENT_PROXY, ClusterConfig, Proxy, running_cluster
from harness.engines import HOST, PATIENT, EngineConfig, Role, Server, running_engines, wait_ready
from harness.models import WIDE, ModelSpec
from harness.ports import reserve_port
from harness.processes import ManagedProcess, StartupError
from harness.routers import Flow, stand_in
from helpers.turns import TakesTurns

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
ROLES = (Role.PREFILL, Role.DECODE)
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
    traces: str | None = None
    """Name of a folder in `logs` for our engines' traces."""
    npu: bool = False
    """vllm-ascend on emulated CANN libraries."""

    @property
    def first_of_decode(self) -> int:
        """Returns the NPU of decode's first rank, after prefill's cards."""
        return ascend.whole_cards(self.pair.prefill)

    def engine(self, first_device: int = 0) -> EngineConfig:
        config = EngineConfig(
            max_model_len=LONGEST, max_num_batched_tokens=STEP_TOKENS, kv_cache_bytes=KV_BYTES[self.model]
        )
        return ascend.emulated(config, first_device) if self.npu else config


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
def ours(setting: Setting) -> Iterator[Side]:
    """LayerwisePushConnector behind `vllm-ascend-pd proxy`. Prefill computes all prompts, as the peers' does."""
    prefill, decode = _our_engines(setting)
    config = ClusterConfig("ours", (prefill,), (decode,))
    with running_cluster(setting.path, config, setting.logs) as cluster:
        servers = [cluster.proxy, *cluster.prefill, *cluster.decode]
        with _taking_turns("ours", cluster.url, setting, servers) as side:
            yield side


@contextmanager
def together(setting: Setting) -> Iterator[Side]:
    """The same engines behind a router that asks both at once, as vLLM's example proxy for Mooncake does."""
    prefill, decode = _our_engines(setting)
    configs = [dataclasses.replace(prefill, bootstrap=True), decode]
    with (
        running_engines(setting.path, configs, setting.logs) as [first, second],
        stand_in(Flow.VLLM_MOONCAKE, first, second) as router,
        _taking_turns("together", router.url, setting, [first, second]) as side,
    ):
        yield side


def _our_engines(setting: Setting) -> list[EngineConfig]:
    return [
        dataclasses.replace(setting.engine(first), role=role, tp=tp, connector_extra=extra, traces=setting.traces)
        for first, role, tp, extra in (
            (0, Role.PREFILL, setting.pair.prefill, PATIENT),
            (setting.first_of_decode, Role.DECODE, setting.pair.decode, (*PATIENT, ALL_TO_PREFILL)),
        )
    ]


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
    transfer = (("kv_connector_extra_config", {"mooncake_protocol": "tcp"}),)
    env = (("VLLM_ASCEND_PD_TEST_ACCELERATOR_0", "1"), ("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(port)))
    with _peer(
        setting, "mooncake", "MooncakeConnector", transfer, [env, env], "--bootstrap", f"http://{HOST}:{port}"
    ) as side:
        yield side


@contextmanager
def nixl(setting: Setting) -> Iterator[Side]:
    """vLLM's NixlConnector with UCX, which chooses its transport itself."""
    transfer = (("kv_buffer_device", "cpu"),)
    envs = [
        (("VLLM_NIXL_SIDE_CHANNEL_HOST", HOST), ("VLLM_NIXL_SIDE_CHANNEL_PORT", str(reserve_port()))) for _ in range(2)
    ]
    with _peer(setting, "nixl", "NixlConnector", transfer, envs) as side:
        yield side


@contextmanager
def layerwise(setting: Setting) -> Iterator[Side]:
    """vllm-ascend's MooncakeLayerwiseConnector behind our proxy, whose protocol is the same."""
    configs = _peer_engines(setting, "MooncakeLayerwiseConnector", sizes_of(setting.pair))
    with running_engines(setting.path, configs, setting.logs) as [prefill, decode]:
        proxy = Proxy([prefill], [decode], setting.logs, args=PATIENT_PROXY)
        with _behind(proxy, "layerwise", setting, [prefill, decode]) as side:
            yield side


@contextmanager
def v1(setting: Setting) -> Iterator[Side]:
    """vllm-ascend's MooncakeConnectorV1, which pulls."""
    with _peer(setting, "v1", "MooncakeConnectorV1", sizes_of(setting.pair)) as side:
        yield side


@contextmanager
def bare(setting: Setting) -> Iterator[Side]:
    """Two engines without a connector: the cost of there being two, whatever carries KV from one to the other."""
    sizes = ((0, setting.pair.prefill), (setting.first_of_decode, setting.pair.decode))
    configs = [dataclasses.replace(setting.engine(first), tp=tp) for first, tp in sizes]
    with (
        running_engines(setting.path, configs, setting.logs) as engines,
        _pulling(setting, "bare", "none", engines) as side,
    ):
        side.answers_rightly = False
        yield side


def sizes_of(pair: Pair) -> Pairs:
    """What vllm-ascend's connectors want to know of both sides."""
    sizes = {role: {"tp_size": tp, "dp_size": 1} for role, tp in (("prefill", pair.prefill), ("decode", pair.decode))}
    return (("kv_connector_extra_config", sizes),)


@contextmanager
def _peer(
    setting: Setting,
    name: str,
    connector: str,
    transfer: Pairs,
    envs: Sequence[tuple[tuple[str, str], ...]] = ((), ()),
    *options: str,
) -> Iterator[Side]:
    """`envs`: of prefill and decode. `options`: the proxy's."""
    configs = _peer_engines(setting, connector, transfer, envs)
    with (
        running_engines(setting.path, configs, setting.logs) as engines,
        _pulling(setting, name, connector, engines, *options) as side,
    ):
        yield side


@contextmanager
def _pulling(setting: Setting, name: str, connector: str, engines: Sequence[Server], *options: str) -> Iterator[Side]:
    urls = [f"--{role}={engine.url}" for role, engine in zip(("prefill", "decode"), engines, strict=True)]
    with _behind(PullProxy(setting.logs, "--connector", connector, *urls, *options), name, setting, engines) as side:
        yield side


def _peer_engines(
    setting: Setting, connector: str, transfer: Pairs, envs: Sequence[tuple[tuple[str, str], ...]] = ((), ())
) -> list[PeerEngine]:
    sizes = ((0, setting.pair.prefill), (setting.first_of_decode, setting.pair.decode))
    configs = []
    for role, (first, tp), env in zip(ROLES, sizes, envs, strict=True):
        base = setting.engine(first)
        own = {"role": role, "tp": tp, "env": (*base.env, *env), "transfer": (("kv_connector", connector), *transfer)}
        configs.append(PeerEngine(**(dataclasses.asdict(base) | own)))
    return configs


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
    side = Side(name, url, setting.path, [server.process for server in servers], logprobs)
    try:
        yield side
    finally:
        side.close()


SIDES: dict[str, Callable[[Setting], AbstractContextManager[Side]]] = {
    "ours": ours,
    "together": together,
    "mooncake": mooncake,
    "nixl": nixl,
    "layerwise": layerwise,
    "v1": v1,
    "bare": bare,
}
ON_CPU, ON_NPU = ("ours", "together", "mooncake", "nixl", "bare"), ("ours", "layerwise", "v1", "bare")
