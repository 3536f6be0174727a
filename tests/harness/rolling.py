# SPDX-License-Identifier: Apache-2.0
"""Restarts one process of a cluster after the other while clients ask, as an operator does."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from harness.client import Client, at_once, random_prompt
from harness.clusters import PATIENT_PROXY, Cluster, ClusterConfig, Proxy, running_cluster
from harness.engines import Engine, EngineConfig, running_engines, wait_ready
from harness.failures import wait_all_blocks_free
from harness.models import TINY, make_model
from harness.plain_http import PLAIN_HTTP
from harness.waiting import wait_until

CLIENTS = 4
PROMPT_TOKENS = (20, 130, 700, 1500)
DRAIN_S = 120.0
TOKEN = "a-token-of-the-admin-api-of-some-length"


class Load:
    """Clients that ask proxies in turn, as a balancer has them, until `stop`."""

    def __init__(self, proxies: list[Proxy], model: Path) -> None:
        self.proxies = proxies
        self._model = str(model)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()  # requests that have no answer, by proxy; under the lock
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self.answers: dict[int, tuple[int, ...]] = {}
        self._asking = [self._pool.submit(self._ask) for _ in range(CLIENTS)]

    def _ask(self) -> None:
        while not self._stopping.is_set():
            number = next(self._numbers)
            with self._lock:
                url = self.proxies[number % len(self.proxies)].url
                self._asked[url] += 1
            with Client(url, model=self._model) as client:
                self.answers[number] = client.complete(prompt(number), stream=number % 2 == 0).token_ids
            with self._lock:
                self._asked[url] -= 1

    def leave(self, proxy: Proxy) -> None:
        """No client asks the proxy any more. Returns when it has answered."""
        with self._lock:
            self.proxies = [each for each in self.proxies if each is not proxy]
        wait_until(lambda: self._asked[proxy.url] == 0, DRAIN_S)

    def progress(self) -> None:
        """Returns when all clients have got some more answers. Raises what a request failed with."""
        enough = len(self.answers) + 3 * CLIENTS
        wait_until(lambda: len(self.answers) >= enough or any(each.done() for each in self._asking), DRAIN_S)
        if failed := next((each for each in self._asking if each.done()), None):
            failed.result()

    def stop(self) -> None:
        self._stopping.set()
        for each in self._asking:
            each.result()
        self._pool.shutdown()


def prompt(number: int) -> list[int]:
    return random_prompt(PROMPT_TOKENS[number % len(PROMPT_TOKENS)], f"rolling-{number}")


class Admin:
    """The admin API of a proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self._http = httpx.Client(base_url=proxy.url, headers={"Authorization": f"Bearer {TOKEN}"}, **PLAIN_HTTP)

    def engine(self, url: str) -> dict[str, object]:
        [engine] = [each for each in self._http.get("/admin/engines").json()["engines"] if each["url"] == url]
        return engine

    def tell(self, url: str, what: str) -> None:
        self._http.post(f"/admin/engines/{self.engine(url)['id']}:{what}").raise_for_status()

    def in_flight(self) -> int:
        return int(self._http.get("/status.json").json()["requests"]["in_flight"])


def restart_engine(engine: Engine, proxies: list[Proxy], load: Load) -> None:
    """Restarts an engine as docs/operations.md says: drained at all proxies meanwhile."""
    admins = [Admin(proxy) for proxy in proxies]
    for admin in admins:
        admin.tell(engine.url, "drain")
    wait_until(lambda: not any(admin.engine(engine.url)["in_flight"] for admin in admins), DRAIN_S)
    engine.process.stop(30)
    load.progress()  # without it
    engine.start()
    wait_ready([engine])
    for admin in admins:
        admin.tell(engine.url, "undrain")
    load.progress()


def restart_proxy(proxy: Proxy, load: Load) -> None:
    """Restarts a proxy as docs/proxy.md says: no client asks it meanwhile."""
    load.leave(proxy)
    wait_until(lambda: Admin(proxy).in_flight() == 0, DRAIN_S)
    proxy.process.stop(30)
    load.progress()
    proxy.start()
    wait_ready([proxy])
    load.proxies = [*load.proxies, proxy]
    load.progress()


@dataclass
class RollingCluster:
    """Two prefill engines, two decode engines and two proxies, under load."""

    cluster: Cluster
    proxies: list[Proxy]
    load: Load

    @property
    def engines(self) -> list[Engine]:
        return [*self.cluster.prefill, *self.cluster.decode]

    def restart_all(self) -> None:
        for engine in self.engines:
            restart_engine(engine, self.proxies, self.load)
        for proxy in self.proxies:
            restart_proxy(proxy, self.load)


@contextmanager
def cluster_under_load(
    name: str, prefill: EngineConfig, decode: EngineConfig, folder: Path, *proxy_args: str
) -> Iterator[RollingCluster]:
    """At the end, raises what a request failed with, or an AssertionError if an answer has other tokens than a single
    engine's."""
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    args = (*PATIENT_PROXY, "--admin-token-file", str(folder / "token"), *proxy_args)
    with running_cluster(
        make_model(TINY, folder), ClusterConfig(name, (prefill,) * 2, (decode,) * 2, args), folder
    ) as made:
        second = Proxy(made.prefill, made.decode, folder, args=args)
        with ExitStack() as closing:
            closing.callback(second.stop)
            wait_ready([second])
            proxies = [made.proxy, second]
            load = Load([*proxies], made.model)
            try:
                load.progress()
                yield RollingCluster(made, proxies, load)
            finally:
                load.stop()
            wait_all_blocks_free(made)
        answers, model = load.answers, made.model
    with running_engines(model, [EngineConfig()], folder) as [single], Client(single.url, model=str(model)) as client:
        numbers = sorted(answers)
        expected = at_once(lambda number: client.complete(prompt(number)).token_ids, numbers, concurrency=32)
    assert [answers[number] for number in numbers] == expected
