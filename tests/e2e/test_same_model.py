# SPDX-License-Identifier: Apache-2.0
"""KV counts only if prefill computed it with decode's model (R8): another one's is refused, and the client is told."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from harness.client import Client, random_prompt
from harness.clusters import TP2_TO_TP1, Cluster, Proxy
from harness.engines import PATIENT, Engine, EngineConfig, Role, stop_all, wait_ready
from harness.models import TINY, ModelSpec, make_model
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference

OTHER_SEED = dataclasses.replace(TINY, name="tiny-other-seed", seed=1)
NAME = "the-model"
OTHER_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}

pytestmark = pytest.mark.timeout(900)


def refusal(url: str, model: str) -> str:
    """What the client of a request is told that must not be answered."""
    body = {"model": model, "prompt": random_prompt(200, "refused"), "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, **PLAIN_HTTP)
    assert answer.status_code >= 500, answer.text
    message: str = answer.json()["error"]["message"]
    return message


@contextlib.contextmanager
def prefill_engines_of_other_models(models: Path, logs: Path) -> Iterator[tuple[list[Engine], Engine]]:
    """One of other weights, one of another RoPE, and the decode engine of both."""
    same, other = make_model(TINY, models), make_model(OTHER_SEED, models)
    base = EngineConfig(connector_extra=PATIENT, args=("--served-model-name", NAME))
    prefill = dataclasses.replace(base, role=Role.PREFILL)
    rotated = dataclasses.replace(prefill, args=(*base.args, "--hf-overrides", json.dumps(OTHER_ROPE)))
    engines = [
        Engine(prefill, other, logs),
        Engine(rotated, same, logs),
        Engine(dataclasses.replace(base, role=Role.DECODE), same, logs),
    ]
    wait_ready(engines)
    try:
        yield engines[:2], engines[2]
    finally:
        stop_all(engines)


@pytest.mark.long
def test_prefill_of_other_weights_or_of_another_rope_is_refused_and_the_client_told_why(
    models: Path, engine_logs: Path
) -> None:
    with prefill_engines_of_other_models(models, engine_logs) as (prefill, decode):
        said = []
        for engine in prefill:
            proxy = Proxy([engine], [decode], engine_logs)
            wait_ready([proxy])
            try:
                said.append(refusal(proxy.url, NAME))
            finally:
                proxy.stop()
    assert "prefill computed with weights" in said[0]
    assert "this engine has" in said[0]
    assert "rope_theta is 20000 on prefill, 10000 on decode" in said[1]


@pytest.mark.parametrize("cluster", [TP2_TO_TP1], ids=str, indirect=True)
def test_weights_updated_on_one_side_are_refused_until_the_other_has_them(
    cluster: Cluster, client: Client, reference: Reference, models: Path
) -> None:
    def update(engine: Engine, model: ModelSpec = OTHER_SEED) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(make_model(model, models))}}
        httpx.post(f"{engine.url}/collective_rpc", json=call, timeout=120, **PLAIN_HTTP).raise_for_status()

    prompt = random_prompt(300, "which both keep in their prefix caches")
    assert client.complete(prompt).token_ids == reference.complete(prompt), "of equal weights at TP 2 and 1"

    update(cluster.decode[0])
    assert "prefill computed with weights" in refusal(cluster.url, client.model)
    update(cluster.prefill[0])
    body = {"model": client.model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    both = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120, **PLAIN_HTTP).json()
    body["cache_salt"] = "decode computes all of it"
    alone = httpx.post(f"{cluster.decode[0].url}/v1/completions", json=body, timeout=120, **PLAIN_HTTP).json()
    assert both["choices"][0]["text"] == alone["choices"][0]["text"], "of the new weights alone"

    update(cluster.decode[0], TINY)
    update(cluster.prefill[0], TINY)
    assert client.complete(prompt).token_ids == reference.complete(prompt), "with the caches of both still full"
