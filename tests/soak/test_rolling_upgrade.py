# SPDX-License-Identifier: Apache-2.0
"""A rolling upgrade under load: every engine from vLLM 0.23 to 0.30, then both proxies, one after another.

As docs/operations.md and docs/proxy.md say it is done. No request fails, and each has a single engine's tokens.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import PATIENT_PROXY, Cluster, ClusterConfig, Proxy, running_cluster
from harness.engines import PATIENT, Engine, EngineConfig, Role, running_engines, wait_ready
from harness.failures import wait_all_blocks_free
from harness.models import TINY, make_model
from harness.plain_http import PLAIN_HTTP
from harness.prefork import METHOD
from harness.versions import of_0_23
from harness.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

CLIENTS = 4
PROMPT_TOKENS = (20, 130, 700, 1500)
DRAIN_S = 120.0
TOKEN = "a-token-of-the-admin-api-of-some-length"

PREFILL = EngineConfig(Role.PREFILL, connector_extra=PATIENT)
DECODE = EngineConfig(Role.DECODE, connector_extra=PATIENT)


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


def upgrade(engine: Engine, proxies: list[Proxy], load: Load) -> None:
    admins = [Admin(proxy) for proxy in proxies]
    for admin in admins:
        admin.tell(engine.url, "drain")
    wait_until(lambda: not any(admin.engine(engine.url)["in_flight"] for admin in admins), DRAIN_S)
    engine.process.stop(30)
    load.progress()  # without it
    engine.environment = PREFILL.environment()
    engine.start()
    wait_ready([engine])
    for admin in admins:
        admin.tell(engine.url, "undrain")
    load.progress()


def restart(proxy: Proxy, load: Load) -> None:
    load.leave(proxy)
    wait_until(lambda: Admin(proxy).in_flight() == 0, DRAIN_S)
    proxy.process.stop(30)
    load.progress()
    proxy.start()
    wait_ready([proxy])
    load.proxies = [*load.proxies, proxy]
    load.progress()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv(METHOD, "fork")  # engines start sooner
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    args = (*PATIENT_PROXY, "--admin-token-file", str(tmp_path / "token"))
    config = ClusterConfig("rolling", (of_0_23(PREFILL),) * 2, (of_0_23(DECODE),) * 2, args)
    model = make_model(TINY, tmp_path)
    with running_cluster(model, config, tmp_path) as made:
        yield made


def versions(cluster: Cluster) -> set[str]:
    engines = (*cluster.prefill, *cluster.decode)
    return {httpx.get(f"{engine.url}/version", **PLAIN_HTTP).json()["version"] for engine in engines}


def test_engines_and_proxies_are_upgraded_under_load(cluster: Cluster, tmp_path: Path) -> None:
    second = Proxy(cluster.prefill, cluster.decode, tmp_path, args=cluster.config.proxy_args)
    proxies = [cluster.proxy, second]
    try:
        wait_ready([second])
        load = Load([*proxies], cluster.model)
        try:
            assert versions(cluster) == {"0.23.0"}
            load.progress()
            for engine in (*cluster.prefill, *cluster.decode):
                upgrade(engine, proxies, load)
            assert versions(cluster) == {"0.30.0"}
            for proxy in proxies:
                restart(proxy, load)
        finally:
            load.stop()
        wait_all_blocks_free(cluster)
    finally:
        second.stop()
    with running_engines(cluster.model, [EngineConfig()], tmp_path) as [single]:
        with Client(single.url, model=str(cluster.model)) as client:
            numbers = sorted(load.answers)
            expected = at_once(lambda number: client.complete(prompt(number)).token_ids, numbers, concurrency=4)
        assert [load.answers[number] for number in numbers] == expected
