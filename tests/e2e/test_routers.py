# SPDX-License-Identifier: Apache-2.0
"""Routers that ask prefill first, before real engines: the answers equal a single engine's, token by token."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.client import Client, Messages, at_once, random_prompt
from harness.clusters import TP2_TO_TP1, Cluster, one_to_one
from harness.documented import documented, is_part_of
from harness.failures import wait_all_blocks_free
from harness.pool import long
from harness.routers import HAS_VLLM_ROUTER, NEEDS_VLLM_ROUTER, Flow, stand_in, vllm_router
from harness.usage import BODIES, cached_tokens, usages

BLOCK = 128
DETAILS_LEFT_OUT = {"prompt_tokens_details": None}
PROMPT_TOKENS = (1, 127, 128, 129, 384, 1000, 2500)
"""Around a block's end (128), several blocks, several chunks (512)."""

CLUSTERS = [TP2_TO_TP1, long(one_to_one(1, 1)), long(one_to_one(1, 2))]

ROUTERS = ["nixl", "mooncake", Flow.VLLM_MOONCAKE, Flow.LLM_D_MOONCAKE]
"""`vllm-router` in two modes, and stand-ins."""
LIKE_NIXL = [Flow.VLLM_NIXL, Flow.LLM_D_NIXL, Flow.DYNAMO]
"""In the order of the router's mode "nixl", with some other fields."""

pytestmark = [
    pytest.mark.parametrize("cluster", CLUSTERS, ids=str, indirect=True),
    pytest.mark.timeout(600),  # the first test of a cluster starts it
]


def command(connector: str, cluster: Cluster) -> list[str]:
    """As docs/routers.md has it."""
    [prefill], [decode] = cluster.prefill, cluster.decode
    engines = {"http://127.0.0.1:8100": prefill.url, "http://127.0.0.1:8200": decode.url, " --port 8000": ""}
    if connector == "nixl":
        return documented("docs/routers.md", "vllm-router --vllm-pd-disaggregation --kv-connector nixl", engines)
    return documented(
        "docs/routers.md",
        "vllm-router --vllm-pd-disaggregation --kv-connector mooncake",
        engines | {" 8998 ": f" {prefill.bootstrap_port} "},
    )


@pytest.fixture(
    params=[*ROUTERS, *map(long, LIKE_NIXL)],
    ids=lambda router: router.name if isinstance(router, Flow) else f"vllm-router-{router}",
)
def through(request: pytest.FixtureRequest, cluster: Cluster, engine_logs: Path) -> Iterator[Client]:
    """A client of a router before the cluster's engines."""
    if isinstance(request.param, Flow):
        router = stand_in(request.param, cluster.prefill[0], cluster.decode[0])
    elif not HAS_VLLM_ROUTER:
        pytest.skip(NEEDS_VLLM_ROUTER)
    else:
        router = vllm_router(f"vllm-router-{request.param}", command(request.param, cluster), engine_logs)
    with router as running, Client(running.url, model=str(cluster.model)) as client:
        yield client


def test_the_engines_are_those_of_the_page(cluster: Cluster) -> None:
    """What these tests show holds for the commands that the page has."""
    [prefill], [decode] = cluster.prefill, cluster.decode
    values = {"MODEL": str(cluster.model)}
    ports = {"8100": str(prefill.port), "18000": str(prefill.kv_port), "8998": str(prefill.bootstrap_port)}
    variable, _, _, *prefill_words = documented("docs/routers.md", "VLLM_MOONCAKE_BOOTSTRAP_PORT=", {**values, **ports})
    ports = {"8200": str(decode.port), "19000": str(decode.kv_port)}
    _, _, *decode_words = documented("docs/routers.md", "ASCEND_RT_VISIBLE_DEVICES=1 VLLM", {**values, **ports})
    name, _, value = variable.partition("=")
    assert prefill.environment[name] == value
    for words, engine in ((prefill_words, prefill), (decode_words, decode)):
        assert list(engine.process.command[1:3]) == words[1:3]
        if engine.config.tp == 1:
            assert is_part_of(words, engine.process.command)


def test_several_prompts_and_choices(through: Client, cluster: Cluster, reference) -> None:
    """Prefill's answer names one transfer for all of them: each ticket finds the prompt that it fits."""
    name = through.http.base_url.port
    prompts = [random_prompt(tokens, f"several {name}") for tokens in (5, 300, 129)]
    outputs = [answer.token_ids for answer in through.complete_many(prompts)]
    assert outputs == [reference.complete(prompt) for prompt in prompts]
    two = [random_prompt(300, f"two {name}")]
    outputs = [answer.token_ids for answer in through.complete_many(two, n=2)]
    assert outputs == reference.complete_many(two, n=2)
    wait_all_blocks_free(cluster)


def test_tokens(through: Client, cluster: Cluster, reference) -> None:
    name = through.http.base_url.port
    prompts = [random_prompt(tokens, f"routed {name} {i}") for i, tokens in enumerate(PROMPT_TOKENS)]
    messages: Messages = [{"role": "user", "content": f"Which layer comes before layer 9? {name} " * 10}]
    whole = [through.complete(prompt) for prompt in prompts[:4]]
    whole += at_once(through.complete, prompts[4:], concurrency=3)
    streams = [random_prompt(tokens, f"streamed {name}") for tokens in (5, 700)]
    streamed = [through.complete(prompt, stream=True).token_ids for prompt in streams]
    chat = through.chat(messages, max_completion_tokens=16)
    assert [answer.token_ids for answer in whole] == [reference.complete(prompt) for prompt in prompts]
    assert streamed == [reference.complete(prompt) for prompt in streams]
    assert chat.token_ids == reference.chat(messages)
    # Decode computes a prompt of one token itself, and prefill is told so.
    assert all(answer.kv_transfer_params["received_bytes"] > 0 for answer in whole[1:])
    wait_all_blocks_free(cluster)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage(through: Client, cluster: Cluster, reference, path: str) -> None:
    """It equals a single engine's. Tokens count as cached that no engine computed for the request: the whole blocks,
    once the same prompt was asked for before."""
    name = f"routed {through.http.base_url.port}: "
    for stream in (False, True):
        body = {**BODIES[path](stream, name), "stream": stream}
        for is_warm in (False, True):
            [said] = usages(str(through.http.base_url).rstrip("/"), through.model, path, body)
            whole_blocks = (said["prompt_tokens"] - 1) // BLOCK * BLOCK
            assert cached_tokens(said) == (whole_blocks if is_warm else 0)
            [expected] = usages(reference.engine.url, through.model, path, body)
            assert cached_tokens(said) == cached_tokens(expected)
            # vllm-router's has more fields, of which nobody said anything.
            assert said | DETAILS_LEFT_OUT == expected | DETAILS_LEFT_OUT
