# SPDX-License-Identifier: Apache-2.0
"""How the proxy reads a posted ticket: what prefill gets, and the token ids that prefill is asked with."""

import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from harness.tickets import ticket_with
from vllm_ascend_pd.core.caches import TokenGroup
from vllm_ascend_pd.core.prompt_digest import PromptDigest
from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.core.ticket import parse_ticket
from vllm_ascend_pd.proxy.rendezvous.tickets import failure_of, read_ticket

PROMPT = 10
WHOLE = ticket_with(
    request_id="cmpl-1",
    remote_block_ids=[[7, 3, 9]],
    remote_block_size=[4],
    remote_host="10.0.0.1",
    remote_tp_size=2,
    remote_cached_tokens=4,
    ticket_id="0123456789abcdef" * 2,
    num_tokens=PROMPT,
    prompt=PromptDigest(tokens="0a" * 16),
)


def posted(token_ids: Any = ()) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(WHOLE), "token_ids": token_ids})


def test_token_ids_are_taken_out() -> None:
    taken = read_ticket(posted([5, 0, 999_999_999]))
    assert taken.token_ids is not None
    assert bytes(taken.token_ids) == b"[5,0,999999999]"
    assert parse_ticket(json.loads(taken.encoded), PROMPT, [TokenGroup(16)]) == WHOLE
    assert "token_ids" not in json.loads(taken.encoded)


@pytest.mark.parametrize("body", [posted(), msgspec.json.encode(WHOLE).replace(b'"token_ids":[],', b"")])
def test_a_ticket_without_them_is_passed_on_byte_for_byte(body: bytes) -> None:
    assert read_ticket(body)[1:] == (body, None)


def test_another_connectors_ticket_is_passed_on_byte_for_byte() -> None:
    """Its `token_ids` mean something only to its engines."""
    body = b'{"request_id":"r","remote_engine_id":"d","token_ids":[1,2]}'
    assert read_ticket(body)[1:] == (body, None)


@pytest.mark.parametrize(
    "token_ids", [5, "[1]", None, {}, ["1"], [1.5], [-1], [10**9], [2**64], [True], [None], [[1]], [[1], [2]]], ids=repr
)
def test_malformed_token_ids_are_refused(token_ids: Any) -> None:
    with pytest.raises(UNREADABLE):
        read_ticket(posted(token_ids))


def test_the_token_ids_of_a_long_prompt_are_kept_apart() -> None:
    taken = read_ticket(posted([150_000] * (1 << 17)))
    assert len(taken.encoded) < 1000


@pytest.mark.parametrize("entries", [b"[]", b'{"finish_reason":"stop"}'])
def test_a_prefills_answer_of_many_choices_is_not_built(entries: bytes) -> None:
    """8 MiB of them once took 0.4 GB."""
    body = b'{"choices":[{"finish_reason":"length"}' + (b"," + entries) * (8 * 2**20 // (len(entries) + 1)) + b"]}"
    tracemalloc.start()
    try:
        assert failure_of(200, "application/json", body, "http://p") is None
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
