# SPDX-License-Identifier: Apache-2.0
"""vLLM engines, started with the documented `vllm serve` command line."""

import contextlib
import dataclasses
import enum
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from harness.models import ModelSpec, make_model
from harness.plain_http import PLAIN_HTTP
from harness.ports import release_port, reserve_ports
from harness.prefork import can_fork
from harness.processes import ManagedProcess, wait_all_healthy
from vllm_ascend_pd.core.config import ConnectorConfig, UserConfig
from vllm_ascend_pd.core.hosts import authority

HOST = "127.0.0.1"
PLUGINS = Path(__file__).resolve().parents[1] / "plugins"
START_SECONDS = 480.0
"""An engine alone starts in 15 s, four at once on two busy cores in two minutes."""

CPU_ENV = {
    "VLLM_HOST_IP": HOST,
    "VLLM_LOOPBACK_IP": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
    # Several workers share few cores: one thread each, not bound to a core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_ASCEND_PD_TEST_SHORT_SPIN": "1",
    "VLLM_ASCEND_PD_TEST_HOLD_PORTS": "1",
}


FIXED = {*ConnectorConfig.__struct_fields__} - {*UserConfig.__struct_fields__}

PATIENT: tuple[tuple[str, object], ...] = (
    ("write_timeout_s", 30.0),
    ("control_timeout_s", 15.0),
    ("grant_timeout_s", 60.0),
    ("lease_s", 45.0),
)
"""Connector settings for tests that are not about time: a shared machine may stop a process for many seconds."""


