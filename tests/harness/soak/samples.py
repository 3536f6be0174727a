# SPDX-License-Identifier: Apache-2.0
"""Samples what every server's processes hold, over time."""

import csv
import itertools
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx
import msgspec
import psutil

from harness.clusters import Cluster, Proxy
from harness.engines import Engine, Server

METRICS_SECONDS = 10
MIB = 1 << 20


class Sample(msgspec.Struct, frozen=True):
    """What all processes of one server hold at one time."""

    at: float
    server: str
    pid: int
    """Of the server's first process: another one is another life."""
    processes: int
    resident_bytes: int
    """The sum over its processes: what they share is counted for each."""
    threads: int
    files: int
    """Open file descriptors."""
    used_blocks: int | None
    """Of KV cache, and how many are free; None where there is none, or the engine does not answer."""
    free_blocks: int | None
    retries: int | None
    """Of the proxy since it started; None for others, or if it does not answer."""
    requests_done: int

    @property
    def serves(self) -> bool:
        """It answered: an engine that is starting does not."""
        return self.used_blocks is not None or self.retries is not None


FIELDS = Sample.__struct_fields__


class Growth(msgspec.Struct, frozen=True):
    resident_mib: float
    threads: int
    files: int

    def __str__(self) -> str:
        return f"{self.resident_mib:+.1f} MiB, {self.threads:+d} threads, {self.files:+d} files"


def servers(cluster: Cluster) -> list[tuple[str, Server]]:
    """Returns the servers with their names in samples."""
    engines: list[tuple[str, Server]] = [(name(engine), engine) for engine in (*cluster.prefill, *cluster.decode)]
    return [*engines, ("proxy", cluster.proxy)]


def name(engine: Engine) -> str:
    """Returns a server's name. Prefill engines differ by their sizes."""
    return engine.config.label


async def take(cluster: Cluster, http: httpx.AsyncClient, requests_done: int) -> list[Sample]:
    """One sample of each server that has processes."""
    samples = []
    for server_name, server in servers(cluster):
        members = _members(server.process.members())
        used, free = await blocks(server, http) if isinstance(server, Engine) else (None, None)
        tried_again = await retries(server, http) if isinstance(server, Proxy) else None
        if members:
            resident, threads, files = (sum(values) for values in zip(*members, strict=True))
            samples.append(
                Sample(
                    at=time.time(),
                    server=server_name,
                    pid=server.process.pid,
                    processes=len(members),
                    resident_bytes=resident,
                    threads=threads,
                    files=files,
                    used_blocks=used,
                    free_blocks=free,
                    retries=tried_again,
                    requests_done=requests_done,
                )
            )
    return samples


def _members(pids: Iterable[int]) -> list[tuple[int, int, int]]:
    """Resident bytes, threads and open files of each process that is still there."""
    result = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            result.append((process.memory_info().rss, process.num_threads(), process.num_fds()))
        except psutil.Error:  # it has just ended
            continue
    return result


async def blocks(engine: Engine, http: httpx.AsyncClient) -> tuple[int | None, int | None]:
    """Used and free KV blocks by vLLM's own count, where cached blocks count as free; None while it is not up."""
    text = await metrics(engine, http)
    usage, total = _value(text, "vllm:kv_cache_usage_perc"), re.search(r'num_gpu_blocks="(\d+)"', text)
    if usage is None or total is None:
        return None, None
    count = int(total[1]) - 1  # one is the null block, which nobody gets
    used = round(usage * count)
    return used, count - used


async def busy(engine: Engine, http: httpx.AsyncClient) -> float | None:
    """Requests that it runs or that wait there; None while it is not up."""
    text = await metrics(engine, http)
    running, waiting = (_value(text, f"vllm:num_requests_{state}") for state in ("running", "waiting"))
    return None if running is None or waiting is None else running + waiting


async def retries(proxy: Proxy, http: httpx.AsyncClient) -> int | None:
    """Returns the retries of both roles."""
    try:
        text = (await http.get(f"{proxy.url}/metrics", timeout=METRICS_SECONDS)).text
    except httpx.TransportError:
        return None
    return round(_value(text, "vllm:kv_pd_proxy_retries_total") or 0)


async def metrics(engine: Engine, http: httpx.AsyncClient) -> str:
    try:
        return (await http.get(f"{engine.url}/metrics", timeout=METRICS_SECONDS)).text
    except httpx.TransportError:
        return ""


def _value(text: str, metric: str) -> float | None:
    values = re.findall(rf"^{re.escape(metric)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values)) if values else None


def append(path: Path, samples: Iterable[Sample]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        writer.writerows([getattr(sample, field) for field in FIELDS] for sample in samples)


def read(path: Path) -> list[Sample]:
    """Reads a file of samples. Leaves a line out that a kill cut off."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    optional = ("used_blocks", "free_blocks", "retries")
    cleaned = [{k: None if k in optional and v == "" else v for k, v in row.items()} for row in rows]
    return [msgspec.convert(row, Sample, strict=False) for row in cleaned]


def total_retries(samples: Sequence[Sample]) -> int:
    """Returns the retries of all proxies that ran."""
    by_proxy: dict[int, int] = {}
    for sample in samples:
        if sample.retries is not None:
            by_proxy[sample.pid] = sample.retries
    return sum(by_proxy.values())


def growth(samples: Sequence[Sample]) -> dict[str, Growth]:
    """Returns the growth by server: the median of the last tenth of samples less that of the first tenth, in the
    server's longest life.
    """
    result = {}
    for server in dict.fromkeys(sample.server for sample in samples):
        own = [sample for sample in samples if sample.server == server and sample.serves]
        if not own:
            continue
        lives = [list(life) for _, life in itertools.groupby(own, key=lambda sample: sample.pid)]
        longest = max(lives, key=len)
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
