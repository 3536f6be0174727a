# SPDX-License-Identifier: Apache-2.0
"""`docs/metrics.md` names every metric there is, and no other."""

import re
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families
from proxied import settings_with
from starlette.requests import Request
from starlette.types import Message

from vllm_ascend_pd.observe.stats import (
    DECODE_METRICS,
    PREFILL_METRICS,
    PREFIX,
    PROMPT_TOKENS,
    PROMPTS,
    Counter,
    Metric,
)
from vllm_ascend_pd.proxy.http.streams import Reply
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.dispatch import EnginePool
from vllm_ascend_pd.transport.names import HostNames

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
SECTIONS = {
    title: text for title, _, text in (part.partition("\n") for part in PAGE.read_text().split("\n## "))
}  # before the first: the page's title

_ROW = re.compile(r"^\| `(vllm:\w+)` \|([^|]*)\| \S[^|]* \|$", re.MULTILINE)
_TYPES = (("_total", "counter"), ("_seconds", "histogram"), ("_ratio", "histogram"), ("", "gauge"))
"""By the end of a name, as the page says."""


class Documented(NamedTuple):
    type: str
    labels: frozenset[str]


def documented(section: str) -> dict[str, Documented]:
    text = SECTIONS[section]
    rows = _ROW.findall(text)
    assert len(rows) == text.count("| `vllm:"), "a row that is not like the others"
    types = {name: next(kind for end, kind in _TYPES if name.endswith(end)) for name, _ in rows}
    return {name: Documented(types[name], frozenset(re.findall(r"`(\w+)`", labels))) for name, labels in rows}


def of_engine(metrics: tuple[Metric, ...]) -> dict[str, Documented]:
    """As `connector/metrics.py` registers them: `tests/integration/test_engine_metrics.py` checks that."""
    return {
        PREFIX + metric.name + ("_total" if isinstance(metric, Counter) else ""): Documented(
            type(metric).__name__.lower(), frozenset(metric.labels)
        )
        for metric in metrics
    }


@pytest.mark.parametrize(
    ("section", "metrics"), [("Prefill engines", PREFILL_METRICS), ("Decode engines", DECODE_METRICS)]
)
def test_engines(section: str, metrics: tuple[Metric, ...]) -> None:
    assert documented(section) == of_engine(metrics)


def test_reasons_for_who_computes_a_prompt() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .+ \|$", SECTIONS["Who computes prompts"], re.MULTILINE)
    assert [",".join(row) for row in rows] == list(PROMPTS.reasons) == list(PROMPT_TOKENS.reasons)


async def _exposed() -> str:
    """The proxy's page once each metric has had something to count."""

    async def send(_: Message) -> None:
        pass

    pool = EnginePool(EngineRole.PREFILL, settings_with(), HostNames())
    pool.engines.add("http://10.0.0.1:8100", "test")
    observer = ProxyObserver(RequestTable(limit=1), (pool,))
    reply = Reply(send, request_id=None)
    with observer.request("/v1/completions", reply):
        reply.status, reply.first_event_at = 200, float("inf")
    answer = await observer.metrics(Request({"type": "http", "headers": []}))
    await pool.aclose()
    return bytes(answer.body).decode()


def test_proxy() -> None:
    found = {}
    for family in text_string_to_metric_families(anyio.run(_exposed)):
        if family.name.endswith("_created"):  # the library's own: since when each is counted
            continue
        assert family.samples, family.name
        labels = frozenset(family.samples[0].labels) - {"le"}
        found[family.name + ("_total" if family.type == "counter" else "")] = Documented(family.type, labels)
    assert documented("Proxy") == found
