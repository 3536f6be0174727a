# SPDX-License-Identifier: Apache-2.0
"""Signed tickets: nothing in them can change unnoticed, and the secret stays where it is."""

import json
import pickle

import msgspec
import pytest

from harness.tickets import ticket_with
from vllm_ascend_pd.core.prompt_digest import PromptDigest
from vllm_ascend_pd.core.ticket import MIN_SECRET_BYTES, Secret, Ticket, TicketError, signed, verify

CONTENT = b"not to be shown, " * 3
SECRET = Secret(CONTENT)
EXPIRES = 2_000_000_000
TICKET = ticket_with(
    request_id="cmpl-1",
    remote_block_ids=[[7, 3, 9], [5]],
    remote_block_size=[4, 1],
    remote_host="10.0.0.1",
    remote_tp_size=2,
    remote_cached_tokens=4,
    ticket_id="0123456789abcdef" * 2,
    num_tokens=10,
)
PROMPT = PromptDigest(
    tokens="0a" * 16, media="1b" * 16, media_hashing="2c" * 16, num_media=2, embeddings="3d" * 16, adapter="4e" * 16,
    salt="5f" * 16,
)  # fmt: skip
SIGNED = signed(msgspec.structs.replace(TICKET, prompt=PROMPT), SECRET, EXPIRES)
OTHER_VALUES = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "prompt": None,
    "remote_block_ids": [[7, 3, 8], [5]],
    "remote_draft": "a draft",
    "signature": "0" * 64,
}


def verifies(ticket: Ticket, secret: Secret = SECRET) -> bool:
    try:
        verify(ticket, secret)
    except TicketError:
        return False
    return True


def test_what_was_signed_verifies_after_its_way_over_json():
    params = json.loads(json.dumps(msgspec.to_builtins(SIGNED)))
    assert verifies(msgspec.convert(params, Ticket))
    assert (SIGNED.expires_at, len(SIGNED.signature)) == (EXPIRES, 64)
    unsigned = msgspec.structs.replace(TICKET, prompt=PROMPT)
    assert SIGNED.digest() == unsigned.digest(), "the signature does not change where bytes go"


NOT_SIGNED = ("token_ids", "replaces")
"""Fields for the metaserver, which older prefill engines need not know."""


def test_token_ids_are_not_signed():
    """Prefill does not use them, and the proxy takes them out."""
    assert verifies(msgspec.structs.replace(SIGNED, token_ids=[1]))


@pytest.mark.parametrize("part", PromptDigest.__struct_fields__)
def test_no_part_of_the_prompts_digest_can_change_or_be_left_out(part):
    value = getattr(PROMPT, part)
    for other in (value + 1, 0) if isinstance(value, int) else (value[:-1] + "x", ""):
        assert not verifies(msgspec.structs.replace(SIGNED, prompt=msgspec.structs.replace(PROMPT, **{part: other})))


def test_a_ticket_without_a_digest_of_its_prompt_has_the_signature_that_older_versions_know():
    signature = "e6c8b640a6c63cb9ff27ef0de4c1c9f53435213d706bd923aad48d68601dbdf4"
    assert signed(TICKET, SECRET, EXPIRES).signature.startswith(signature)


@pytest.mark.parametrize("name", [name for name in Ticket.__struct_fields__ if name not in NOT_SIGNED])
def test_no_field_can_change(name):
    value = getattr(SIGNED, name)
    other = OTHER_VALUES.get(name)
    if name not in OTHER_VALUES:
        other = value + 1 if isinstance(value, int) else value + "x" if isinstance(value, str) else [*value, 9]
    assert other is None or type(other) is type(value)
    assert not verifies(msgspec.structs.replace(SIGNED, **{name: other}))


def test_no_field_can_be_left_out_but_one_at_its_default():
    params = msgspec.to_builtins(SIGNED)
    defaults = {name for name, value in params.items() if value in (0, 1, "", [], False)}
    for name in params:
        without = {key: value for key, value in params.items() if key != name}
        try:
            assert verifies(msgspec.convert(without, Ticket)) is (name not in ("expires_at", "signature", "prompt")), (
                name
            )
        except msgspec.ValidationError:
            assert name not in defaults


def test_bytes_cannot_move_from_one_field_to_another():
    moved = msgspec.structs.replace(SIGNED, request_id="cmpl-", remote_engine_id="1decode-0")
    assert not verifies(moved)


def test_another_secret_and_none():
    assert not verifies(SIGNED, Secret(CONTENT + b"x"))
    with pytest.raises(TicketError, match="not signed"):
        verify(TICKET, SECRET)
    with pytest.raises(TicketError, match="altered, or signed with another secret"):
        verify(msgspec.structs.replace(SIGNED, signature="ü" * 64), SECRET)


def test_a_secret_does_not_show():
    with pytest.raises(ValueError, match=f"{MIN_SECRET_BYTES - 1} bytes are too short"):
        Secret(b"x" * (MIN_SECRET_BYTES - 1))
    Secret(b"x" * MIN_SECRET_BYTES)
    assert "shown" not in f"{SECRET} {SECRET!r} {vars(Secret)}"
    with pytest.raises(TypeError):
        pickle.dumps(SECRET)