def plugins_on_path() -> dict[str, str]:
    """Returns this process's PYTHONPATH with the tests' plugins first."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(PLUGINS), os.environ.get("PYTHONPATH")]))}


class Role(enum.StrEnum):
    """`kv_role` of an engine. A `SINGLE` engine has no connector."""

    SINGLE = "single"
    PREFILL = "kv_producer"
    DECODE = "kv_consumer"


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine, apart from its model and its ports."""

    role: Role = Role.SINGLE
    tp: int = 1
    pp: int = 1
    dp: int = 1
    """Data-parallel engines behind one API server."""
    device: str = "cpu"
    token_major: bool = False
    prefix_caching: bool = True
    dtype: str = "float32"
    """float32: greedy tokens stay equal across tensor-parallel sizes."""
    block_size: int | None = 128
    """Tokens; None leaves it, as the other optional sizes, to vLLM."""
    max_model_len: int | None = 4096
    max_num_batched_tokens: int | None = 512
    kv_cache_bytes: int | None = 64 << 20
    """Per rank."""
    eager: bool = True
    """Not compiled: quick to start."""
    host: str = HOST
    """The address that it listens at. On the CPU backend, also the one that others reach its ranks by."""
    port: int | None = None
    """None: a free one, as for `kv_port`."""
    kv_port: int | None = None
    engine_id: str | None = None
    """None: vLLM makes one up at each start."""
    load_failure_policy: str | None = None
    """`kv_load_failure_policy`: "fail" or "recompute"; None leaves it to vLLM."""
    connector_extra: tuple[tuple[str, object], ...] = ()
    """`kv_connector_extra_config`, as pairs so that the config stays hashable. Fields of `ConnectorConfig` that users
    cannot set are set by the tests' plugin."""
    bootstrap: bool = False
    """A prefill engine answers routers for Mooncake, on `Engine.bootstrap_port`."""
    who_computes: str | None = "prefill"
    """The key of this name, on decode. By default prompts are transferred however short they are. None leaves it."""
    traces: str | None = None
    """Name of a folder beside the logs for `trace_dir`."""
    beside: tuple[tuple[str, object], ...] = ()
    """`kv_connector_extra_config` of another connector, which then runs beside ours below a MultiConnector."""
    beside_connector: str = "ExampleConnector"
    """Its name. vLLM's ExampleConnector keeps KV in files. So does the tests' FailingPool (`failing_pool.py`)."""
    ours_first: bool = True
    speculative: tuple[tuple[str, object], ...] = ()
    """`--speculative-config`, as pairs. A `ModelSpec` as its model stands for that model's folder."""
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def compiled(self) -> bool:
        """PP > 1 on vLLM's CPU backend does not run otherwise."""
        return not self.eager or (self.pp > 1 and self.device == "cpu")

    @property
    def label(self) -> str:
        """For logs: `prefill-tp2`."""
        parallel = f"tp{self.tp}" + (f"pp{self.pp}" if self.pp > 1 else "") + (f"dp{self.dp}" if self.dp > 1 else "")
        name = {Role.SINGLE: "single", Role.PREFILL: "prefill", Role.DECODE: "decode"}[self.role]
        return f"{name}-{parallel}"

    def command(self, model: Path, port: int, kv_port: int | None) -> list[str]:
        """The `vllm serve` command line."""
        command = [script("vllm"), "serve", str(model), "--host", self.host, "--port", str(port)]
        command += ["--tensor-parallel-size", str(self.tp), "--dtype", self.dtype]
        command += ["--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"]
        sizes = {
            "--block-size": self.block_size,
            "--max-model-len": self.max_model_len,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--kv-cache-memory-bytes": self.kv_cache_bytes,
        }
        for option, size in sizes.items():
            if size is not None:
                command += [option, str(size)]
        if self.pp > 1:
            command += ["--pipeline-parallel-size", str(self.pp)]
        if self.dp > 1:
            command += ["--data-parallel-size", str(self.dp)]
        if not self.compiled:
            command += ["--enforce-eager"]
        if self.speculative:
            command += ["--speculative-config", json.dumps(self.speculative_config(model.parent))]
        if self.role is not Role.SINGLE:
            command += ["--kv-transfer-config", json.dumps(self.transfer_config(kv_port))]
        return [*command, *self.args]

    def speculative_config(self, models: Path) -> dict[str, object]:
        """`--speculative-config`; makes the model that drafts in the folder `models`, where it is missing."""
        return {
            name: str(make_model(value, models)) if isinstance(value, ModelSpec) else value
            for name, value in self.speculative
        }

    def transfer_config(self, kv_port: int | None) -> dict[str, object]:
        """`--kv-transfer-config`."""
        ours: dict[str, object] = {
            "kv_connector": "LayerwisePushConnector",
            "kv_role": self.role.value,
            "kv_port": kv_port,
        }
        if self.engine_id is not None:
            ours["engine_id"] = self.engine_id
        if self.load_failure_policy is not None:
            ours["kv_load_failure_policy"] = self.load_failure_policy
        extra = {name: value for name, value in self.connector_extra if name not in FIXED}
        if self.role is Role.DECODE and self.who_computes is not None:
            extra.setdefault("who_computes", self.who_computes)
        if self.role is Role.DECODE:
            # What "auto" does depends on when the proxy has read prefill's metrics.
            extra.setdefault("prefill_first_tokens", None)
        if extra:
            ours["kv_connector_extra_config"] = extra
        if not self.beside:
            return ours
        other = {
            "kv_connector": self.beside_connector,
            "kv_role": self.role.value if self.beside_connector == "AscendStoreConnector" else "kv_both",
            "kv_connector_extra_config": dict(self.beside),
        }
        if self.beside_connector == "FailingPool":
            other["kv_connector_module_path"] = "failing_pool"
        both: dict[str, object] = {
            "kv_connector": "MultiConnector",
            "kv_role": self.role.value,
            "kv_connector_extra_config": {"connectors": [ours, other] if self.ours_first else [other, ours]},
        }
        if self.load_failure_policy is not None:
            both["kv_load_failure_policy"] = self.load_failure_policy
        return both

    def environment(self) -> dict[str, str]:
        """The whole environment of the engine's processes."""
        env = os.environ | {"PYTHONFAULTHANDLER": "1"}  # says where a process was that is aborted
        if self.device == "cpu":
            env |= CPU_ENV | {"VLLM_HOST_IP": self.host, "VLLM_LOOPBACK_IP": self.host}
            if not self.compiled:
                # With TP > 1 the first request would wait for the embedding's function, 20 s of both cores.
                env["TORCH_COMPILE_DISABLE"] = "1"
            if self.speculative:
                env["VLLM_ASCEND_PD_TEST_DRAFTS"] = "1"
            if self.dtype == "float32":
                env["VLLM_ASCEND_PD_TEST_FLOAT32_STATES"] = "1"
        env |= plugins_on_path()
        if self.token_major:
            env["VLLM_ASCEND_PD_TEST_TOKEN_MAJOR"] = "1"
        if fixed := {name: value for name, value in self.connector_extra if name in FIXED}:
            env["VLLM_ASCEND_PD_TEST_FIXED"] = json.dumps(fixed)
        return env | dict(self.env)


