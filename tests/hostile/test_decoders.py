# SPDX-License-Identifier: Apache-2.0
"""All code that reads messages of others gives a value or the documented error for any bytes, and keeps nothing of
them.

Each input follows from `--fuzz-seed` and its number, which a failure names together with the input.
"""

import contextlib
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest
from examples import PLAIN, RANK
from mutate import hostile_bytes, json_text, msgpack

from vllm_ascend_pd.core.caches import StateGroup, TokenGroup
from vllm_ascend_pd.core.config import ConfigError, UserConfig, parse_config
from vllm_ascend_pd.core.protocol import PROTOCOL_VERSION, ProtocolError, RankDescription, decode, encode
from vllm_ascend_pd.core.ticket import Ticket, TicketError, parse_ticket
from vllm_ascend_pd.core.ticket_params import carries_ticket, wants_ticket
from vllm_ascend_pd.core.topology import TopologyError, sharding, writers_to
from vllm_ascend_pd.decode import metaserver_client
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist
from vllm_ascend_pd.proxy.http.bodies import (
    LacksFieldError,
    decode_body,
    parse_client_request,
    prefill_body,
    tokens_body,
)
from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.http.messages import RequestRefused
from vllm_ascend_pd.proxy.rendezvous import tickets
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.rendezvous.tickets import read_ticket

pytestmark = pytest.mark.timeout(7200)  # the long form

MAX_GROWTH_BYTES = 24 << 20
"""Of resident memory over a target's inputs but the first tenth, which fill caches and the allocator's pools."""

TICKET = {
    "request_id": "cmpl-0-0", "do_remote_prefill": False, "do_remote_decode": True, "token_ids": [1, 2, 3],
    "remote_block_ids": [[1, 2, 3, 4], [7]], "remote_block_size": [16, 1], "remote_engine_id": "decode-0",
    "remote_host": "127.0.0.1", "remote_port": 30101, "remote_tp_size": 2, "remote_pcp_size": 1, "remote_dcp_size": 1,
    "remote_cached_tokens": 0, "ticket_id": "0123456789abcdef" * 2, "num_tokens": 60,
    "remote_interleave_size": 1, "remote_draft": "",
    "prompt": {
        "tokens": "ab" * 16, "media": "cd" * 16, "media_hashing": "ef" * 16, "num_media": 2, "embeddings": "01" * 16,
        "adapter": "unread:sql", "salt": "23" * 16,
    },
}  # fmt: skip
ONE_GROUP = {**TICKET, "remote_block_ids": [[1, 2, 3, 4]], "remote_block_size": [16], "remote_dcp_size": 2}
COMPLETION = {
    "model": "m", "prompt": "hello", "max_tokens": 8, "n": 2, "stream": True, "logprobs": 3, "seed": 2**62,
    "stream_options": {"include_usage": True}, "kv_transfer_params": None, "truncate_prompt_tokens": 5,
}  # fmt: skip
PROMPTS = [{**COMPLETION, "prompt": prompt} for prompt in (["a", "b"], [1, 2, 3], [[1, 2], [3]], None)]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 8, "tools": []}
CONFIG = {
    **{name: getattr(UserConfig(), name) for name in UserConfig.__struct_fields__},
    "peers": ["http://proxy:8000", "10.0.0.0/8:1-9"], "prefill": {"tp_size": 2}, "decode": {"dp_size": 1, "pp_size": 2},
    "tls_config": {"ssl_enable": True, "ssl_ca_certs": "/ca.pem"},
}  # fmt: skip
URLS = [
    "http://127.0.0.1:8000/v1/metaserver", "http://[::1]:8000/v1/metaserver", "https://10.1.2.3/v1/metaserver",
    "http://localhost/v1/metaserver", "http://2130706433:80/v1/metaserver", "http://127.1/v1/metaserver",
]  # fmt: skip
OWN_HOST = "10.1.2.3"
BATCH = {"messages": [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]], "max_tokens": 3}
RESPONSE = {"input": "hi", "max_output_tokens": 3, "background": False, "truncation": "disabled"}
GENERATE = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3, "n": 1}, "stream_options": {}}


