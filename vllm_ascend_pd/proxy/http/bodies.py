# SPDX-License-Identifier: Apache-2.0
"""Reads a client's JSON body, and makes the bodies for decode and prefill engines from it.

Only fields that the proxy needs are decoded. All others keep their bytes, so nothing is lost or rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE, why_unreadable
from vllm_ascend_pd.core.ticket import WANTS_TOKEN_IDS
from vllm_ascend_pd.proxy.http.endpoints import REQUEST_FORMATS, Endpoint, RequestFormat
from vllm_ascend_pd.proxy.http.messages import RequestRefused

Fields = dict[str, msgspec.Raw]

MAX_PROMPTS = 4096
"""In one request. Each prompt is a request of its own to both engines, with a ticket and a connection, so more of them
would keep other clients out. vLLM 0.32 itself accepts 1,024 (VLLM_MAX_COMPLETION_PROMPTS)."""
_MAX_SAMPLES = 16384
"""vLLM's own limit (VLLM_MAX_N_SEQUENCES)."""


class LacksFieldError(Exception):
    """A body without a field that its route requires: decode answers with an error that says what is wrong."""


def read_fields(body: bytes) -> Fields:
    """The fields of a body, without `kv_transfer_params`.

    An engine reads bodies by Python's `json`, which accepts more than JSON: UTF-16, a byte order mark, NaN, lone
    surrogates. No such body passes: an engine would find fields that were not checked here.

    Raises RequestRefused (400) if the body is not a JSON object, or if the client gave `kv_transfer_params`."""
    try:
        fields = msgspec.json.decode(body, type=Fields)
    except UNREADABLE as error:
        raise bad_request(f"the request body is not a JSON object: {why_unreadable(body, error)}") from None
    if is_given(fields.pop("kv_transfer_params", None)):
        raise bad_request("kv_transfer_params is set by the proxy, not by clients", "kv_transfer_params")
    return fields


def is_given(value: msgspec.Raw | None) -> bool:
    """Whether a field exists and is not null."""
    return value is not None and bytes(value) != b"null"


def bad_request(message: str, param: str | None = None) -> RequestRefused:
    return RequestRefused(HTTPStatus.BAD_REQUEST, message, param)


class ClientRequest(msgspec.Struct, frozen=True):
    endpoint: Endpoint
    fields: Fields
    """The body's fields without the prompts."""
    prompts: tuple[Fields, ...]
    """One entry per engine request that vLLM makes of the body, in vLLM's order. Entry `i` has the fields of prompt `i`
    alone. A chat has exactly one entry."""
    whole_prompt: Fields
    """The prompt fields as the client sent them."""


_FALSE, _NULL, _ONE = msgspec.Raw(b"false"), msgspec.Raw(b"null"), msgspec.Raw(b"1")
_NOT_GIVEN = (b"null", b"false")


def parse_client_request(endpoint: Endpoint, body: bytes) -> ClientRequest:
    """Raises RequestRefused (400) for a request that a separate prefill cannot serve, and LacksFieldError."""
    fields = read_fields(body)
    request_format = REQUEST_FORMATS[endpoint]
    if not request_format.required <= fields.keys():
        raise LacksFieldError
    for name, reason in request_format.refused.items():
        if name in fields and bytes(fields[name]) not in _NOT_GIVEN:
            raise bad_request(f"{name} does not work here: {reason}", name)
    # vLLM truncates the prompt to the room that max_tokens leaves. Prefill has another max_tokens than decode, so it
    # would compute the KV of another prompt.
    if _is_minus_one(fields.get("truncate_prompt_tokens", b"null")):
        raise bad_request(
            "truncate_prompt_tokens=-1 does not work with a separate prefill: give a number of tokens",
            "truncate_prompt_tokens",
        )
    if endpoint is Endpoint.RESPONSES and bytes(fields.get("truncation", b"null")) not in (b"null", b'"disabled"'):
        raise bad_request('truncation must be "disabled" with a separate prefill', "truncation")
    if endpoint is Endpoint.COMPLETIONS:
        # vLLM takes the prompts of both fields, embeddings first.
        whole: Fields = {name: fields.pop(name) for name in ("prompt_embeds", "prompt") if name in fields}
        each = [(name, one) for name, value in whole.items() if is_given(value) for one in _split(value)]
        _check_number(len(each), "prompts", "prompt")
        prompts = tuple({name: one} for name, one in each)
        return ClientRequest(endpoint, fields, prompts, whole)
    if endpoint is Endpoint.CHAT_BATCH and bytes(fields.get("messages", b"")).startswith(b"["):
        messages = fields.pop("messages")
        conversations = msgspec.json.decode(messages, type=list[msgspec.Raw])
        _check_number(len(conversations), "conversations", "messages")
        one_each = tuple({"messages": msgspec.Raw(b"[" + bytes(one) + b"]")} for one in conversations)
        return ClientRequest(endpoint, fields, one_each, {"messages": messages})
    return ClientRequest(endpoint, fields, ({},), {})


def samples_of(request: ClientRequest) -> int:
    """Returns the number of answers that the client wants for each prompt.

    Decode computes each as a request, all with one id. Returns 1 if `n` is not a number: decode refuses the request.
    """
    nested, fields = REQUEST_FORMATS[request.endpoint].nested, request.fields
    try:
        if nested is not None:
            fields = msgspec.json.decode(fields.get(nested, b"{}"), type=Fields)
        number = msgspec.json.decode(fields.get("n", b"1"), type=int | None, strict=False)
    except UNREADABLE:
        return 1
    return min(max(1, number or 1), _MAX_SAMPLES)


