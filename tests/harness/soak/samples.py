# SPDX-License-Identifier: Apache-2.0
"""Samples what every server's processes hold, over time."""

import dataclasses
import itertools
import re
import statistics
from collections.abc import Sequence

import httpx
import psutil

from harness.clusters import Cluster
from harness.engines import Engine, Server

METRICS_SECONDS = 10
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Sample:
    """What all processes of one server hold at one time."""

    server: str
    pid: int
    """Of the server's first process: another one is another life."""
    resident_bytes: int
    """The sum over its processes: what they share is counted for each."""
    threads: int
    files: int
    """Open file descriptors."""


@dataclasses.dataclass(frozen=True)
class Growth:
    resident_mib: float
    threads: int
    files: int

    def __str__(self) -> str:
        return f"{self.resident_mib:+.1f} MiB, {self.threads:+d} threads, {self.files:+d} files"


def servers(cluster: Cluster) -> list[Server]:
    return [*cluster.prefill, *cluster.decode, cluster.proxy]


async def take(cluster: Cluster, http: httpx.AsyncClient) -> list[Sample]:
    """One sample of each server that answers. An engine that is starting does not."""
    samples = []
    for server in servers(cluster):
        members = _members(server.process.members())
        if members and await metrics(server, http):
            held = (sum(values) for values in zip(*members, strict=True))
            samples.append(Sample(server.name, server.process.pid, *held))
    return samples


def _members(pids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Resident bytes, threads and open files of each process that is still there."""
    result = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            result.append((process.memory_info().rss, process.num_threads(), process.num_fds()))
        except psutil.Error:  # it has just ended
            continue
    return result


async def held(engine: Engine, http: httpx.AsyncClient) -> tuple[int, float]:
    """Used KV blocks by vLLM's own count, where cached blocks count as free, and requests that run or wait there."""
    text = await metrics(engine, http)
    total = re.search(r'num_gpu_blocks="(\d+)"', text)
    assert total is not None, f"{engine.name} does not say what it holds"
    blocks = int(total[1]) - 1  # one is the null block, which nobody gets
    requests = sum(value_of(text, f"vllm:num_requests_{state}") for state in ("running", "waiting"))
    return round(value_of(text, "vllm:kv_cache_usage_perc") * blocks), requests


async def metrics(server: Server, http: httpx.AsyncClient) -> str:
    """Returns the text of `/metrics`; none if the server does not answer."""
    try:
        return (await http.get(f"{server.url}/metrics", timeout=METRICS_SECONDS)).text
    except httpx.TransportError:
        return ""


def value_of(text: str, metric: str) -> float:
    """Returns the sum over a metric's labels."""
    return sum(map(float, re.findall(rf"^{re.escape(metric)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


def growth(samples: Sequence[Sample]) -> dict[str, Growth]:
    """Returns the growth by server: the median of the last tenth of samples less that of the first tenth, in the
    server's longest life.
    """
    result = {}
    for server in dict.fromkeys(sample.server for sample in samples):
        own = [sample for sample in samples if sample.server == server]
        longest = max((list(life) for _, life in itertools.groupby(own, key=lambda sample: sample.pid)), key=len)
        tenth = max(1, len(longest) // 10)
        first, last = longest[:tenth], longest[-tenth:]
        result[server] = Growth(
            resident_mib=round((_median(last, "resident_bytes") - _median(first, "resident_bytes")) / MIB, 1),
            threads=round(_median(last, "threads") - _median(first, "threads")),
            files=round(_median(last, "files") - _median(first, "files")),
        )
    return result


def _median(samples: Sequence[Sample], field: str) -> float:
    return statistics.median(getattr(sample, field) for sample in samples)