def _protocol(data: bytes) -> None:
    seq, message = decode(data)
    assert isinstance(seq, int)
    assert decode(encode(seq, message)) == (seq, message) or "nan" in repr(message)


def _describe(data: bytes) -> None:
    for tensor in msgspec.msgpack.decode(data, type=RankDescription).caches.tensors:
        assert tensor.geometry >= 0


def _parsed_ticket(data: bytes) -> None:
    params = json.loads(data)  # as vLLM's server gets it; in `vllm_xargs` it takes others than objects, too
    wanted = wants_ticket(params), carries_ticket(params)
    if not isinstance(params, dict):
        assert wanted == (False, False)
        raise ValueError("no object")
    for groups in ([TokenGroup(16), StateGroup(16)], [TokenGroup(16)]):
        with contextlib.suppress(TicketError):
            _use(parse_ticket(params, 60, groups))


def _use(ticket: Ticket) -> None:
    """Uses a parsed ticket as the product does."""
    assert len(ticket.digest()) == 32
    assert ticket.replica_hash >= 0
    assert ticket.endpoint.startswith("tcp://")
    assert len(ticket.sharding.shares) == ticket.remote_tp_size <= 1024
    with contextlib.suppress(TopologyError):
        writers_to(0, ticket.sharding, sharding(4), 8, ticket.replica_hash, exchange=True)


def _client_request(endpoint: Endpoint, data: bytes) -> None:
    try:
        request = parse_client_request(endpoint, data)
    except LacksFieldError:  # decode gets the body as it is
        with contextlib.suppress(ValueError):
            assert json.loads(data).get("kv_transfer_params") is None
        raise
    decode_body(request, {"metaserver": "http://127.0.0.1:1/v1/metaserver"}, "an-id")
    for index in range(min(3, len(request.prompts))):
        prefill_body(request, index, b"{}", "an-id")
        tokens_body(request, msgspec.Raw(b"[1]"), b"{}")


def _posted_ticket(data: bytes) -> None:
    posted = read_ticket(data)
    if posted.token_ids is not None:
        request = parse_client_request(Endpoint.CHAT, b'{"messages":[]}')
        assert json.loads(bytes(tokens_body(request, posted.token_ids, posted.encoded)))["max_tokens"] == 1
    with pytest.raises(RequestRefused):
        RequestTable(1).find(posted.header.request_id)


def _prefill_answer(data: bytes) -> None:
    for status in (200, 400, 500):
        tickets.failure_of(status, "application/json", data, "http://127.0.0.1:1")


def _metaserver_answer(data: bytes) -> None:
    for status in (200, 302, 404, 500, 502):
        failure = metaserver_client.failure_of(status, data)
        if failure is not None and (len(failure.text) > 1000 or not failure.text.isprintable()):
            raise AssertionError(failure.text)


def _config(data: bytes) -> None:
    extra = json.loads(data)
    if isinstance(extra, dict):  # vLLM takes nothing else
        parse_config(extra)


_OPEN = Allowlist([], OWN_HOST)
_LISTED = Allowlist(["http://proxy:8000", "https://10.9.9.9/prefix"], OWN_HOST)


def _url(data: bytes) -> None:
    """What an allow-list lets through is read by another parser as going to the same place."""
    url = data.decode("utf-8", "surrogateescape")
    if _OPEN.refusal(url) is None:
        authority = url.partition("://")[2].partition("/")[0].lower()
        assert authority.startswith(("127.", "localhost", "[", OWN_HOST)), url
        parts, target = urlsplit(url), _OPEN.admit(url).url
        assert (parts.scheme, parts.hostname) == (target.scheme, target.raw_host.decode().lower()), url
        assert parts.port in (target.port, {"http": 80, "https": 443}[target.scheme]), url
        assert not any((parts.query, parts.fragment, parts.username, target.query, target.userinfo)), url
    assert _LISTED.refusal(url) is not None, url


