# SPDX-License-Identifier: Apache-2.0
"""KV counts only if prefill computed it with decode's model (R8): another one's is refused, and the client is told."""

import dataclasses
from pathlib import Path

import httpx
import pytest

from harness.client import Client, random_prompt
from harness.clusters import TP2_TO_TP1, Cluster
from harness.engines import Engine
from harness.models import TINY, ModelSpec, make_model
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference

OTHER_SEED = dataclasses.replace(TINY, name="tiny-other-seed", seed=1)

pytestmark = pytest.mark.timeout(900)


def refusal(url: str, model: str) -> str:
    """What the client of a request is told that must not be answered."""
    body = {"model": model, "prompt": random_prompt(200, "refused"), "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, **PLAIN_HTTP)
    assert answer.status_code >= 500, answer.text
    message: str = answer.json()["error"]["message"]
    return message


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
