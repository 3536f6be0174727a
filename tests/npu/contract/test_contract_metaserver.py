# SPDX-License-Identifier: Apache-2.0
"""Our proxy's metaserver, called by the decode side of vllm-ascend's layerwise connector: its own HTTP client, threads
and ticket, between a real proxy and stand-ins for the engines' APIs."""

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_ascend_contract import BLOCK, LAYERWISE

sys.path.append(str(Path(__file__).resolve().parents[2] / "integration"))

from engine_standin import make_layerwise_ticket
from layerwise_engines import LayerwiseDecodeEngine, LayerwisePrefillEngine
from proxy_cluster import CHAT, COMPLETION, Cluster, eventually, running_cluster

pytestmark = pytest.mark.npu

PROMPT_TOKENS = 300
SUFFIX = "-1a2b3c4d"
"""What vLLM appends to the API's id of a request."""


class TheirDecodeEngine(LayerwiseDecodeEngine):
    """Its tickets come from vllm-ascend's scheduler, which posts them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException | None] = []
        """Of each post, once it was answered."""
        self.scheduler = _scheduler(self)

    async def _post(self, url: str, request_id: str) -> None:
        self.scheduler.update_state_after_alloc(
            SimpleNamespace(
                request_id=request_id + SUFFIX,
                prompt_token_ids=list(range(PROMPT_TOKENS)),
                num_computed_tokens=0,
                kv_transfer_params={"do_remote_prefill": True, "do_remote_decode": False, "metaserver": url},
            ),
            SimpleNamespace(get_block_ids=lambda: ([3, 4, 5],)),
            PROMPT_TOKENS,
        )


def _scheduler(engine: TheirDecodeEngine) -> Any:
    """As made for decode with TP 1, without an engine around it. Posts are noted where they end."""
    layerwise = importlib.import_module(LAYERWISE)
    spec = SimpleNamespace(block_size=BLOCK)
    transfer = SimpleNamespace(is_kv_consumer=True, kv_port=30100, get_from_extra_config=lambda _, default: default)
    parallel = SimpleNamespace(
        data_parallel_rank=0,
        tensor_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
    )
    scheduler = layerwise.MooncakeLayerwiseConnectorScheduler(
        SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel),
        SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])]),
        "decode-engine",
    )
    submit = scheduler.executor.submit

    def noted(*args: Any, **kwargs: Any) -> Any:
        future = submit(*args, **kwargs)
        future.add_done_callback(lambda done: engine.errors.append(done.exception()))
        return future

    scheduler.executor.submit = noted
    return scheduler


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    decode = TheirDecodeEngine()
    with running_cluster(decode_engine=decode, prefill_engine=LayerwisePrefillEngine(decode)) as running:
        yield running
    decode.scheduler.executor.shutdown()
    decode.scheduler.metaserver_client.close()


def outcomes(cluster: Cluster) -> list[BaseException | None]:
    """Returns the outcomes of its posts. The proxy may serve the client before the post's thread has its answer."""
    eventually(lambda: cluster.decode.errors)
    return cluster.decode.errors


@pytest.mark.parametrize(
    ("path", "body", "engine_id"),
    [("/v1/completions", COMPLETION, "cmpl-{}-0"), ("/v1/chat/completions", CHAT, "chatcmpl-{}")],
)
def test_their_ticket_is_served(cluster: Cluster, path: str, body: dict[str, Any], engine_id: str) -> None:
    assert cluster.client.post(path, json=body).status_code == 200
    [received] = cluster.prefill.received
    posted = received.body["kv_transfer_params"]
    ours = make_layerwise_ticket(engine_id.format(received.headers["x-request-id"]))
    # The host is this machine's own.
    assert {**posted, "remote_host": "127.0.0.1"} == ours, "the stand-in's ticket is not what vllm-ascend posts"
    assert outcomes(cluster) == [None]


def test_their_post_is_answered_when_prefill_has_ended(cluster: Cluster) -> None:
    cluster.prefill.holds = True
    statuses: list[int] = []
    client = threading.Thread(target=lambda: statuses.append(cluster.complete().status_code))
    client.start()
    assert cluster.prefill.working.wait(10)
    assert cluster.decode.errors == [], "vllm-ascend does not wait for the answer"
    cluster.prefill.holds = False
    client.join(30)
    assert (statuses, outcomes(cluster)) == ([200], [None])


def test_a_failed_prefill_is_no_failure_to_them(cluster: Cluster) -> None:
    """So the proxy ends the request: otherwise decode would wait for its KV."""
    cluster.prefill.refusal = (500, {"error": {"message": "out of blocks"}})
    response = cluster.complete()
    assert response.status_code == 502
    assert "out of blocks" in response.json()["error"]["message"]
    assert cluster.decode.cancelled.wait(10)
    assert outcomes(cluster) == [None], "vllm-ascend's decode side looks at the metaserver's answer"
