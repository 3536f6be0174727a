# SPDX-License-Identifier: Apache-2.0
"""Runs the soak: the right answers, then all requests, with one prefill engine's end and return in the middle."""

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx

from harness.clusters import Cluster, ClusterConfig, running_cluster
from harness.engines import START_SECONDS, Engine, EngineConfig, Role, running_engines
from harness.failures import FREE_WITHIN_S
from harness.models import MTP, make_model
from harness.plain_http import PLAIN_HTTP
from harness.processes import StartupError
from harness.soak import samples
from harness.soak.answers import Answer, ask_for_answers
from harness.soak.ledger import Ledger, Summary, summarize
from harness.soak.load import Load
from harness.soak.workload import MAX_MODEL_LEN, Request, Workload

TIMES = (
    # Shorter than `load.HANG_SECONDS`, and long enough for a machine that others use too.
    ("transfer_timeout_s", 150.0),
    ("control_timeout_s", 15.0),
    ("grant_timeout_s", 60.0),
    ("verify_kv", "all"),
)
CONCURRENCY = 12
POLL_SECONDS = 0.2
SAMPLE_SECONDS = 2.0
LONG_PROMPT = 800

SINGLE = EngineConfig(block_size=64, max_model_len=MAX_MODEL_LEN)
_MTP_LAYER = (("method", "mtp"), ("num_speculative_tokens", 3))
_PREFILL = dataclasses.replace(SINGLE, role=Role.PREFILL, connector_extra=TIMES, speculative=_MTP_LAYER)
# Room for an eighth more than the longest request: the requests at once preempt each other.
_DECODE = dataclasses.replace(_PREFILL, role=Role.DECODE, kv_cache_bytes=MTP.kv_bytes_per_token * 2 * 2304)
CLUSTER = ClusterConfig("soak", (dataclasses.replace(_PREFILL, tp=2), _PREFILL), (_DECODE,))
"""Prefix caching is on, prompts longer than 512 tokens are prefilled in chunks, an MTP layer drafts on both sides, and
decode preempts."""


def soak(folder: Path, requests: int) -> Summary:
    """Sends so many requests. `folder`: of models and logs."""
    workload = Workload(seed=0)
    model = make_model(MTP, folder / "models")
    with running_engines(model, [SINGLE], folder) as [engine]:
        answers = asyncio.run(ask_for_answers(engine.url, str(model), workload, requests))
    with running_cluster(model, CLUSTER, folder) as cluster:
        return asyncio.run(Run(cluster, list(workload.requests(requests)), answers).serve())


class Run:
    """A running cluster under load."""

    def __init__(self, cluster: Cluster, requests: list[Request], answers: list[Answer]) -> None:
        self._cluster = cluster
        self._requests = requests
        self._answers = answers
        self._ledger = Ledger()
        self._samples: list[samples.Sample] = []
        self._restarting: Engine | None = None
        self._restarted = asyncio.Event()
        self._long_prompt_sent = asyncio.Event()

    async def serve(self) -> Summary:
        """Serves until all requests have ended and the engines hold nothing any more."""
        # A connection per request: on a busy machine this process may be stopped for longer than an idle one lives.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=self._cluster.url, timeout=None, limits=limits, **PLAIN_HTTP) as http,
            httpx.AsyncClient(**PLAIN_HTTP) as engines,
        ):
            load, pending = Load(http, str(self._cluster.model)), iter(self._requests)
            async with asyncio.TaskGroup() as group:
                sampling = group.create_task(self._sample(engines))
                async with asyncio.TaskGroup() as serving:
                    serving.create_task(self._restart_in_the_middle(engines))
                    for _ in range(CONCURRENCY):
                        serving.create_task(self._ask_next(load, pending))
                sampling.cancel()
            leaked = await self._leaked_blocks(engines)
            self._samples += await samples.take(self._cluster, engines)
            proxy, decode = [
                await samples.metrics(server, engines) for server in (self._cluster.proxy, self._cluster.decode[0])
            ]
        counted = {
            "retries": round(samples.value_of(proxy, "vllm:kv_pd_proxy_retries_total")),
            "preemptions": round(samples.value_of(decode, "vllm:num_preemptions_total")),
            "verified": round(samples.value_of(decode, "vllm:kv_pd_verified_total")),
        }
        return summarize(self._ledger, leaked, counted, samples.growth(self._samples))

    async def _ask_next(self, load: Load, pending: Iterator[Request]) -> None:
        for request in pending:
            if request.number >= len(self._requests) * 3 // 4:  # the last quarter has all engines again
                await self._restarted.wait()
            answer = self._answers[request.prompt]
            if len(answer.prompt) > LONG_PROMPT:
                self._long_prompt_sent.set()
            self._ledger.finished.append(await load.ask(request, answer.prompt, answer.tokens))

    async def _restart_in_the_middle(self, http: httpx.AsyncClient) -> None:
        """Kills and restarts an engine, just after a long prompt was sent to it, so that it is busy."""
        while len(self._ledger.finished) < len(self._requests) // 2:
            await asyncio.sleep(POLL_SECONDS)
        self._long_prompt_sent.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._long_prompt_sent.wait(), 10)
        await asyncio.sleep(POLL_SECONDS)
        engine = self._restarting = self._cluster.prefill[0]
        self._ledger.killed = time.time()
        await asyncio.to_thread(engine.process.kill)
        engine.start()
        start = time.monotonic()
        while not await _is_healthy(engine, http):
            if engine.process.exit_code is not None or time.monotonic() - start > START_SECONDS:
                raise StartupError(engine.process, "did not come back")
            await asyncio.sleep(POLL_SECONDS)
        self._restarting = None
        self._ledger.back = time.time()
        self._restarted.set()

    async def _leaked_blocks(self, http: httpx.AsyncClient) -> int:
        """Returns 0 as soon as no engine is busy or holds a block. After `FREE_WITHIN_S`, returns what they hold."""
        deadline = time.monotonic() + FREE_WITHIN_S
        while True:
            engines = (*self._cluster.prefill, *self._cluster.decode)
            blocks, requests = zip(*[await samples.held(engine, http) for engine in engines], strict=True)
            if not any((*blocks, *requests)):
                return 0
            if time.monotonic() > deadline:
                return max(sum(blocks), 1)
            await asyncio.sleep(POLL_SECONDS)

    async def _sample(self, http: httpx.AsyncClient) -> None:
        """Takes samples until it is cancelled, or a process has ended by itself."""
        while True:
            for server in samples.servers(self._cluster):
                if server is not self._restarting and server.process.exit_code is not None:
                    raise StartupError(server.process, f"ended with code {server.process.exit_code}")
            self._samples += await samples.take(self._cluster, http)
            await asyncio.sleep(SAMPLE_SECONDS)


async def _is_healthy(engine: Engine, http: httpx.AsyncClient) -> bool:
    with suppress(httpx.TransportError):
        return (await http.get(f"{engine.url}/health", timeout=2)).is_success
    return False
