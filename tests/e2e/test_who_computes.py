# SPDX-License-Identifier: Apache-2.0
"""Decode computes short prompts itself, those that clients want it to compute, and all while no prefill engine runs.
Prefill computes the others. The tokens are a single engine's."""

import dataclasses
import itertools
import time

import httpx
import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig, one_to_one
from harness.engines import PATIENT, EngineConfig, Role, wait_ready
from harness.failures import wait_all_blocks_free
from harness.models import EAGLE, MAMBA, ONE_LAYER, SLIDING, ModelSpec
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference, long
from harness.proxy_state import withheld
from harness.waiting import wait_for, wait_until

BLOCK = 128
PREFILL = EngineConfig(Role.PREFILL, connector_extra=PATIENT)
AUTO = dataclasses.replace(PREFILL, role=Role.DECODE, who_computes="auto")
WITHOUT_PREFILL = 512
"""Tokens of the longest prompt that decode computes without prefill engines, or because a client wants it to."""
BOUND = dataclasses.replace(AUTO, connector_extra=(*PATIENT, ("max_decode_prompt_tokens", WITHOUT_PREFILL)))
TUNED = ClusterConfig("decode-computes-what-is-cheap", (PREFILL,), (BOUND,))


def auto(name: str, model: ModelSpec, engine: EngineConfig) -> ClusterConfig:
    """Decode computes prompts of one block and some."""
    extra = (*PATIENT, ("decode_prompt_tokens", 150), ("decode_prompt_share", 1.0))
    sides = one_to_one(1, 1, model=model, engine=engine)
    [decode] = sides.decode
    decode = dataclasses.replace(decode, who_computes="auto", connector_extra=extra)
    return dataclasses.replace(sides, name=f"decode-computes-{name}", decode=(decode,))


STATES = auto("states", MAMBA, EngineConfig(prefix_caching=False))
EAGLE_HEAD = (("method", "eagle"), ("model", EAGLE), ("num_speculative_tokens", 3))
KINDS = [
    STATES,
    long(auto("windows", SLIDING, EngineConfig())),
    long(auto("drafts", ONE_LAYER, EngineConfig(speculative=EAGLE_HEAD))),
]

tuned = pytest.mark.parametrize("cluster", [TUNED], ids=str, indirect=True)
pytestmark = pytest.mark.timeout(600)

Places = dict[tuple[str, str], float]


def places(cluster: Cluster, of: str = "prompts") -> Places:
    """How many prompts, or tokens of them, were computed where, and why."""
    samples = cluster.decode[0].samples(f"vllm:kv_pd_{of}_total")
    return {(labels["by"], labels["reason"]): value for labels, value in samples if value}


def changed(cluster: Cluster, before: Places, prompts: int) -> Places:
    """What has changed since `before`, once it is so many prompts."""

    def change() -> Places:
        now = places(cluster)
        return {place: now[place] - before.get(place, 0) for place in now if now[place] != before.get(place)}

    return wait_for(change, lambda found: sum(found.values()) >= prompts, 30, every_s=0.1)


def measure(cluster: Cluster, model: str) -> None:
    """Has decode compute prompts until those of 64 tokens are cheap. On a busy machine a step may have taken long."""
    decode, until = cluster.decode[0], time.monotonic() + 60
    with Client(cluster.url, model, headers={"X-Who-Computes": "decode"}) as asking:
        for number in itertools.count():
            for tokens in (8, 24, 40, 64):
                asking.complete(random_prompt(tokens, f"measured {number}"))
            if decode.metric("vllm:kv_pd_decode_prompt_threshold_tokens") >= 64 or time.monotonic() > until:
                return


ROUNDS = ("one", "another", "a third", "a fourth")
"""A step that takes long changes what is cheap. So one round of these has to be as it is on an idle machine."""


@tuned
def test_short_prompts_are_computed_on_decode_and_long_ones_on_prefill(
    cluster: Cluster, client: Client, reference: Reference
) -> None:
    wanted, found = {("decode", "cheap"): 4.0, ("prefill", "long"): 2.0}, []
    while wanted not in found:
        assert len(found) < len(ROUNDS), found
        name = ROUNDS[len(found)]
        measure(cluster, client.model)
        before, tokens_before = places(cluster), places(cluster, "prompt_tokens")
        short = [random_prompt(tokens, f"short {name}") for tokens in (2, 8, 32, 64)]
        longer = [random_prompt(tokens, f"long {name}") for tokens in (1000, 2500)]
        answers = [client.complete(prompt) for prompt in (*short, *longer)]
        assert [answer.token_ids for answer in answers] == [reference.complete(prompt) for prompt in (*short, *longer)]
        found.append(changed(cluster, before, 6))
        by_decode = sum(answer.kv_transfer_params is None for answer in answers)
        assert by_decode == found[-1].get(("decode", "cheap"), 0)
    tokens = places(cluster, "prompt_tokens")
    more = [tokens[place] - tokens_before.get(place, 0) for place in wanted]
    assert more == [106, 3500]


