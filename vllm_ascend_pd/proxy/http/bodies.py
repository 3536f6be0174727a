# SPDX-License-Identifier: Apache-2.0
"""Reads a client's JSON body, and makes the bodies for decode and prefill engines from it.

Only fields that the proxy needs are decoded. All others keep their bytes, so nothing is lost or rounded. They are views
of the client's body: bodies for engines are made of the same memory, however many prompts there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE, why_unreadable
from vllm_ascend_pd.core.ticket_params import WANTS_TOKEN_IDS
from vllm_ascend_pd.proxy.http.arriving import MAX_FIELDS
from vllm_ascend_pd.proxy.http.endpoints import REQUEST_FORMATS, Endpoint, RequestFormat
from vllm_ascend_pd.proxy.http.messages import RequestRefused

Buffer = bytes | bytearray | memoryview
Fields = dict[str, memoryview]
"""JSON text of each field."""

MAX_PROMPTS = 4096
"""In one request. Each prompt is a request of its own to both engines, with a ticket and a connection, so more of them
would keep other clients out. vLLM 0.32 itself accepts 1,024 (VLLM_MAX_COMPLETION_PROMPTS)."""
_MAX_SAMPLES = 16384
"""vLLM's own limit (VLLM_MAX_N_SEQUENCES)."""
_MAX_NESTED_BYTES = 1024 * 1024
"""Of the object that has the fields of `RequestFormat.nested`."""
_MAX_NUMBER_BYTES = 1024
_COPIED_BYTES = 16 * 1024
"""Pieces up to this size are copied into one chunk."""
_CHUNK_BYTES = 256 * 1024
_TRANSFER = "kv_transfer_params"


class Content:
    """The body of a request to an engine, in pieces."""

    def __init__(self, *pieces: Buffer) -> None:
        self.pieces = pieces
        self.size = sum(map(len, pieces))
        """In bytes."""

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)

    def chunks(self) -> Iterator[Buffer]:
        """The whole body, in chunks of some `_CHUNK_BYTES` at most."""
        small = bytearray()
        for piece in self.pieces:
            if len(piece) > _COPIED_BYTES:
                if small:
                    yield small
                    small = bytearray()
                view = memoryview(piece)
                yield from (view[at : at + _CHUNK_BYTES] for at in range(0, len(view), _CHUNK_BYTES))
            else:
                small += piece
                if len(small) >= _CHUNK_BYTES:
                    yield small
                    small = bytearray()
        if small:
            yield small


class LacksFieldError(Exception):
    """A body without a field that its route requires: decode answers with an error that says what is wrong."""


def read_fields(body: Buffer) -> Fields:
    """The fields of a body, without `kv_transfer_params`.

    An engine reads bodies by Python's `json`, which accepts more than JSON: UTF-16, a byte order mark, NaN, lone
    surrogates. No such body passes: an engine would find fields that were not checked here.

    Raises RequestRefused (400) if the body is not a JSON object, or if the client gave `kv_transfer_params`."""
    try:
        fields = _fields(body)
    except UNREADABLE as error:
        raise bad_request(f"the request body is not a JSON object: {why_unreadable(body, error)}") from None
    if is_given(fields.pop("kv_transfer_params", None)):
        raise bad_request("kv_transfer_params is set by the proxy, not by clients", "kv_transfer_params")
    return fields


def _fields(text: Buffer) -> Fields:
    return {name: memoryview(value) for name, value in msgspec.json.decode(text, type=dict[str, msgspec.Raw]).items()}


def is_given(value: memoryview | None) -> bool:
    """Whether a field exists and is not null."""
    return value is not None and not _is(value, b"null")


def begins_with(value: memoryview, text: bytes) -> bool:
    return bytes(value[: len(text)]) == text


def _is(value: memoryview, *texts: bytes) -> bool:
    """Whether a value is one of these. Large values are not copied."""
    return any(len(value) == len(text) and bytes(value) == text for text in texts)


def bad_request(message: str, param: str | None = None) -> RequestRefused:
    return RequestRefused(HTTPStatus.BAD_REQUEST, message, param)


class Prompt(NamedTuple):
    """What makes one prompt of a request that may have several."""

    field: str
    """The field of a body for this prompt alone."""
    text: memoryview
    """Its JSON text, or the conversation in the list that is."""
    is_listed: bool = False
    """Whether the field is a list of conversations."""


class ClientRequest(msgspec.Struct, frozen=True):
    endpoint: Endpoint
    fields: Fields
    """The body's fields without the prompts."""
    prompts: tuple[Prompt, ...]
    """One per engine request that vLLM makes of the body, in vLLM's order."""
    whole_prompt: Fields
    """The prompt fields as the client sent them."""
    samples: int
    """How many answers the client wants for each prompt. Decode computes each as a request, all with one id. 1 if it is
    no number: decode refuses the request."""
    nested: Fields | None
    """The fields of the field `RequestFormat.nested`, if the route has it and it is an object."""