class Server:
    """A process that serves HTTP, with ports that it owns until `stop`."""

    def __init__(self, name: str, port: int | None, logs: Path, host: str = HOST) -> None:
        self.name = name
        self._reserved: list[int] = []
        self.port = self._reserve() if port is None else port
        self.url = f"http://{authority(host, self.port)}"
        self.log = logs / f"{name}-{self.port}.log"
        self.process: ManagedProcess

    def _reserve(self, count: int = 1) -> int:
        """Reserves `count` ports in a row. Returns the first one."""
        ports = reserve_ports(count)
        self._reserved += ports
        return ports[0]

    def stop(self, grace: float = 10) -> None:
        self.process.stop(grace)
        while self._reserved:
            release_port(self._reserved.pop())

    def metric(self, name: str) -> float:
        """The sum of a Prometheus metric's samples, whatever their labels; 0 if it has none yet."""
        return sum(value for _, value in self.samples(name))

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """A Prometheus metric's samples: labels and value."""
        text = httpx.get(f"{self.url}/metrics", timeout=10, **PLAIN_HTTP).text
        lines = re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        return [(dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for labels, value in lines]


class Engine(Server):
    """A `vllm serve` process."""

    traces: Path
    """Of one that traces."""
    bootstrap_port: int
    """Of one with `bootstrap`."""

    def __init__(self, config: EngineConfig, model: Path, logs: Path) -> None:
        super().__init__(config.label, config.port, logs, config.host)
        self.config = config
        self.kv_port = config.kv_port
        if self.kv_port is None and config.role is not Role.SINGLE:
            self.kv_port = self._reserve(config.dp)  # each data-parallel engine listens on one
        if config.traces is not None:
            self.traces = logs / config.traces
            config = dataclasses.replace(
                config, connector_extra=(*config.connector_extra, ("trace_dir", str(self.traces)))
            )
        if config.bootstrap:
            self.bootstrap_port = self._reserve()
            variable = ("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(self.bootstrap_port))
            config = dataclasses.replace(config, env=(*config.env, variable))
        self._command = config.command(model, self.port, self.kv_port)
        self.environment = config.environment()
        """From the next start on."""
        if config.compiled:
            # Its own: engines that compile at the same time would write the same files.
            cache = logs / f"{self.name}-{self.port}-cache"
            self.environment |= {"VLLM_CACHE_ROOT": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
        self.start()

    def start(self) -> None:
        """With what it was made with; again, after its `process` was stopped or killed."""
        forked = not self.config.compiled and can_fork(self.environment)
        self.process = ManagedProcess(self.name, self._command, self.environment, self.log, forked)


OnHealthy = Callable[[ManagedProcess, float], None]


def ignore(process: ManagedProcess, seconds: float) -> None:
    pass


def wait_ready(servers: Sequence[Server], on_healthy: OnHealthy = ignore, seconds: float = START_SECONDS) -> None:
    """Returns once every server answers `GET /health`. If one cannot, stops all and raises `StartupError`."""
    try:
        health = {server.process: f"{server.url}/health" for server in servers}
        wait_all_healthy(health, seconds, on_healthy)
    except BaseException:
        stop_all(servers, grace=0)
        raise


def stop_all(servers: Sequence[Server], grace: float = 10) -> None:
    """Stops several servers at once, so that it takes no longer than the slowest."""
    if servers:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.stop(grace), servers))


@contextlib.contextmanager
def running_engines(
    model: Path,
    configs: Sequence[EngineConfig],
    logs: Path,
    on_healthy: OnHealthy = ignore,
    seconds: float = START_SECONDS,
) -> Iterator[list[Engine]]:
    """Engines of one model, started side by side and stopped together."""
    engines = [Engine(config, model, logs) for config in configs]
    wait_ready(engines, on_healthy, seconds)
    try:
        yield engines
    finally:
        stop_all(engines)


def script(name: str) -> str:
    """Returns the path of a command: that of the running interpreter if it has one, else the one on PATH."""
    own = Path(sys.executable).with_name(name)
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"command {name!r} not found beside {sys.executable} or on PATH")
    return found
