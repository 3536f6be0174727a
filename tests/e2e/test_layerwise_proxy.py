# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's example proxy and PyMotor drive our connectors, unchanged: a stand-in for both between real engines."""

from collections.abc import Iterator

import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import TP2_TO_TP1, Cluster
from harness.layerwise_proxy import LayerwiseProxy, layerwise_proxy

pytestmark = [
    pytest.mark.parametrize("cluster", [TP2_TO_TP1], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


@pytest.fixture(params=[False, True], ids=["vllm-ascend", "PyMotor"])
def theirs(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[LayerwiseProxy]:
    with layerwise_proxy(cluster.prefill[0].url, cluster.decode[0].url, like_pymotor=request.param) as proxy:
        yield proxy


def test_tokens(theirs: LayerwiseProxy, cluster: Cluster, reference, request: pytest.FixtureRequest) -> None:
    name = request.node.name  # no prompt is in a prefix cache
    prompts = [random_prompt(tokens, f"{name} {i}") for i, tokens in enumerate((1, 128, 300, 129, 1000, 640))]
    messages = [{"role": "user", "content": f"{name}: which layer comes before layer 9? " * 10}]
    with Client(theirs.url, model=str(cluster.model)) as client:
        whole = at_once(client.complete, prompts, concurrency=6)
        streams = [client.complete(prompt, stream=True) for prompt in prompts[:3]]
        chat = client.chat(messages, max_completion_tokens=16)
    assert [answer.token_ids for answer in whole] == [reference.complete(prompt) for prompt in prompts]
    assert [answer.token_ids for answer in streams] == [reference.complete(prompt) for prompt in prompts[:3]]
    assert chat.token_ids == reference.chat(messages)
    assert theirs.swallowed == []
    assert len(theirs.tickets) >= len(prompts) + 1, "the prompts were not prefilled elsewhere"
    assert whole[4].kv_transfer_params["received_bytes"] > 0