def decode_body(
    request: ClientRequest, metaserver_url: str, request_id: str, advice: Mapping[str, str | bool | float] | None = None
) -> bytes:
    """Returns the client's body with the order to decode to get the prompt's KV through the metaserver.

    `request_id`: the id for the body, if the route has an id in it.
    """
    transfer = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "metaserver": metaserver_url,
        WANTS_TOKEN_IDS: True,
        **(advice or {}),
    }
    return msgspec.json.encode(
        {**request.fields, **request.whole_prompt, **_id(request, request_id), "kv_transfer_params": transfer}
    )


def prefill_body(
    request: ClientRequest, index: int, ticket: bytes, request_id: str, is_for_base_model: bool = False
) -> bytes:
    """The body for prompt `index`: one token, no stream, and decode's ticket byte for byte.

    `is_for_base_model`: whether the model's name chooses no adapter. It is left out then: prefill may have another one.

    The proxy reads only whether prefill worked, so fields that ask for more are dropped. Fields that shape the prompt
    (tools, response_format, truncation, ...) stay: prefill must compute exactly decode's tokens."""
    request_format = REQUEST_FORMATS[request.endpoint]
    fields = _without_tool_parser(request.fields) if request.endpoint is Endpoint.CHAT else request.fields
    if is_for_base_model and "model" not in request_format.required:
        fields = {name: value for name, value in fields.items() if name != "model"}
    if request_format.nested is None:
        fields = _one_token(fields, request_format)
    else:
        inner = fields.get(request_format.nested)
        try:
            params = {} if inner is None else msgspec.json.decode(inner, type=Fields)
            fields = {
                **fields,
                request_format.nested: msgspec.Raw(msgspec.json.encode(_one_token(params, request_format))),
            }
        except UNREADABLE:
            pass  # not an object: prefill refuses it as decode does
        fields = {**fields, "stream": _FALSE}
        fields.pop("stream_options", None)
    return msgspec.json.encode(
        {
            **fields,
            **request.prompts[index],
            **_id(request, request_id),
            "kv_transfer_params": msgspec.Raw(ticket),
        }
    )


def tokens_body(
    request: ClientRequest, token_ids: msgspec.Raw, ticket: bytes, is_for_base_model: bool = False
) -> bytes:
    """The body for a prompt whose token ids decode has sent. It is for `Endpoint.COMPLETIONS`, whatever route the
    client used. It keeps the client's fields that choose the adapter, the priority and the prefix cache.

    `is_for_base_model`: as for `prefill_body`.
    """
    kept = {
        name: request.fields[name] for name in REQUEST_FORMATS[request.endpoint].beside_tokens if name in request.fields
    }
    if is_for_base_model:
        kept.pop("model", None)
    if not _is_text(kept.get("cache_salt", b"null")):
        kept.pop("cache_salt", None)
    one_token = {name: msgspec.Raw(value) for name, value in REQUEST_FORMATS[Endpoint.COMPLETIONS].one_token.items()}
    return msgspec.json.encode({**kept, **one_token, "prompt": token_ids, "kv_transfer_params": msgspec.Raw(ticket)})


def _without_tool_parser(fields: Fields) -> Fields:
    """The fields of a chat, such that prefill needs no parser of tool calls.

    vLLM demands one where `tool_choice` is "auto", the default beside tools. It demands none where it is null, and
    renders the same prompt. Beside `structured_outputs` it refuses null. Other choices may shape the prompt.
    """
    if not is_given(fields.get("tools")) or is_given(fields.get("structured_outputs")):
        return fields
    if bytes(fields.get("tool_choice", b'"auto"')) != b'"auto"':
        return fields
    return {**fields, "tool_choice": _NULL}


def _one_token(fields: Fields, request_format: RequestFormat) -> Fields:
    kept = {
        name: _ONE if name in request_format.also_limits else value
        for name, value in fields.items()
        if name not in request_format.not_for_prefill
    }
    return {**kept, **{name: msgspec.Raw(value) for name, value in request_format.one_token.items()}}


def _id(request: ClientRequest, request_id: str) -> Fields:
    name = REQUEST_FORMATS[request.endpoint].id_field
    return {} if name is None else {name: msgspec.Raw(b'"resp_%s"' % request_id.encode())}


def _split(prompt: msgspec.Raw) -> list[msgspec.Raw]:
    """`list[str]` and `list[list[int]]` are several prompts; `list[int]` is one prompt's token ids."""
    if not bytes(prompt).startswith(b"["):
        return [prompt]
    items = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    if items and bytes(items[0]).startswith((b'"', b"[")):
        return items
    return [prompt]


def _check_number(number: int, of_what: str, field: str) -> None:
    if number > MAX_PROMPTS:
        raise bad_request(f"{number} {of_what} in one request, at most {MAX_PROMPTS}: each is one to an engine", field)


def _is_text(value: msgspec.Raw | bytes) -> bool:
    """Whether `value` is a string and not empty. vLLM accepts no other salt, and some routes of 0.23 ignore the
    field."""
    return bytes(value).startswith(b'"') and bytes(value) != b'""'


def _is_minus_one(value: msgspec.Raw | bytes) -> bool:
    """Accepts strings and fractions, as vLLM does. vLLM refuses everything that is not a number."""
    try:
        return float(msgspec.json.decode(value, type=float | str)) == -1
    except (*UNREADABLE, ValueError):
        return False
