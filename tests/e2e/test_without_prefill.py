# SPDX-License-Identifier: Apache-2.0
"""Decode computes prompts while no prefill engine runs, and prompts that clients want it to compute."""

import time
from typing import Any

import httpx
import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig
from harness.engines import PATIENT, EngineConfig, Role, wait_ready
from harness.failures import wait_all_blocks_free
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference
from harness.waiting import wait_for, wait_until

AT_MOST = 512
"""Tokens of the longest prompt that decode computes without prefill engines."""
PREFILL = EngineConfig(Role.PREFILL, connector_extra=PATIENT)
DECODE = EngineConfig(
    Role.DECODE,
    who_computes="auto",
    # No prompt is cheap: what decode computes, it computes for another reason.
    connector_extra=(*PATIENT, ("decode_prompt_tokens", 0), ("max_decode_prompt_tokens", AT_MOST)),
)
CONFIG = ClusterConfig("decode-without-prefill", (PREFILL,), (DECODE,))

pytestmark = [
    pytest.mark.parametrize("cluster", [CONFIG], ids=str, indirect=True),
    pytest.mark.timeout(600),
]

Places = dict[tuple[str, str], int]


def places(cluster: Cluster) -> Places:
    """How many prompts were computed where, and why, by the proxy's status page."""
    # The proxy counts from its first look at decode's metrics on.
    status = wait_for(lambda: _status(cluster), _has_looked_at_decode, 30)
    return {(each["by"], each["reason"]): each["prompts"] for each in status["prompts"]}


def changed(cluster: Cluster, before: Places, prompts: int, reason: str | None = None) -> Places:
    """What has changed since `before`, once it is so many prompts. `reason`: only prompts for this reason count."""

    def change() -> Places:
        now = places(cluster)
        return {place: now[place] - before.get(place, 0) for place in now if now[place] != before.get(place)}

    def are_there(found: Places) -> bool:
        return sum(count for (_, why), count in found.items() if reason in (None, why)) >= prompts

    return wait_for(change, are_there, 30, every_s=0.2)


def asked_without_prefill(cluster: Cluster) -> int:
    lines = httpx.get(f"{cluster.url}/metrics", timeout=30, **PLAIN_HTTP).text.splitlines()
    [line] = [line for line in lines if line.startswith("vllm:kv_pd_proxy_requests_without_prefill_total ")]
    return int(float(line.split()[1]))


@pytest.mark.parametrize("who", ["decode", "prefill"])
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_header_decides(cluster: Cluster, client: Client, reference: Reference, who: str, stream: bool) -> None:
    before, prompt = places(cluster), random_prompt(300, f"header {who} {stream}")
    with Client(cluster.url, client.model, headers={"X-Who-Computes": who}) as asking:
        assert asking.complete(prompt, stream=stream).token_ids == reference.complete(prompt)
    assert changed(cluster, before, 1) == {(who, "requested"): 1}
    assert asked_without_prefill(cluster) == 0


def test_decode_computes_no_longer_prompt_than_its_bound(
    cluster: Cluster, client: Client, reference: Reference
) -> None:
    before, prompt = places(cluster), random_prompt(AT_MOST + 1, "too long")
    with Client(cluster.url, client.model, headers={"X-Who-Computes": "decode"}) as asking:
        assert asking.complete(prompt).token_ids == reference.complete(prompt)
    [(by, _)] = changed(cluster, before, 1)
    assert by == "prefill"


def test_prefill_is_killed_and_comes_back(cluster: Cluster, client: Client, reference: Reference) -> None:
    [prefill] = cluster.prefill
    before, asked = places(cluster), asked_without_prefill(cluster)
    prefill.process.kill()
    prompts = [random_prompt(tokens, f"killed {i}") for i, tokens in enumerate((5, 129, 300, AT_MOST, 64, 256))]
    expected = [reference.complete(prompt) for prompt in prompts]
    answers = [client.complete(prompt, stream=bool(i % 2)).token_ids for i, prompt in enumerate(prompts)]
    assert answers == expected
    again = [random_prompt(200, f"killed at once {i}") for i in range(4)]
    assert at_once(lambda prompt: client.complete(prompt).token_ids, again, concurrency=4) == [
        reference.complete(prompt) for prompt in again
    ]
    answered = len(prompts) + len(again)
    assert asked_without_prefill(cluster) == asked + answered
    change = changed(cluster, before, answered, "no_prefill")
    assert change.pop(("decode", "no_prefill")) == answered
    # A ticket counts, too, that was posted before the proxy noticed.
    assert change.keys() <= {("prefill", "long")}

    too_long = random_prompt(AT_MOST + 1, "killed, too long")
    with pytest.raises(httpx.HTTPStatusError) as failed:
        client.complete(too_long)
    assert failed.value.response.status_code == 503
    message = failed.value.response.json()["error"]["message"]
    assert message.startswith("prefill failed: ")
    assert message.endswith("; decode did not compute the prompt itself")

    prefill.start()
    wait_ready([prefill])
    wait_until(lambda: _status(cluster)["verdict"] == "ok", 60)
    before, asked = places(cluster), asked_without_prefill(cluster)
    for prompt in (too_long, random_prompt(300, f"back {time.monotonic()}")):
        assert client.complete(prompt).token_ids == reference.complete(prompt)
    assert changed(cluster, before, 2) == {("prefill", "long"): 2}
    assert asked_without_prefill(cluster) == asked
    wait_all_blocks_free(cluster)


def _status(cluster: Cluster) -> dict[str, Any]:
    return httpx.get(f"{cluster.url}/status.json", timeout=10, **PLAIN_HTTP).json()


def _has_looked_at_decode(status: dict[str, Any]) -> bool:
    engines = [engine for role in status["roles"] if role["role"] == "decode" for engine in role["engines"]]
    return all(engine["running"] is not None for engine in engines)
