# SPDX-License-Identifier: Apache-2.0
"""The proxy's routes against vLLM's own: none is forgotten, and vLLM's request classes take the bodies that engines get
as they are meant. docs/routes.md says what the code does."""

from __future__ import annotations

import asyncio
import json
import re
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI

from vllm_ascend_pd.proxy.http.bodies import decode_body, parse_client_request, prefill_body, tokens_body
from vllm_ascend_pd.proxy.http.endpoints import DECODE_ALONE_GET, DECODE_ALONE_POST, NOT_SERVED, Endpoint
from vllm_ascend_pd.proxy.http.streams import Opening, error_of, names_no_reason, opening

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "routes.md").read_text()
REQUEST_ID = "5b1e0c2e-4d3f-4f0f-8f5a-7c9d1e2f3a4b"
METASERVER = {"metaserver": "http://127.0.0.1:8000/v1/metaserver"}
TICKET = {"do_remote_decode": True, "do_remote_prefill": False, "ticket_id": "00ff"}
MESSAGES = [{"role": "user", "content": "hi"}]


def documented(section: str) -> list[str]:
    """Returns the paths that begin a table's row, or are in a list, of a section of docs/routes.md."""
    text = DOCUMENT.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(/[^`]+)` \|", text, re.MULTILINE)
    return rows or re.findall(r"`(/[^`]+)`", text)


def test_the_document_says_what_is_served() -> None:
    assert documented("Prefill elsewhere") == [endpoint.value for endpoint in Endpoint]
    assert sorted(documented("Decode alone")) == sorted([*DECODE_ALONE_GET, *DECODE_ALONE_POST])
    assert documented("Not served") == list(NOT_SERVED)


def test_no_route_of_vllm_is_forgotten() -> None:
    pytest.importorskip("vllm.entrypoints.scale_out", reason="docs/routes.md names the routes of vLLM 0.30 and later")
    from vllm.entrypoints.generate.api_router import register_generate_api_routers
    from vllm.entrypoints.openai.models.api_router import router as models
    from vllm.entrypoints.scale_out.factories import register_scale_out_api_routers
    from vllm.entrypoints.serve.tokenize.api_router import router as tokenize
    from vllm.entrypoints.speech_to_text.factories import register_speech_to_text_api_routers

    app = FastAPI()
    app.state.args = Namespace(enable_scale_out=True, tokens_only=False)
    register_generate_api_routers(app)
    with suppress(ModuleNotFoundError):  # from 0.32 on
        decisions = import_module("vllm.entrypoints.generate.structured_decisions.api_router")
        decisions.register_structured_decisions_api_router(app)
    register_scale_out_api_routers(app, ("generate",))
    register_speech_to_text_api_routers(app, ("transcription", "realtime"))
    for router in (models, tokenize):
        app.include_router(router)
    paths = {route.path for route in app.routes if "/docs" not in route.path and route.path != "/redoc"}
    paths -= {"/openapi.json"}
    assert len(paths) > 20
    assert {endpoint.value for endpoint in Endpoint} <= paths, "vLLM has dropped a route"
    assert {path for path in paths if f"`{path}`" not in DOCUMENT} == set()


def test_vllm_0_23_has_every_route_with_prefill_elsewhere() -> None:
    disagg = pytest.importorskip("vllm.entrypoints.serve.disagg.api_router", reason="this is a later vLLM")
    from vllm.entrypoints.generate.api_router import register_generate_api_routers

    app = FastAPI()
    app.state.args = Namespace(tokens_only=True)
    register_generate_api_routers(app)
    disagg.attach_router(app)
    assert {endpoint.value for endpoint in Endpoint} <= {route.path for route in app.routes}


def bodies(endpoint: Endpoint, client: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the bodies that decode and the first prefill got."""
    request = parse_client_request(endpoint, json.dumps(client).encode())
    return (
        json.loads(bytes(decode_body(request, METASERVER, REQUEST_ID))),
        json.loads(bytes(prefill_body(request, 0, json.dumps(TICKET).encode(), REQUEST_ID))),
    )


def check(decode: Any, prefill: Any) -> None:
    """Builds vLLM's sampling parameters for both, which checks them."""
    assert METASERVER.items() <= decode.extra_args["kv_transfer_params"].items()
    assert prefill.extra_args["kv_transfer_params"] == TICKET
    assert (prefill.max_tokens, prefill.n) == (1, 1)
    assert decode.max_tokens == 40


@pytest.mark.parametrize(
    ("chosen", "kept"), [({}, None), ({"tool_choice": "auto"}, None), ({"tool_choice": "required"}, "required")]
)
@pytest.mark.parametrize("more", [{}, {"structured_outputs": {"regex": "a+"}}], ids=["", "structured"])
def test_a_chat_with_tools(chosen: dict[str, str], kept: str | None, more: dict[str, Any]) -> None:
    """vLLM lets prefill's `tool_choice` be null beside tools, and then asks for no parser of tool calls."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    client = {"model": "m", "messages": MESSAGES, "max_tokens": 40, "tools": tools, **chosen, **more}
    decode, prefill = map(ChatCompletionRequest.model_validate, bodies(Endpoint.CHAT, client))
    check(decode.to_sampling_params(40, {}), prefill.to_sampling_params(1, {}))
    assert decode.tool_choice == chosen.get("tool_choice", "auto")
    assert prefill.tool_choice == (decode.tool_choice if more else kept)
    assert prefill.tools == decode.tools != []


def test_responses() -> None:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    client = {"model": "m", "input": MESSAGES, "max_output_tokens": 40, "stream": True, "top_logprobs": 2}
    client["include"] = ["message.output_text.logprobs"]
    decode, prefill = map(ResponsesRequest.model_validate, bodies(Endpoint.RESPONSES, client))
    check(decode.to_sampling_params(1000), prefill.to_sampling_params(1000))
    assert decode.request_id == prefill.request_id == f"resp_{REQUEST_ID}"
    assert (prefill.stream, prefill.store, prefill.background) == (False, False, False)


def test_messages() -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    client = {"model": "m", "messages": MESSAGES, "max_tokens": 2000, "stream": True}
    client["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    try:
        to_chat = AnthropicServingMessages.to_chat_completion_request
    except AttributeError:  # vLLM 0.23
        to_chat = AnthropicServingMessages._convert_anthropic_to_openai_request
    decode, prefill = (
        to_chat(AnthropicMessagesRequest.model_validate(body)) for body in bodies(Endpoint.MESSAGES, client)
    )
    check(decode.to_sampling_params(40, {}), prefill.to_sampling_params(1, {}))
    assert prefill.max_completion_tokens == 1
    assert not prefill.stream


def test_messages_whose_generation_fails() -> None:
    """vLLM's error has no reason then, and the proxy knows that."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    error = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}

    async def chat() -> AsyncIterator[str]:
        yield f"data: {json.dumps({'error': error})}\n\n"
        yield "data: [DONE]\n\n"

    async def answer() -> bytes:
        serving = AnthropicServingMessages.__new__(AnthropicServingMessages)
        return "".join([event async for event in serving.message_stream_converter(chat())]).encode()

    events = asyncio.run(answer())
    assert opening(events) is Opening.FAILED
    status, body = error_of(events)
    assert (status, names_no_reason(body)) == (500, True)


def test_a_batch() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest

    client = {"messages": [MESSAGES, MESSAGES], "max_tokens": 40, "model": "m", "use_beam_search": False}
    decode, prefill = map(BatchChatCompletionRequest.model_validate, bodies(Endpoint.CHAT_BATCH, client))
    assert (len(decode.messages), prefill.messages) == (2, [MESSAGES])
    of_one = [each.to_chat_completion_request(each.messages[0]) for each in (decode, prefill)]
    check(of_one[0].to_sampling_params(40, {}), of_one[1].to_sampling_params(1, {}))
    assert of_one[1].max_tokens == 1


def test_token_ids() -> None:
    try:
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    except ModuleNotFoundError:  # vLLM 0.23
        from vllm.entrypoints.serve.disagg.protocol import GenerateRequest

    client = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 40, "logprobs": 1, "n": 1}, "stream": True}
    decode, prefill = map(GenerateRequest.model_validate, bodies(Endpoint.GENERATE, client))
    assert (decode.sampling_params.max_tokens, prefill.sampling_params.max_tokens) == (40, 1)
    assert METASERVER.items() <= decode.kv_transfer_params.items()
    assert prefill.kv_transfer_params == TICKET
    assert prefill.token_ids == [1, 2, 3]
    assert (prefill.stream, prefill.sampling_params.logprobs) == (False, None)


@pytest.mark.parametrize("endpoint", list(Endpoint), ids=lambda endpoint: endpoint.value)
def test_prompts_by_token_ids(endpoint: Endpoint) -> None:
    """vLLM's completions take them, whatever the client's route is: nothing is left to render, tokenize or truncate."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    body = {"messages": [MESSAGES], "input": "a", "prompt": "a", "model": "m", "cache_salt": "s", "priority": 2}
    body |= {"tools": [{}], "response_format": {"type": "json_object"}, "truncate_prompt_tokens": 1, "max_tokens": 40}
    body |= {"token_ids": [3, 1, 2], "sampling_params": {}}
    request = parse_client_request(endpoint, json.dumps(body).encode())
    sent = bytes(tokens_body(request, msgspec.Raw(b"[3,1,2]"), json.dumps(TICKET).encode()))
    prefill = CompletionRequest.model_validate_json(sent)
    check(_decode_of(40), params := prefill.to_sampling_params(1, {}))
    assert (prefill.prompt, prefill.cache_salt, prefill.model) == ([3, 1, 2], "s", "m")
    assert prefill.priority == (0 if endpoint is Endpoint.MESSAGES else 2)
    assert (params.min_tokens, params.structured_outputs, prefill.stream) == (1, None, False)
    assert prefill.truncate_prompt_tokens is None
    said = prefill.model_dump(exclude_unset=True).keys() - {"kv_transfer_params", "model", "cache_salt", "priority"}
    assert said == {"prompt", "max_tokens", "min_tokens", "n", "stream"}


def _decode_of(max_tokens: int) -> Any:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    decode, _ = bodies(Endpoint.COMPLETIONS, {"prompt": "a", "max_tokens": max_tokens})
    return CompletionRequest.model_validate(decode).to_sampling_params(max_tokens, {})


def test_any_engine_takes_a_priority() -> None:
    """Only decode has `--scheduling-policy priority`. Neither version refuses a priority that it does not use."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

    from harness.scheduling import make_request

    queue = create_request_queue(SchedulingPolicy.FCFS)
    for priority in (3, -3):
        request = make_request(f"r{priority}", 4, None)
        request.priority = priority
        queue.add_request(request)
    assert queue.pop_request().priority == 3


@pytest.mark.parametrize("value", ["text", 7, ["do_remote_prefill"], []])
def test_transfer_parameters_that_are_no_object(value: Any) -> None:
    """vLLM takes them from `vllm_xargs` as they are: the connector sees them, and leaves them alone."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from vllm_ascend_pd.core.ticket_params import carries_ticket, wants_ticket

    try:
        request = CompletionRequest(model="m", prompt="a", vllm_xargs={"kv_transfer_params": value})
    except ValueError:
        assert isinstance(value, list)
        pytest.skip("vLLM 0.23 refuses lists")
    params = request.to_sampling_params(10).extra_args["kv_transfer_params"]
    assert params == value
    assert not wants_ticket(params)
    assert not carries_ticket(params)
