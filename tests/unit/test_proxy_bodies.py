# SPDX-License-Identifier: Apache-2.0
"""A client's body reaches decode and prefill with everything that shapes the prompt, byte for byte."""

import json
from typing import Any

import msgspec
import pytest

from vllm_ascend_pd.proxy.http.bodies import (
    MAX_PROMPTS,
    Content,
    decode_body,
    parse_client_request,
    prefill_body,
    tokens_body,
)
from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.http.messages import RequestRefused

ID = "5b1e0c2e-4d3f-4f0f-8f5a-7c9d1e2f3a4b"
METASERVER = {"metaserver": "http://127.0.0.1:8000/v1/metaserver"}
TICKET = b'{"do_remote_decode":true,"ticket_id":"00ff","remote_block_ids":[[1,2]]}'

# One pixel, as OpenAI's clients send pictures; numbers and escapes that a decoder would write differently.
PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
MIB = 1 << 20
MESSAGES = (
    b'[{"role":"system","content":"Be \\u0062rief."},{"role":"user","content":['
    b'{"type":"text","text":"What is in these?"},'
    b'{"type":"image_url","image_url":{"url":"' + PICTURE.encode() + b'","detail":"high"},"uuid":"image-1"},'
    b'{"type":"input_audio","input_audio":{"data":"UklGRiQAAABXQVZF","format":"wav"}},'
    b'{"type":"video_url","video_url":{"url":"https://example.com/clip.mp4"}}]}]'
)
TOOLS = b'[{"type":"function","function":{"name":"look","parameters":{"properties":{"x":{"minimum":1e2}}}}}]'
CHAT = (
    b'{"model":"vision","messages":' + MESSAGES + b',"tools":' + TOOLS + b',"tool_choice":"auto",'
    b'"mm_processor_kwargs":{"num_crops":4,"scale":1.50},"media_io_kwargs":{"video":{"num_frames":8}},'
    b'"chat_template_kwargs":{"enable_thinking":false},"stream":true,"stream_options":{"include_usage":true},'
    b'"max_completion_tokens":64,"n":2,"seed":12345678901234567890}'
)
SHAPES_THE_PROMPT = (
    "messages",
    "tools",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "chat_template_kwargs",
)


def raw(body: bytes | Content) -> dict[str, bytes]:
    """The fields of a JSON object, undecoded."""
    fields = msgspec.json.decode(bytes(body), type=dict[str, msgspec.Raw])
    return {name: bytes(value) for name, value in fields.items()}


def test_multi_modal_chat_reaches_both_sides_byte_for_byte() -> None:
    request = parse_client_request(Endpoint.CHAT, CHAT)
    decode, prefill, sent = (
        raw(decode_body(request, METASERVER, ID)),
        raw(prefill_body(request, 0, TICKET, ID)),
        raw(CHAT),
    )
    for name in SHAPES_THE_PROMPT:
        assert decode[name] == prefill[name] == sent[name]
    assert decode.pop("kv_transfer_params") != prefill["kv_transfer_params"]
    assert decode == sent  # nothing else is added, lost or written differently
    assert prefill["kv_transfer_params"] == TICKET
    assert prefill["stream"] == b"false"
    assert prefill["n"] == prefill["max_tokens"] == prefill["max_completion_tokens"] == b"1"
    assert "stream_options" not in prefill


@pytest.mark.parametrize(
    ("endpoint", "fields", "sent"),
    [
        (Endpoint.CHAT, b'"tools":[{}]', b"null"),
        (Endpoint.CHAT, b'"tools":[{}],"tool_choice": "auto"', b"null"),
        (Endpoint.CHAT, b'"tools":[{}],"tool_choice":"auto","structured_outputs":null', b"null"),
        (Endpoint.CHAT, b'"tools":[{}],"tool_choice":null', b"null"),
        (Endpoint.CHAT, b'"tools":[{}],"tool_choice":"none"', b'"none"'),
        (Endpoint.CHAT, b'"tools":[{}],"tool_choice":"required"', b'"required"'),
        (Endpoint.CHAT, b'"tools":[{}],"tool_choice":{"type":"function"}', b'{"type":"function"}'),
        (Endpoint.CHAT, b'"tools":[{}],"tool_choice":"auto","structured_outputs":{"regex":"a"}', b'"auto"'),
        (Endpoint.CHAT, b'"tools":null', None),
        (Endpoint.CHAT, b'"n":1', None),
        (Endpoint.RESPONSES, b'"input":"a","tools":[{}],"tool_choice":"auto"', b'"auto"'),
        (
            Endpoint.MESSAGES,
            b'"model":"m","max_tokens":9,"tools":[{}],"tool_choice":{"type":"auto"}',
            b'{"type":"auto"}',
        ),
    ],
)
def test_the_choice_of_a_tool(endpoint: Endpoint, fields: bytes, sent: bytes | None) -> None:
    """Prefill gets null for a chat's "auto", the default beside tools: so it needs no parser of tool calls."""
    request = parse_client_request(endpoint, b'{"messages":' + MESSAGES + b"," + fields + b"}")
    assert raw(prefill_body(request, 0, TICKET, ID)).get("tool_choice") == sent