_FALSE, _NULL, _ONE = memoryview(b"false"), memoryview(b"null"), memoryview(b"1")
_NO_TEXT = memoryview(b"")
_OF_TEXTS_OR_LISTS = re.compile(rb"\[\s*[\"\[]")
_END = msgspec.Raw(b"")
_Items = msgspec.defstruct(
    "_Items",
    [(f"item_{number}", msgspec.Raw, _END) for number in range(MAX_PROMPTS)],
    array_like=True,
    forbid_unknown_fields=True,
)
"""A list of at most MAX_PROMPTS values. msgspec refuses longer ones without reading them to their end."""


def parse_client_request(endpoint: Endpoint, body: Buffer) -> ClientRequest:
    """Raises RequestRefused (400) for a request that a separate prefill cannot serve, and LacksFieldError."""
    fields = read_fields(body)
    request_format = REQUEST_FORMATS[endpoint]
    if not request_format.required <= fields.keys():
        raise LacksFieldError
    for name, reason in request_format.refused.items():
        if name in fields and not _is(fields[name], b"null", b"false"):
            raise bad_request(f"{name} does not work here: {reason}", name)
    # vLLM truncates the prompt to the room that max_tokens leaves. Prefill has another max_tokens than decode, so it
    # would compute the KV of another prompt.
    if "truncate_prompt_tokens" in fields and _is_minus_one(_number_text(fields, "truncate_prompt_tokens")):
        raise bad_request(
            "truncate_prompt_tokens=-1 does not work with a separate prefill: give a number of tokens",
            "truncate_prompt_tokens",
        )
    if endpoint is Endpoint.RESPONSES and not _is(fields.get("truncation", _NULL), b"null", b'"disabled"'):
        raise bad_request('truncation must be "disabled" with a separate prefill', "truncation")
    nested = _nested(fields, request_format)
    samples = _samples(fields if request_format.nested is None else nested or {})
    if endpoint is Endpoint.COMPLETIONS:
        # vLLM takes the prompts of both fields, embeddings first.
        whole: Fields = {name: fields.pop(name) for name in ("prompt_embeds", "prompt") if name in fields}
        prompts = tuple(
            Prompt(name, one) for name, value in whole.items() if is_given(value) for one in _split(value, name)
        )
        if len(prompts) > MAX_PROMPTS:
            raise _too_many("prompt")
        return ClientRequest(endpoint, fields, prompts, whole, samples, nested)
    if endpoint is Endpoint.CHAT_BATCH and begins_with(fields.get("messages", _NULL), b"["):
        whole = {"messages": fields.pop("messages")}
        conversations = _items(whole["messages"], "messages")
        prompts = tuple(Prompt("messages", one, is_listed=True) for one in conversations)
        return ClientRequest(endpoint, fields, prompts, whole, samples, nested)
    prompt = Prompt(request_format.text, fields.get(request_format.text, _NO_TEXT))
    return ClientRequest(endpoint, fields, (prompt,), {}, samples, nested)


def _nested(fields: Fields, request_format: RequestFormat) -> Fields | None:
    """The fields of the nested object. None if there is none: prefill refuses the request as decode does."""
    name = request_format.nested
    if name is None:
        return None
    value = fields.get(name, memoryview(b"{}"))
    if len(value) > _MAX_NESTED_BYTES:
        raise bad_request(f"{name} exceeds {_MAX_NESTED_BYTES} bytes", name)
    try:
        found = _fields(value)
    except UNREADABLE:
        return None
    if len(found) > MAX_FIELDS:
        raise bad_request(f"{name} has more than {MAX_FIELDS} fields", name)
    return found


def _number_text(fields: Fields, name: str) -> memoryview:
    """Raises RequestRefused (400) for a field that is too long for a number."""
    text = fields[name]
    if len(text) > _MAX_NUMBER_BYTES:
        raise bad_request(f"{name} is not a number", name)
    return text


def _samples(fields: Fields) -> int:
    if "n" not in fields:
        return 1
    try:
        number = msgspec.json.decode(_number_text(fields, "n"), type=int | None, strict=False)
    except UNREADABLE:
        return 1
    return min(max(1, number or 1), _MAX_SAMPLES)


def decode_body(
    request: ClientRequest,
    metaserver: Mapping[str, str],
    request_id: str,
    advice: Mapping[str, str | bool | float] | None = None,
) -> Content:
    """Returns the client's body with the order to decode to get the prompt's KV through the metaserver.

    `metaserver`: the keys that name it (`ProxySettings.metaserver`).
    `request_id`: the id for the body, if the route has an id in it.
    """
    transfer = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        **metaserver,
        WANTS_TOKEN_IDS: True,
        **(advice or {}),
    }
    order = memoryview(msgspec.json.encode(transfer))
    return _object({**request.fields, **request.whole_prompt, **_id(request, request_id), _TRANSFER: order})