@dataclass(frozen=True)
class Target:
    """A decoder. `read` may raise `errors`, nothing else; `valid` are inputs that it accepts, as builtins."""

    read: Callable[[bytes], None]
    errors: tuple[type[Exception], ...]
    valid: tuple[Any, ...]
    encode: Callable[[Any], bytes]


_NO_REQUEST = (RequestRefused, LacksFieldError)
TARGETS = {
    "messages": Target(
        _protocol, (ProtocolError,), tuple([PROTOCOL_VERSION, 7, message] for message in PLAIN), msgpack
    ),
    "a rank's description": Target(
        _describe, (msgspec.MsgspecError, UnicodeDecodeError, RecursionError), (msgspec.to_builtins(RANK),), msgpack
    ),
    "kv_transfer_params": Target(_parsed_ticket, (ValueError, RecursionError), (TICKET, ONE_GROUP), json_text),
    "completions": Target(
        lambda data: _client_request(Endpoint.COMPLETIONS, data), _NO_REQUEST, (COMPLETION, *PROMPTS), json_text
    ),
    "chats": Target(lambda data: _client_request(Endpoint.CHAT, data), _NO_REQUEST, (CHAT,), json_text),
    "conversations": Target(lambda d: _client_request(Endpoint.CHAT_BATCH, d), _NO_REQUEST, (BATCH,), json_text),
    "responses": Target(lambda d: _client_request(Endpoint.RESPONSES, d), _NO_REQUEST, (RESPONSE,), json_text),
    "messages of Anthropic's": Target(
        lambda data: _client_request(Endpoint.MESSAGES, data), _NO_REQUEST, ({"max_tokens": 8, **CHAT},), json_text
    ),
    "token ids": Target(lambda d: _client_request(Endpoint.GENERATE, d), _NO_REQUEST, (GENERATE,), json_text),
    "tickets at the metaserver": Target(
        _posted_ticket, (msgspec.DecodeError, UnicodeDecodeError, RecursionError), (TICKET,), json_text
    ),
    "prefill's answers": Target(
        _prefill_answer,
        (),
        ({"choices": [], "kv_transfer_params": {"error": "x"}}, {"error": {"message": "x"}}),
        json_text,
    ),
    "the metaserver's answers": Target(_metaserver_answer, (), ({"status": "ok"}, {"error": "no prefill"}), json_text),
    "configuration": Target(
        _config, (ConfigError, json.JSONDecodeError, UnicodeDecodeError, RecursionError), (CONFIG,), json_text
    ),
    "metaserver URLs": Target(
        _url,
        (),
        tuple(URLS),
        lambda url: url.encode("utf-8", "surrogatepass") if isinstance(url, str) else json_text(url),
    ),
}
_SHARE = {"messages": 4}  # the others get one


@pytest.mark.parametrize("name", TARGETS)
def test_any_input_gives_a_value_or_the_documented_error(name: str, inputs: int, fuzz_seed: int) -> None:
    target = TARGETS[name]
    for value in target.valid:
        target.read(target.encode(value))
    count = -(-inputs * _SHARE.get(name, 1) // (len(TARGETS) + sum(_SHARE.values()) - len(_SHARE)))
    process, rejected, before = psutil.Process(), 0, 0
    start = time.monotonic()
    for number in range(count):
        data = hostile_bytes(fuzz_seed, number, target.valid, target.encode)
        try:
            target.read(data)
        except target.errors:
            rejected += 1
        except BaseException as error:
            raise AssertionError(
                f"{name}: {type(error).__name__}: {error}; --fuzz-seed {fuzz_seed}, input {number}: {data[:4000]!r}"
            ) from error
        if number == count // 10:
            gc.collect()
            before = process.memory_info().rss
    gc.collect()
    growth = process.memory_info().rss - before
    print(
        f"{name}: {count} inputs, {rejected} refused, {time.monotonic() - start:.0f} s, "
        f"{before >> 20} MiB before, {growth / (1 << 20):+.1f} MiB"
    )
    assert growth < MAX_GROWTH_BYTES
    for value in target.valid:
        target.read(target.encode(value))
    if target.errors:
        assert count // 10 < rejected < count  # the inputs are neither all right nor all rubbish