EMBEDDING = "gASVEQAAAAAAAACMBXRvcmNolIwGVGVuc29ylJOULg=="  # opaque to us: vLLM decodes it


@pytest.mark.parametrize(
    ("fields", "alone"),
    [
        ({"prompt_embeds": EMBEDDING}, [{"prompt_embeds": EMBEDDING}]),
        ({"prompt_embeds": [EMBEDDING, EMBEDDING]}, 2 * [{"prompt_embeds": EMBEDDING}]),
        ({"prompt_embeds": EMBEDDING, "prompt": None}, [{"prompt_embeds": EMBEDDING}]),
        (
            {"prompt": ["a", "b"], "prompt_embeds": EMBEDDING},
            [{"prompt_embeds": EMBEDDING}, {"prompt": "a"}, {"prompt": "b"}],
        ),
    ],
    ids=["one", "several", "null-prompt", "beside-texts"],
)
def test_prompt_embeddings(fields: dict[str, Any], alone: list[dict[str, Any]]) -> None:
    """vLLM makes one engine request of each, embeddings first; prefill gets the one its ticket is for."""
    request = parse_client_request(Endpoint.COMPLETIONS, json.dumps({"model": "m", "max_tokens": 3, **fields}).encode())
    decode = json.loads(bytes(decode_body(request, METASERVER, ID)))
    assert {name: decode[name] for name in fields} == fields
    bodies = [json.loads(bytes(prefill_body(request, i, TICKET, ID))) for i in range(len(request.prompts))]
    assert [{n: body[n] for n in ("prompt", "prompt_embeds") if n in body} for body in bodies] == alone


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (Endpoint.COMPLETIONS, {"prompt": ["a"] * MAX_PROMPTS}),
        (Endpoint.COMPLETIONS, {"prompt": [[1, 2]] * MAX_PROMPTS}),
        (Endpoint.COMPLETIONS, {"prompt_embeds": [EMBEDDING] * MAX_PROMPTS}),
        (Endpoint.COMPLETIONS, {"prompt_embeds": [EMBEDDING] * 3, "prompt": ["a"] * (MAX_PROMPTS - 3)}),
        (Endpoint.CHAT_BATCH, {"messages": [[{"role": "user", "content": "a"}]] * MAX_PROMPTS}),
    ],
)
def test_number_of_prompts_is_bounded(endpoint: Endpoint, fields: dict[str, list[Any]]) -> None:
    assert len(parse_client_request(endpoint, json.dumps(fields).encode()).prompts) == MAX_PROMPTS
    name, several = next(iter(fields.items()))
    one_more = {**fields, name: [*several, several[0]]}
    with pytest.raises(RequestRefused, match=f"more than {MAX_PROMPTS} prompts in one request: each is") as refused:
        parse_client_request(endpoint, json.dumps(one_more).encode())
    assert refused.value.status == 400


def test_a_byte_order_mark_is_named() -> None:
    with pytest.raises(RequestRefused, match="begins with a byte order mark"):
        parse_client_request(Endpoint.COMPLETIONS, b'\xef\xbb\xbf{"prompt": "a"}')


def test_one_prompt_may_have_any_number_of_tokens() -> None:
    body = json.dumps({"prompt": list(range(MAX_PROMPTS + 1))}).encode()
    assert len(parse_client_request(Endpoint.COMPLETIONS, body).prompts) == 1


@pytest.mark.parametrize("written", ["-1", "-1.0", "-10e-1", '"-1"', '"-1.0"', '" -1"', '"-01"'])
def test_truncation_minus_one_is_refused_in_every_spelling(written: str) -> None:
    with pytest.raises(RequestRefused, match="truncate_prompt_tokens=-1 does not work") as refused:
        parse_client_request(Endpoint.CHAT, b'{"messages":[],"truncate_prompt_tokens":%s}' % written.encode())
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "written", ["5", '"5"', "null", "-2", "-1.5", "true", '"all"', '"\\u0000"', "[-1]", "1e999", "{}"]
)
def test_other_truncations_pass_unchecked(written: str) -> None:
    body = b'{"messages":[],"truncate_prompt_tokens":%s}' % written.encode()
    request = parse_client_request(Endpoint.CHAT, body)
    for sent in (decode_body(request, METASERVER, ID), prefill_body(request, 0, TICKET, ID)):
        assert raw(sent)["truncate_prompt_tokens"] == written.encode()