def prefill_body(
    request: ClientRequest, index: int, ticket: bytes, request_id: str, is_for_base_model: bool = False
) -> Content:
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
        if request.nested is not None:
            one_token = memoryview(bytes(_object(_one_token(request.nested, request_format))))
            fields = {**fields, request_format.nested: one_token}
        fields = {**fields, "stream": _FALSE}
        fields.pop("stream_options", None)
    fields = {**fields, **_id(request, request_id), _TRANSFER: memoryview(ticket)}
    prompt = request.prompts[index]
    if not request.whole_prompt:  # the prompt is in the fields
        return _object(fields)
    before, after = (b"[", b"]}") if prompt.is_listed else (b"", b"}")
    return Content(
        *_object(fields).pieces[:-1], b"," + msgspec.json.encode(prompt.field) + b":" + before, prompt.text, after
    )


def tokens_body(
    request: ClientRequest, token_ids: msgspec.Raw, ticket: bytes, is_for_base_model: bool = False
) -> Content:
    """The body for a prompt whose token ids decode has sent. It is for `Endpoint.COMPLETIONS`, whatever route the
    client used. It keeps the client's fields that choose the adapter, the priority and the prefix cache.

    `is_for_base_model`: as for `prefill_body`.
    """
    kept = {
        name: request.fields[name] for name in REQUEST_FORMATS[request.endpoint].beside_tokens if name in request.fields
    }
    if is_for_base_model:
        kept.pop("model", None)
    if "cache_salt" in kept and not _is_text(kept["cache_salt"]):
        kept.pop("cache_salt")
    one_token = REQUEST_FORMATS[Endpoint.COMPLETIONS].one_token
    return _object({**kept, **one_token, "prompt": memoryview(token_ids), _TRANSFER: ticket})


def _object(fields: Mapping[str, Buffer]) -> Content:
    """A JSON object. Its last piece is the closing brace. `fields`: at least one."""
    pieces: list[Buffer] = []
    for name, value in fields.items():
        pieces += (b",%s:" if pieces else b"{%s:") % msgspec.json.encode(name), value
    return Content(*pieces, b"}")


def _without_tool_parser(fields: Fields) -> Fields:
    """The fields of a chat, such that prefill needs no parser of tool calls.

    vLLM demands one where `tool_choice` is "auto", the default beside tools. It demands none where it is null, and
    renders the same prompt. Beside `structured_outputs` it refuses null. Other choices may shape the prompt.
    """
    if not is_given(fields.get("tools")) or is_given(fields.get("structured_outputs")):
        return fields
    if "tool_choice" in fields and not _is(fields["tool_choice"], b'"auto"'):
        return fields
    return {**fields, "tool_choice": _NULL}


def _one_token(fields: Fields, request_format: RequestFormat) -> Fields:
    kept = {
        name: _ONE if name in request_format.also_limits else value
        for name, value in fields.items()
        if name not in request_format.not_for_prefill
    }
    return {**kept, **{name: memoryview(value) for name, value in request_format.one_token.items()}}


def _id(request: ClientRequest, request_id: str) -> Fields:
    name = REQUEST_FORMATS[request.endpoint].id_field
    return {} if name is None else {name: memoryview(b'"resp_%s"' % request_id.encode())}


def _split(prompt: memoryview, field: str) -> list[memoryview]:
    """`list[str]` and `list[list[int]]` are several prompts; `list[int]` is one prompt's token ids."""
    return _items(prompt, field) if _OF_TEXTS_OR_LISTS.match(prompt) else [prompt]


def _items(values: memoryview, field: str) -> list[memoryview]:
    """The values of a JSON list. Raises RequestRefused (400) for more than MAX_PROMPTS."""
    try:
        items = msgspec.structs.astuple(msgspec.json.decode(values, type=_Items))
    except msgspec.ValidationError:
        raise _too_many(field) from None
    return [memoryview(one) for one in items if one is not _END]


def _too_many(field: str) -> RequestRefused:
    return bad_request(f"more than {MAX_PROMPTS} prompts in one request: each is one to an engine", field)


def _is_text(value: memoryview) -> bool:
    """Whether `value` is a string and not empty. vLLM accepts no other salt, and some routes of 0.23 ignore the
    field."""
    return begins_with(value, b'"') and not _is(value, b'""')


def _is_minus_one(value: memoryview) -> bool:
    """Accepts strings and fractions, as vLLM does. vLLM refuses everything that is not a number."""
    try:
        return float(msgspec.json.decode(value, type=float | str)) == -1
    except (*UNREADABLE, ValueError):
        return False
