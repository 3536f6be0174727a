# SPDX-License-Identifier: Apache-2.0
"""The ticket on the wire, written and read by vllm-ascend's layerwise connector."""

import dataclasses
import importlib
import json
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm_ascend_contract import LAYERWISE, REQUEST_ID

from harness.scheduling import BLOCK, make_ticket
from vllm_ascend_pd.core.caches import TokenGroup
from vllm_ascend_pd.core.ticket import Ticket, parse_ticket

pytestmark = pytest.mark.npu

OUR_FIELDS = {
    *("ticket_id", "num_tokens", "remote_interleave_size", "remote_draft"),
    *("prompt", "replaces", "checksum_form", "expires_at", "signature"),
}


@pytest.fixture
def posted() -> dict[str, Any]:
    """URL and body of what vllm-ascend's decode side posts for a request of 300 tokens, 128 of them cached."""
    layerwise = importlib.import_module(LAYERWISE)
    scheduler = object.__new__(layerwise.MooncakeLayerwiseConnectorScheduler)
    sent: list[dict[str, Any]] = []

    def submit(call: Callable[..., None], **kwargs: Any) -> Future[None]:
        call(**kwargs)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    vars(scheduler).update(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=2, prefill_context_parallel_size=1, decode_context_parallel_size=1
            )
        ),
        block_size=[BLOCK],
        engine_id="decode",
        side_channel_host="192.0.2.1",
        side_channel_port=20001,
        need_truncate=False,
        _reqs_need_recv={},
        _reqs_need_send_layerwise={},
        executor=SimpleNamespace(submit=submit),
        metaserver_client=SimpleNamespace(post=lambda url, json: sent.append({"url": url, "json": json})),
    )
    request = SimpleNamespace(
        request_id=REQUEST_ID,
        prompt_token_ids=list(range(300)),
        num_computed_tokens=128,
        kv_transfer_params={"do_remote_prefill": True, "metaserver": "http://192.0.2.2:9000/v1/metaserver"},
    )
    blocks = SimpleNamespace(get_block_ids=lambda: ([5, 6, 7],))
    scheduler.update_state_after_alloc(request, blocks, 172)
    assert len(sent) == 1, "vllm-ascend's decode side no longer posts one ticket per request"
    return sent[0]


def test_our_ticket_has_the_fields_of_vllm_ascends(posted: dict[str, Any]) -> None:
    theirs = set(posted["json"])
    ours = set(Ticket.__struct_fields__)
    assert theirs == ours - OUR_FIELDS, "vllm-ascend's ticket has other fields"


def test_their_ticket_means_what_ours_does(posted: dict[str, Any]) -> None:
    from vllm_ascend_pd.connector.vllm_requests import external_request_id

    assert posted["url"] == "http://192.0.2.2:9000/v1/metaserver", "the ticket goes elsewhere than the request says"
    body = json.loads(json.dumps(posted["json"]))
    ticket = parse_ticket({**body, "ticket_id": 32 * "0", "num_tokens": 300}, 300, [TokenGroup(BLOCK)])
    assert ticket.request_id == external_request_id(REQUEST_ID), "another id for the proxy"
    assert (ticket.do_remote_prefill, ticket.do_remote_decode) == (False, True)
    assert (ticket.remote_block_ids, ticket.remote_block_size) == ([[5, 6, 7]], [BLOCK])
    assert (ticket.remote_engine_id, ticket.remote_host, ticket.remote_port) == ("decode", "192.0.2.1", 20001)
    assert (ticket.remote_tp_size, ticket.remote_cached_tokens) == (2, 128)
    assert ticket.token_ids == []


def test_our_ticket_is_understood_by_their_prefill_side() -> None:
    layerwise = importlib.import_module(LAYERWISE)
    ticket = make_ticket(300, [5, 6, 7], tp=2, cached=128)
    step = layerwise.MooncakeLayerwiseConnectorMetadata()
    step.add_new_req(REQUEST_ID, [[1, 2, 3]], msgspec.to_builtins(ticket))
    read = dataclasses.asdict(step.requests[REQUEST_ID])
    shared = {name for name in Ticket.__struct_fields__ if name.startswith("remote_")} - OUR_FIELDS
    shared -= {"remote_cached_tokens"}
    assert {name: read[name] for name in shared} == {name: getattr(ticket, name) for name in shared}