@pytest.mark.parametrize(
    ("endpoint", "body", "samples"),
    [
        (Endpoint.CHAT, '{"messages": []}', 1),
        (Endpoint.CHAT, '{"messages": [], "n": 3}', 3),
        (Endpoint.COMPLETIONS, '{"prompt": "a", "n": "2"}', 2),
        (Endpoint.COMPLETIONS, '{"prompt": "a", "n": null}', 1),
        (Endpoint.CHAT, '{"messages": [], "n": -1}', 1),
        (Endpoint.CHAT, '{"messages": [], "n": [2]}', 1),
        (Endpoint.CHAT, '{"messages": [], "n": 1%s}' % ("0" * 400), 16384),
        (Endpoint.GENERATE, '{"n": 3, "token_ids": [1], "sampling_params": {"n": 2}}', 2),
        (Endpoint.GENERATE, '{"n": 3, "token_ids": [1], "sampling_params": null}', 1),
    ],
)
def test_samples(endpoint: Endpoint, body: str, samples: int) -> None:
    assert parse_client_request(endpoint, body.encode()).samples == samples


BESIDE = {"model": "sql-adapter", "cache_salt": "of the client's", "priority": -3}
PROMPT_FIELDS: dict[Endpoint, dict[str, Any]] = {
    Endpoint.COMPLETIONS: {"prompt": ["a", "b"]},
    Endpoint.CHAT: {"messages": [{"role": "user", "content": "a"}]},
    Endpoint.CHAT_BATCH: {"messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]},
    Endpoint.RESPONSES: {"input": "a", "instructions": "b"},
    Endpoint.MESSAGES: {"messages": [{"role": "user", "content": "a"}], "system": "b"},
    Endpoint.GENERATE: {"token_ids": [5, 6], "sampling_params": {"structured_outputs": {"regex": "a"}, "n": 2}},
}


@pytest.mark.parametrize("endpoint", list(Endpoint), ids=lambda endpoint: endpoint.value)
def test_a_prefill_by_token_ids_carries_the_adapter_the_salt_and_the_priority(endpoint: Endpoint) -> None:
    """And nothing else, as tests/integration/test_proxy_token_ids.py shows with every route's own fields."""
    body = {"stream": True, "temperature": 0.5, "max_tokens": 64, **BESIDE, **PROMPT_FIELDS[endpoint]}
    request = parse_client_request(endpoint, json.dumps(body).encode())
    for _ in request.prompts:
        sent = raw(tokens_body(request, msgspec.Raw(b"[9,8,7]"), TICKET))
        assert sent.pop("kv_transfer_params") == TICKET
        one_token = {"prompt": b"[9,8,7]", "max_tokens": b"1", "min_tokens": b"1", "n": b"1", "stream": b"false"}
        beside = {name: json.dumps(value).encode() for name, value in BESIDE.items()}
        if endpoint is Endpoint.MESSAGES:  # vLLM knows no priority there
            del beside["priority"]
        assert sent == {**one_token, **beside}


@pytest.mark.parametrize("salt", ["null", "5", '""', '["a"]', "{}"])
def test_an_invalid_cache_salt_is_not_passed_on(salt: str) -> None:
    """vLLM 0.23's `/v1/messages` ignores the field on decode, but prefill would refuse it."""
    body = b'{"model":"m","messages":[],"max_tokens":8,"cache_salt":%s}' % salt.encode()
    request = parse_client_request(Endpoint.MESSAGES, body)
    assert set(raw(tokens_body(request, msgspec.Raw(b"[1]"), TICKET))) == {
        *("model", "prompt", "max_tokens", "min_tokens", "n", "stream", "kv_transfer_params")
    }


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT_BATCH])
def test_bodies_for_engines_are_views_of_the_clients(endpoint: Endpoint) -> None:
    """Otherwise 4,096 prompts with a field of 100 KB would take 400 MB."""
    body = {**PROMPT_FIELDS[endpoint], "model": "m" * MIB, "user": "u" * MIB}
    request = parse_client_request(endpoint, json.dumps(body).encode())
    for content in (decode_body(request, METASERVER, ID), prefill_body(request, 1, TICKET, ID)):
        assert content.size > 2 * MIB
        assert sum(len(piece) for piece in content.pieces if not isinstance(piece, memoryview)) < 1000
        assert b"".join(content.chunks()) == bytes(content)
        assert max(map(len, content.chunks())) < MIB


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        (Endpoint.COMPLETIONS, b'{"prompt":"a","n":"%s2"}' % (b" " * MIB), "n is not a number"),
        (Endpoint.GENERATE, b'{"token_ids":[1],"sampling_params":{"a":"%s"}}' % (b"x" * MIB), "exceeds"),
        (
            Endpoint.GENERATE,
            json.dumps({"token_ids": [1], "sampling_params": {str(name): 0 for name in range(300)}}).encode(),
            "more than 256 fields",
        ),
    ],
)
def test_what_would_be_read_for_each_prompt_is_bounded(endpoint: Endpoint, body: bytes, reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason) as refused:
        parse_client_request(endpoint, body)
    assert refused.value.status == 400
