# SPDX-License-Identifier: Apache-2.0
"""Sparse attention's caches in vllm-ascend 0.30, where the index has a cache and a spec of its own.

tests/npu/e2e/test_versions.py runs engines of that version.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.npu

PROGRAM = Path(__file__).parents[1] / "next_line_caches.py"
LATENT, ROPE = ["bfloat16", 1024, 1, 128], ["bfloat16", 128, 1, 128]
PACKED = ["int8", 656, 1, 128]
INT8_KEYS = [["int8", 128, 1, 128], ["float16", 2, 1, 128]]
"""A tensor's type, bytes per head and token, heads, and tokens per block."""
ATTENTION, INDEX = (f"model.layers.0.self_attn.{name}" for name in ("attn", "indexer.k_cache"))


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(Path(sys.prefix, "vllm-0.30"))}
    result = subprocess.run(
        [sys.executable, PROGRAM], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("index", "main", "keys"),
    [
        ("plain", [LATENT, ROPE], [["bfloat16", 256, 1, 128]]),
        ("glm", [LATENT, ROPE], [["bfloat16", 256, 1, 128]]),
        ("quantized", [LATENT, ROPE], INT8_KEYS),
        ("packed", [PACKED], INT8_KEYS),
        # Decode context parallelism leaves all of it on each rank, so its blocks are twice as long.
        ("copied", [LATENT, ROPE], [["int8", 128, 1, 256], ["float16", 2, 1, 256]]),
    ],
)
def test_the_index_is_sent_with_its_layer(said: dict[str, Any], index: str, main: list[Any], keys: list[Any]) -> None:
    """Every rank has all of it. A layer that uses another one's index has none."""
    assert said[index]["tensors"] == [*main, *keys, *main]
    assert said[index]["announced"] == {ATTENTION: [ATTENTION, INDEX]}
    assert said[index]["groups"] == [128]


def test_an_index_beside_keys_and_values_of_heads(said: dict[str, Any]) -> None:
    """MiniMax-M3's: every rank has all of the index, and a part of the heads."""
    assert said["indexed_heads"]["tensors"] == [["bfloat16", 256, 4, 128]] * 2 + [["bfloat16", 256, 1, 128]]
    assert said["indexed_heads"]["groups"] == [128]


def test_an_index_of_pooled_tokens_is_refused(said: dict[str, Any]) -> None:
    """DeepSeek V4.1's and GLM-5.3-Flash's caches, which are compressed in other ways than DeepSeek V4's."""
    assert said["other_models"].keys() == {"deepseek_v41", "glm5_next"}
    for error in said["other_models"].values():
        assert "an entry for 4 tokens of models other than DeepSeek V4 are not supported" in error


def test_other_layouts_are_refused_by_name(said: dict[str, Any]) -> None:
    assert len(said["refused"]) == 4
    for field, error in said["refused"].items():
        assert f"with {field} True are not supported" in error
