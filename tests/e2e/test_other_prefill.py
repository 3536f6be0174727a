# SPDX-License-Identifier: Apache-2.0
"""Prefill in another time zone, with another adapter under the same name: it computes decode's tokens, or is refused
and the client told why. `test_same_model.py` has other weights and RoPE settings, `test_same_prompt.py` templates."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.clusters import PATIENT_PROXY, Proxy
from harness.engines import PATIENT, Engine, EngineConfig, Role, stop_all, wait_ready
from harness.layerwise_proxy import layerwise_proxy
from harness.models import CHAT_TEMPLATE, TINY, make_model
from harness.plain_http import PLAIN_HTTP
from harness.pool import ClusterPool, ReferencePool
from harness.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

DATED = "{{ strftime_now('%Y-%m-%d %H') }} " + CHAT_TEMPLATE
FAR_EAST = "XXX-14"
"""14 hours before UTC: another hour, and for most of the day another date, of as many tokens."""
NAME, ADAPTER, COMMON = "the-model", "of-one-name", "of-one-content"
MESSAGES = [{"role": "user", "content": "Which layer comes before layer 9? " * 10}]
RENDERED_DIFFERENTLY = "the prompt's tokens differ: decode and prefill rendered or tokenized it differently"
RANK = 8


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


@dataclass(frozen=True)
class Pair:
    prefill: Engine
    decode: Engine
    proxy: Proxy

    def ask(self, url: str, path: str, **body: Any) -> httpx.Response:
        body = {"model": NAME, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **body}
        return httpx.post(f"{url}{path}", json=body, timeout=120, **PLAIN_HTTP)


@pytest.fixture(scope="module")
def pair(
    cluster_pool: ClusterPool,
    reference_pool: ReferencePool,
    models: Path,
    engine_logs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Prefill in another time zone, with another adapter; decode itself computes what answers are compared with."""
    cluster_pool.stop()
    reference_pool.stop()
    folder = tmp_path_factory.mktemp("adapters")
    common = make_adapter(folder / "common", 1)
    base = EngineConfig(
        connector_extra=PATIENT,
        args=("--served-model-name", NAME, "--chat-template", DATED, "--enable-lora", "--max-lora-rank", str(RANK)),
        env=(("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"),),
    )

    def config(role: Role, seed: int) -> EngineConfig:
        own = make_adapter(folder / role.value, seed)
        adapters = ("--lora-modules", f"{ADAPTER}={own}", f"{COMMON}={common}", "--max-loras", "2")
        return dataclasses.replace(base, role=role, args=(*base.args, *adapters))

    prefill = dataclasses.replace(config(Role.PREFILL, 2), env=(*base.env, ("TZ", FAR_EAST)))
    model = make_model(TINY, models)
    engines = [Engine(prefill, model, engine_logs), Engine(config(Role.DECODE, 3), model, engine_logs)]
    wait_ready(engines)
    proxy = Proxy(engines[:1], engines[1:], engine_logs, args=PATIENT_PROXY)
    wait_ready([proxy])
    try:
        yield Pair(engines[0], engines[1], proxy)
    finally:
        proxy.stop()
        stop_all(engines)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    ids: list[int] = choice["token_ids"]
    assert len(ids) == 12
    return ids


def test_a_dated_template_in_another_time_zone(pair: Pair) -> None:
    """Prefill alone would render another date: it computes decode's."""
    asked = {"messages": MESSAGES, "return_token_ids": True}
    through = pair.ask(pair.proxy.url, "/v1/chat/completions", **asked)
    alone = pair.ask(pair.decode.url, "/v1/chat/completions", **asked, cache_salt="decode computes all of it")
    there = pair.ask(pair.prefill.url, "/v1/chat/completions", **asked, cache_salt="what prefill would render")
    assert tokens(through) == tokens(alone)
    assert through.json()["kv_transfer_params"]["received_bytes"] > 0
    rendered = [answer.json()["prompt_token_ids"] for answer in (through, there)]
    assert rendered[0] != rendered[1]
    assert len(rendered[0]) == len(rendered[1]), "only the content of the date tells them apart"


def test_a_dated_template_of_a_proxy_that_sends_text_is_refused(pair: Pair) -> None:
    """vllm-ascend's: its client gets nothing, and both engines' logs say why."""
    with layerwise_proxy(pair.prefill.url, pair.decode.url, attempts=1) as theirs:
        answer = pair.ask(theirs.url, "/v1/chat/completions", messages=MESSAGES, cache_salt="by text")
    assert answer.text == ""
    assert any("500 Internal Server Error" in each for each in theirs.swallowed), theirs.swallowed
    assert RENDERED_DIFFERENTLY in pair.prefill.log.read_text()
    wait_until(lambda: "no KV received: " in pair.decode.log.read_text(), 30)


def test_another_adapter_under_the_same_name_is_refused(pair: Pair) -> None:
    answer = pair.ask(pair.proxy.url, "/v1/completions", model=ADAPTER, prompt="Which layer comes before it? " * 12)
    assert answer.status_code >= 500, answer.text
    assert "the LoRA adapter differs" in answer.json()["error"]["message"]


def test_an_adapter_of_equal_content_is_answered(pair: Pair) -> None:
    asked = {"model": COMMON, "prompt": "Which layer comes behind it? " * 12, "return_token_ids": True}
    through = pair.ask(pair.proxy.url, "/v1/completions", **asked)
    alone = pair.ask(pair.decode.url, "/v1/completions", **asked, cache_salt="decode computes all of it")
    without = pair.ask(pair.decode.url, "/v1/completions", **{**asked, "model": NAME})
    assert tokens(through) == tokens(alone)
    assert through.json()["kv_transfer_params"]["received_bytes"] > 0
    assert tokens(without) != tokens(alone), "the adapter decides"


def test_an_adapter_that_is_loaded_again_with_other_files_has_new_answers(pair: Pair, tmp_path: Path) -> None:
    """Both engines have KV of the old files in their prefix caches, under the same name and path."""

    def on_both(call: str, **fields: str) -> None:
        for engine in (pair.prefill, pair.decode):
            asked = {"lora_name": "renewed", **fields}
            httpx.post(f"{engine.url}/v1/{call}_lora_adapter", json=asked, timeout=60, **PLAIN_HTTP).raise_for_status()

    prompt = "Which layer comes after all others? " * 12
    asked = {"model": "renewed", "prompt": prompt, "return_token_ids": True}
    path = str(make_adapter(tmp_path / "renewed", 4))
    on_both("load", lora_path=path)
    old = [tokens(pair.ask(pair.proxy.url, "/v1/completions", **asked)) for _ in range(2)]
    on_both("unload")
    make_adapter(tmp_path / "renewed", 5)
    on_both("load", lora_path=path)
    longer = {**asked, "prompt": f"{prompt} And before them? " * 2}  # decode has a part in its cache, prefill too
    alone = tokens(pair.ask(pair.decode.url, "/v1/completions", **longer, cache_salt="decode computes all of it"))
    through = pair.ask(pair.proxy.url, "/v1/completions", **longer)
    assert tokens(through) == alone
    assert through.json()["kv_transfer_params"]["received_bytes"] > 0
    assert tokens(pair.ask(pair.proxy.url, "/v1/completions", **asked)) not in old, "the adapter decides"