@tuned
def test_the_next_turn_of_a_conversation_is_computed_on_decode(
    cluster: Cluster, client: Client, reference: Reference
) -> None:
    """Decode has its first turn from prefill."""
    wanted, found = {("prefill", "long"): 1.0, ("decode", "cheap"): 1.0}, []
    while wanted not in found:
        assert len(found) < len(ROUNDS), found
        name = ROUNDS[len(found)]
        measure(cluster, client.model)
        before = places(cluster)
        prompt = random_prompt(5 * BLOCK, name)
        client.complete(prompt)
        longer = prompt + random_prompt(40, f"turn of {name}")
        assert client.complete(longer).token_ids == reference.complete(longer)
        found.append(changed(cluster, before, 2))


def asked_without_prefill(cluster: Cluster) -> int:
    lines = httpx.get(f"{cluster.url}/metrics", timeout=30, **PLAIN_HTTP).text.splitlines()
    [line] = [line for line in lines if line.startswith("vllm:kv_pd_proxy_requests_without_prefill_total ")]
    return int(float(line.split()[1]))


def has_prefill(cluster: Cluster) -> bool:
    """Whether the proxy sends prompts to the prefill engine."""
    return not withheld(cluster.url)["prefill"]


@tuned
@pytest.mark.parametrize("who", ["decode", "prefill"])
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_header_decides(cluster: Cluster, client: Client, reference: Reference, who: str, stream: bool) -> None:
    before, prompt = places(cluster), random_prompt(300, f"header {who} {stream}")
    with Client(cluster.url, client.model, headers={"X-Who-Computes": who}) as asking:
        assert asking.complete(prompt, stream=stream).token_ids == reference.complete(prompt)
    assert changed(cluster, before, 1) == {(who, "requested"): 1}
    assert asked_without_prefill(cluster) == 0


@tuned
def test_decode_computes_no_longer_prompt_than_its_bound(
    cluster: Cluster, client: Client, reference: Reference
) -> None:
    before, prompt = places(cluster), random_prompt(WITHOUT_PREFILL + 1, "too long")
    with Client(cluster.url, client.model, headers={"X-Who-Computes": "decode"}) as asking:
        assert asking.complete(prompt).token_ids == reference.complete(prompt)
    assert changed(cluster, before, 1) == {("prefill", "long"): 1}


@tuned
def test_prefill_is_killed_and_comes_back(cluster: Cluster, client: Client, reference: Reference) -> None:
    [prefill] = cluster.prefill
    cached = [random_prompt(tokens, "cached as a whole") for tokens in (5 * BLOCK, 5 * BLOCK + 1)]
    known = [reference.complete(prompt) for prompt in cached]
    assert [client.complete(prompt).token_ids for prompt in cached] == known
    prefill.process.kill()
    unnoticed = random_prompt(WITHOUT_PREFILL, "killed, and not noticed before")
    assert client.complete(unnoticed).token_ids == reference.complete(unnoticed)
    wait_until(lambda: not has_prefill(cluster), 60)
    before, asked = places(cluster), asked_without_prefill(cluster)
    prompts = [random_prompt(tokens, f"killed {i}") for i, tokens in enumerate((5, 129, 300, WITHOUT_PREFILL, 64, 256))]
    expected = [reference.complete(prompt) for prompt in prompts]
    answers = [client.complete(prompt, stream=bool(i % 2)).token_ids for i, prompt in enumerate(prompts)]
    assert answers == expected
    again = [random_prompt(200, f"killed at once {i}") for i in range(4)]
    assert at_once(lambda prompt: client.complete(prompt).token_ids, again, concurrency=4) == [
        reference.complete(prompt) for prompt in again
    ]
    answered = len(prompts) + len(again)
    assert asked_without_prefill(cluster) == asked + answered
    assert changed(cluster, before, answered) == {("decode", "no_prefill"): answered}

    # Longer ones, of which decode computes one token.
    for stream in (False, True):
        assert [client.complete(prompt, stream=stream).token_ids for prompt in cached] == known
    too_long = random_prompt(WITHOUT_PREFILL + 1, "killed, too long")
    with pytest.raises(httpx.HTTPStatusError) as failed:
        client.complete(too_long)
    assert failed.value.response.status_code == 503
    message = failed.value.response.json()["error"]["message"]
    assert message.startswith("prefill failed: ")
    assert message.endswith("; decode did not compute the prompt itself")

    prefill.start()
    wait_ready([prefill])
    wait_until(lambda: has_prefill(cluster), 60)
    before, asked = places(cluster), asked_without_prefill(cluster)
    for prompt in (too_long, random_prompt(1000, f"back {time.monotonic()}")):
        assert client.complete(prompt).token_ids == reference.complete(prompt)
    assert changed(cluster, before, 2) == {("prefill", "long"): 2}
    assert asked_without_prefill(cluster) == asked
    wait_all_blocks_free(cluster)


@pytest.mark.parametrize("cluster", KINDS, ids=str, indirect=True)
def test_other_caches_and_drafts(cluster: Cluster, client: Client, reference: Reference) -> None:
    """Decode computes some prompts while others' KV arrives. On a busy machine it leaves some cheap ones to prefill."""
    before = places(cluster)
    prompts = [random_prompt(tokens, f"kind-{i}") for i, tokens in enumerate(2 * (2, 127, 128, 150, 151, 1000))]
    answers = at_once(client.complete, prompts, concurrency=4)
    assert [each.token_ids for each in answers] == [reference.complete(prompt) for prompt in prompts]
    change = changed(cluster, before, 12)
    assert change["prefill", "long"] == 4
    assert change["decode", "cheap"] > 0
    assert change["decode", "cheap"] + change.get(("prefill", "busy"), 0) == 8
