# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode engines of one model behind a proxy."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.engines import (
    HOST,
    PATIENT,
    START_SECONDS,
    Engine,
    EngineConfig,
    OnHealthy,
    Role,
    Server,
    ignore,
    running_engines,
    script,
    wait_ready,
)
from harness.models import CHAT_TEMPLATE, TINY, ModelSpec
from harness.processes import ManagedProcess

if TYPE_CHECKING:
    from harness.collector import Collector

PATIENT_PROXY = ("--probe-timeout", "60")
"""As `PATIENT`, for the proxy."""


class HasUrl(Protocol):
    url: str


class Proxy(Server):
    """A `vllm-ascend-pd proxy` process in front of running engines."""

    def __init__(
        self,
        prefill: Sequence[HasUrl],
        decode: Sequence[HasUrl],
        logs: Path,
        port: int | None = None,
        args: Sequence[str] = (),
        host: str = HOST,
    ) -> None:
        super().__init__("proxy", port, logs, host)
        command = [script("vllm-ascend-pd"), "proxy", "--host", host, "--port", str(self.port)]
        for option, engines in (("--prefill", prefill), ("--decode", decode)):
            for engine in engines:
                command += [option, engine.url]
        self._command = [*command, *args]
        self.start()

    def start(self) -> None:
        """Again, after its `process` was stopped or killed."""
        self.process = ManagedProcess(self.name, self._command, os.environ, self.log)


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Prefill and decode engines of one model behind a proxy, and the single engine that they are compared with
    (None: the suite's own, the fixture `single_engine`)."""

    name: str
    prefill: tuple[EngineConfig, ...]
    decode: tuple[EngineConfig, ...]
    proxy_args: tuple[str, ...] = PATIENT_PROXY
    model: ModelSpec = TINY
    single: EngineConfig | None = None
    spans: bool = False
    """Engines send their spans to `Cluster.collector`."""

    def __str__(self) -> str:
        return self.name


POISONED_TOKENS = 777
"""Prompts of this length cannot be sent in any `one_to_one` cluster: see `tests/plugins/faults.py`."""
LOSING_TOKENS = 900
"""Prompts whose ticket is for `LOSING_TOKENS + i` tokens lose tensor `i` there, and nobody notices but the client."""
FAULTS = (
    ("VLLM_ASCEND_PD_TEST_POISON_TOKENS", str(POISONED_TOKENS)),
    ("VLLM_ASCEND_PD_TEST_LOSE_TENSORS_FROM", str(LOSING_TOKENS)),
)
"""Environment of prefill engines that do so."""


PLAIN = EngineConfig(args=("--enable-prompt-tokens-details",), env=(("VLLM_SERVER_DEV_MODE", "1"),))
"""It says in `usage` what was cached, forgets prefixes on request, and takes other weights."""


def one_to_one(
    prefill_tp: int,
    decode_tp: int,
    *,
    token_major: bool = False,
    model: ModelSpec = TINY,
    engine: EngineConfig = PLAIN,
) -> ClusterConfig:
    """Returns one prefill and one decode engine. Both are like `engine` except for their size, and are compared with
    it. Prefill answers routers for Mooncake, too.
    """
    order = "token-major" if token_major else "head-major"
    kind = order if model is TINY else model.name
    side = dataclasses.replace(engine, token_major=token_major, connector_extra=PATIENT)
    prefill = dataclasses.replace(side, role=Role.PREFILL, tp=prefill_tp, env=(*engine.env, *FAULTS), bootstrap=True)
    return ClusterConfig(
        name=f"{kind}-tp{prefill_tp}-to-tp{decode_tp}",
        prefill=(prefill,),
        decode=(dataclasses.replace(side, role=Role.DECODE, tp=decode_tp),),
        model=model,
        single=engine,
    )


TP2_TO_TP1 = one_to_one(2, 1)
"""Which most end-to-end tests share."""
TEMPLATE_OF_EQUAL_LENGTH = CHAT_TEMPLATE.replace("<{{", "[{{")
"""As a template with a date has, or one of another version of the model."""
_TRACED = one_to_one(2, 1, token_major=True, engine=dataclasses.replace(PLAIN, traces="traces"))
TRACED = dataclasses.replace(
    _TRACED,
    prefill=(dataclasses.replace(_TRACED.prefill[0], args=(*PLAIN.args, "--chat-template", TEMPLATE_OF_EQUAL_LENGTH)),),
    decode=(
        dataclasses.replace(
            _TRACED.decode[0], args=(*PLAIN.args, "--enable-auto-tool-choice", "--tool-call-parser", "pythonic")
        ),
    ),
    single=PLAIN,
)
"""Token-major, prefill TP 2, decode TP 1. They trace to a folder beside the logs. Prefill has another chat template.
Decode alone takes tools."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A running cluster. `model`: the folder of the model that it serves."""

    config: ClusterConfig
    model: Path
    prefill: list[Engine]
    decode: list[Engine]
    proxy: Proxy
    collector: "Collector | None" = None
    """Of one that sends spans."""

    @property
    def url(self) -> str:
        return self.proxy.url


@contextlib.contextmanager
def running_cluster(
    model: Path,
    config: ClusterConfig,
    logs: Path,
    port: int | None = None,
    on_healthy: OnHealthy = ignore,
    seconds: float = START_SECONDS,
) -> Iterator[Cluster]:
    """A cluster whose engines start side by side; `port` is the proxy's."""
    with contextlib.ExitStack() as running:
        collector, traces, soon = None, (), ()
        if config.spans:
            from harness.collector import Collector  # others do without OpenTelemetry

            collector = running.enter_context(Collector())
            traces = ("--otlp-traces-endpoint", collector.url)
            soon = (("OTEL_BSP_SCHEDULE_DELAY", "200"),)  # milliseconds, instead of 5 s
        configs = [
            dataclasses.replace(each, args=(*each.args, *traces), env=(*each.env, *soon))
            for each in (*config.prefill, *config.decode)
        ]
        engines = running.enter_context(running_engines(model, configs, logs, on_healthy, seconds))
        prefill, decode = engines[: len(config.prefill)], engines[len(config.prefill) :]
        proxy = Proxy(prefill, decode, logs, port, config.proxy_args, config.decode[0].host)
        wait_ready([proxy], on_healthy)
        try:
            yield Cluster(config, model, prefill, decode, proxy, collector)
        finally:
            proxy.stop()
