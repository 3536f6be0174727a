# SPDX-License-Identifier: Apache-2.0
"""Clusters whose engines run different versions of vLLM."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from harness.agreement import assert_agree
from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster
from harness.engines import PLUGINS, EngineConfig
from harness.plain_http import PLAIN_HTTP

if TYPE_CHECKING:
    from harness.pool import Reference

PROMPT_TOKENS = (1, 127, 128, 129, 700, 1300)


def with_vllm_in(folder: Path, config: EngineConfig) -> EngineConfig:
    """The engine runs the vLLM that is unpacked in `folder`."""
    path = os.pathsep.join(filter(None, [str(folder), str(PLUGINS), os.environ.get("PYTHONPATH")]))
    return dataclasses.replace(config, env=(*config.env, ("PYTHONPATH", path)))


OLDER = Path(sys.prefix) / "vllm-0.23"
"""Where scripts/setup_env.sh puts the Python part of vLLM 0.23."""


def of_0_23(config: EngineConfig) -> EngineConfig:
    """The engine runs vLLM 0.23 on the CPU."""
    kernels = ("VLLM_ASCEND_PD_TEST_INSTALLED_KERNELS", "1")
    return with_vllm_in(OLDER, dataclasses.replace(config, env=(*config.env, kernels)))


NEWER = Path(sys.prefix) / "vllm-0.32"
"""Where it puts vLLM 0.32's CPU backend."""


def of_0_32(config: EngineConfig) -> EngineConfig:
    """The engine runs vLLM 0.32 on the CPU."""
    return with_vllm_in(NEWER, config)


def assert_versions_answer_as_one_engine(
    cluster: Cluster, versions: Sequence[str], client: Client, reference: "Reference"
) -> None:
    """Checks that the engines have these versions of vLLM, and what they answer with and without cached prompts."""
    engines = (*cluster.prefill, *cluster.decode)
    found = [httpx.get(f"{engine.url}/version", **PLAIN_HTTP).json()["version"] for engine in engines]
    assert found == [*versions]
    prompts = [random_prompt(tokens, "versions") for tokens in PROMPT_TOKENS]
    assert_agree(reference, prompts, at_once(client.complete, prompts, concurrency=4))
    again = [client.complete(prompt) for prompt in prompts]  # with what both sides have cached
    assert_agree(reference, prompts, again)
