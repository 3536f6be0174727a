# SPDX-License-Identifier: Apache-2.0
"""What `who_computes.py` compares: two equal decode engines, one of which is told who computes each prompt."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from harness.client import Client, Completion, StreamError
from harness.clusters import PATIENT_PROXY, Proxy
from harness.engines import PATIENT, Engine, EngineConfig, Role, running_engines, wait_ready
from harness.models import DEMO
from helpers.ttft_sides import (
    KV_BYTES,
    MODELS,
    REQUEST_SECONDS,
    STEP_TOKENS,
    SideFailedError,
    TakesTurns,
)

SPECS = {"small": MODELS["small"], "demo": dataclasses.replace(DEMO, max_positions=8192)}
"""ttft.py's small model, and the demonstration's."""
KV_CACHE_BYTES = KV_BYTES | {"demo": 1 << 30}
MAX_MODEL_LEN = 4096 + 64

HEADER = "X-Who-Computes"


class Way:
    """How prompts are sent to one decode engine. `wish`: who the client asks to compute them; None: nobody."""

    def __init__(self, name: str, url: str, model: str, wish: str | None = None) -> None:
        self.name, self.url = name, url
        self.headers = {} if wish is None else {HEADER: wish}
        timeout = httpx.Timeout(REQUEST_SECONDS, connect=10)
        self._client = Client(url, model=model, timeout=timeout)
        self._client.http.headers.update(self.headers)

    def ask(self, prompt: list[int], max_tokens: int) -> Completion:
        try:
            return self._client.complete(prompt, max_tokens, stream=True)
        except (httpx.HTTPError, StreamError) as error:
            raise SideFailedError(f"{self.name}: {len(prompt)} prompt tokens: {error}") from error

    def close(self) -> None:
        self._client.http.close()


class Side(TakesTurns):
    """A decode engine and its own proxy, which take turns with the other side's."""

    def __init__(self, decode: Engine, proxy: Proxy, ways: Sequence[Way]) -> None:
        super().__init__([proxy.process, decode.process])
        self.decode, self.ways = decode, tuple(ways)

    def prompts(self) -> Counter[str]:
        """How many prompts of this decode engine were computed so far, by whom and why: "decode cheap"."""
        found = self.decode.samples("vllm:kv_pd_prompts_total")
        return Counter({f"{labels['by']} {labels['reason']}": int(value) for labels, value in found})

    def close(self) -> None:
        super().close()
        for way in self.ways:
            way.close()


@dataclasses.dataclass(frozen=True)
class Stand:
    """One prefill engine, and two decode engines that are started alike."""

    # Decides by itself.
    auto: Side
    # Every request says who computes its prompt.
    told: Side

    @property
    def both(self) -> tuple[Side, Side]:
        return self.auto, self.told


@contextmanager
def running_stand(model: str, path: Path, logs: Path) -> Iterator[Stand]:
    plain = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=STEP_TOKENS,
        kv_cache_bytes=KV_CACHE_BYTES[model],
        who_computes="auto",
    )
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    configs = [dataclasses.replace(plain, role=role, connector_extra=PATIENT) for role in roles]
    with running_engines(path, configs, logs) as [prefill, *decodes]:
        proxies: list[Proxy] = []
        sides: list[Side] = []
        try:
            for decode in decodes:
                proxies.append(Proxy([prefill], [decode], logs, args=PATIENT_PROXY))
            wait_ready(proxies)
            own, others = proxies
            name = str(path)
            sides = [
                Side(decodes[0], own, [Way("auto", own.url, name)]),
                Side(
                    decodes[1],
                    others,
                    [
                        Way("alone", others.url, name, "decode"),
                        Way("direct", decodes[1].url, name),
                        Way("prefill", others.url, name, "prefill"),
                    ],
                ),
            ]
            yield Stand(*sides)
        finally:
            for side in sides:
                side.close()
            for proxy in proxies:
                proxy.stop()
