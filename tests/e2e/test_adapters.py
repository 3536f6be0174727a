# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: an answer has decode's adapter, whichever engines have one of its name, or it is refused with the
reason. `test_same_model.py` has other weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_retry import RANK, TWO_OF_EACH

from harness.clusters import Cluster
from harness.engines import Engine
from harness.models import TINY
from harness.plain_http import PLAIN_HTTP
from harness.proxy_state import counted, withheld

pytestmark = [pytest.mark.timeout(900), pytest.mark.parametrize("cluster", [TWO_OF_EACH], ids=str, indirect=True)]


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for `TINY` with random weights, in the layout of PEFT."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": TINY.hidden_size, "v_proj": TINY.kv_heads * TINY.head_size}
    weights = {}
    for layer in range(TINY.layers):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, TINY.hidden_size, generator=generator)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": [*sizes]}))
    return folder


def load(engines: Sequence[Engine], name: str, path: Path) -> None:
    _change("load", engines, lora_name=name, lora_path=str(path))


def unload(engines: Sequence[Engine], name: str) -> None:
    _change("unload", engines, lora_name=name)


def _change(what: str, engines: Sequence[Engine], **asked: str) -> None:
    for engine in engines:
        url = f"{engine.url}/v1/{what}_lora_adapter"
        httpx.post(url, json=asked, timeout=60, **PLAIN_HTTP).raise_for_status()


def ask(url: str, model: str, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt * 12, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    asked = {**body, "return_token_ids": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=asked, timeout=120, **PLAIN_HTTP)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    ids: list[int] = choice["token_ids"]
    assert len(ids) == 12
    return ids


def alone(cluster: Cluster, model: str, prompt: str) -> list[int]:
    """What decode answers if it computes all of the prompt."""
    return tokens(ask(cluster.decode[0].url, model, prompt, cache_salt="decode computes all of it"))


def test_another_one_under_the_same_name_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """Decode computes the prompt itself then, with its own adapter."""
    prompt = "Which layer comes before it? "
    load(cluster.prefill, "of-one-name", make_adapter(tmp_path / "prefill", 2))
    load(cluster.decode, "of-one-name", make_adapter(tmp_path / "decode", 3))
    assert tokens(ask(cluster.url, "of-one-name", prompt)) == alone(cluster, "of-one-name", prompt)
    _, failures = counted(cluster.url)
    assert failures["prefill"]["ticket refused"] > 0


def test_one_of_equal_content_is_answered(cluster: Cluster, tmp_path: Path) -> None:
    prompt = "Which layer comes behind it? "
    for role, engines in (("prefill", cluster.prefill), ("decode", cluster.decode)):
        load(engines, "of-one-content", make_adapter(tmp_path / role, 1))
    through = ask(cluster.url, "of-one-content", prompt)
    assert tokens(through) == alone(cluster, "of-one-content", prompt)
    assert through.json()["kv_transfer_params"]["received_bytes"] > 0
    assert tokens(through) != alone(cluster, str(cluster.model), prompt), "the adapter decides"


def test_one_that_is_loaded_again_with_other_files_has_new_answers(cluster: Cluster, tmp_path: Path) -> None:
    """All engines have KV of the old files in their prefix caches, under the same name and path."""
    engines, prompt = (*cluster.prefill, *cluster.decode), "Which layer comes after all others? "
    path = make_adapter(tmp_path / "renewed", 4)
    load(engines, "renewed", path)
    old = [tokens(ask(cluster.url, "renewed", prompt)) for _ in range(4)]
    unload(engines, "renewed")
    load(engines, "renewed", make_adapter(path, 5))
    through = tokens(ask(cluster.url, "renewed", prompt))
    assert through == alone(cluster, "renewed", prompt)
    assert through not in old


def test_one_that_a_single_prefill_engine_has(cluster: Cluster, tmp_path: Path) -> None:
    """The other one answers 404, and is not blamed."""
    before = withheld(cluster.url)
    load([cluster.prefill[1], *cluster.decode], "of-one-prefill", make_adapter(tmp_path / "adapter", 6))
    for number in range(6):
        prompt = f"Which layer comes before layer {number}? "
        through = ask(cluster.url, "of-one-prefill", prompt)
        assert tokens(through) == alone(cluster, "of-one-prefill", prompt)
        assert through.json()["kv_transfer_params"]["received_bytes"] > 0
    assert withheld(cluster.url) == before


def test_one_that_only_decode_has(cluster: Cluster, tmp_path: Path) -> None:
    """Decode computes its prompts."""
    before = withheld(cluster.url)
    load(cluster.decode, "of-decode", make_adapter(tmp_path / "adapter", 7))
    for number in range(6):
        prompt = f"Which layer comes behind layer {number}? "
        through = ask(cluster.url, "of-decode", prompt)
        assert tokens(through) == alone(cluster, "of-decode", prompt)
        assert through.json()["kv_transfer_params"] is None
    assert withheld(cluster.url) == before
