# SPDX-License-Identifier: Apache-2.0
"""Engines that compile their model (no `--enforce-eager`): the same tokens, and still a hook for each layer."""

import dataclasses

import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster, one_to_one
from harness.engines import EngineConfig
from harness.models import TWO_LAYERS
from harness.pool import Reference

PROMPT_TOKENS = (1, 127, 128, 129, 500, 1500)

SAYS_SAVED = ("VLLM_ASCEND_PD_TEST_SAY_SAVED", "1")
COMPILED = dataclasses.replace(
    one_to_one(1, 1, model=TWO_LAYERS, engine=EngineConfig(eager=False, env=(SAYS_SAVED,))),
    name="compiled",
    single=EngineConfig(),
)

pytestmark = [
    pytest.mark.long,  # compiling takes most of it
    pytest.mark.timeout(900),
    pytest.mark.parametrize("cluster", [COMPILED], ids=str, indirect=True),
]


def test_tokens_are_those_of_an_eager_engine(client: Client, reference: Reference) -> None:
    prompts = [random_prompt(tokens, f"compiled-{i}") for i, tokens in enumerate(2 * PROMPT_TOKENS)]
    completions = at_once(client.complete, prompts, concurrency=8)
    assert [completion.token_ids for completion in completions] == [reference.complete(p) for p in prompts]


def test_every_layer_is_saved_as_it_is_computed(cluster: Cluster, client: Client) -> None:
    """Without hooks KV would leave all the same, but only at the end of each step."""
    client.complete(random_prompt(1500, "hooks"))
    lines = cluster.prefill[0].log.read_text().splitlines()
    said = {line.partition("saved ")[2] for line in lines if "saved " in line and line.endswith(" layers")}
    assert said == {"2 of 2 layers"}
