# SPDX-License-Identifier: Apache-2.0
"""`usage` of vllm-ascend engines equals a single engine's, whichever engine has a prompt cached."""

import dataclasses

import pytest

from harness.client import random_prompt
from harness.clusters import Cluster
from harness.engines import EngineConfig
from harness.pool import Reference
from harness.usage import RESETTABLE, asked_of_all, cached_tokens, forget, usages
from npu_engines import on_npu, one_to_one

DETAILS = ("--enable-prompt-tokens-details",)
SINGLE = on_npu(EngineConfig(args=DETAILS, env=RESETTABLE))


def resettable(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, env=(*config.env, *RESETTABLE))


PLAIN = one_to_one("with-prompt-tokens-details", 1, 1, args=DETAILS)
DETAILED = dataclasses.replace(
    PLAIN,
    prefill=tuple(map(resettable, PLAIN.prefill)),
    decode=tuple(map(resettable, PLAIN.decode)),
    single=SINGLE,
)

pytestmark = [
    pytest.mark.npu,
    pytest.mark.long,
    pytest.mark.parametrize("cluster", [DETAILED], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


def test_usage_is_a_single_engines(cluster: Cluster, reference: Reference) -> None:
    model, single = str(cluster.model), reference.engine
    forget(*cluster.prefill, *cluster.decode, single)
    for cold in ((), (), cluster.decode):
        forget(*cold)
        said = asked_of_all(cluster.url, model)
        assert said == asked_of_all(single.url, model)
    assert sum(cached_tokens(usage[-1]) for usage in said.values()) > 0


def test_a_prompt_that_decode_has_cached_as_a_whole(cluster: Cluster, reference: Reference) -> None:
    body = {"prompt": random_prompt(256, "usage of all"), "max_tokens": 8, "ignore_eos": True}
    for _ in range(2):
        said = usages(cluster.url, str(cluster.model), "/v1/completions", body)
        assert said == usages(reference.engine.url, str(cluster.model), "/v1/completions", body)
    assert said[0]["prompt_tokens_details"]["cached_tokens"] == 128
