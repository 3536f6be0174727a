# SPDX-License-Identifier: Apache-2.0
"""What prefill accepts as a ticket in a request's `kv_transfer_params`. Nothing in a signed one can change
unnoticed."""

import json

import msgspec
import pytest

from harness.tickets import ticket_with
from vllm_ascend_pd.core.bounds import MAX_TP
from vllm_ascend_pd.core.caches import StateGroup, TokenGroup
from vllm_ascend_pd.core.prompt_digest import PromptDigest
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signing import signed, verify
from vllm_ascend_pd.core.ticket import Ticket, TicketError, parse_ticket

TICKET_ID = "0123456789abcdef" * 2
PARAMS = {
    "request_id": "chatcmpl-1",
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "token_ids": [],
    "remote_block_ids": [[7, 3, 9]],
    "remote_block_size": [4],
    "remote_engine_id": "decode-0",
    "remote_host": "10.0.0.1",
    "remote_port": 5555,
    "remote_tp_size": 2,
    "remote_pcp_size": 1,
    "remote_dcp_size": 1,
    "remote_cached_tokens": 4,
    "ticket_id": TICKET_ID,
    "num_tokens": 10,
}
TOKENS = [TokenGroup(4)]
REQUIRED = [field.name for field in msgspec.structs.fields(Ticket) if field.required]


def test_a_ticket_comes_back_as_it_was_sent():
    sent = Ticket(**PARAMS)
    received = parse_ticket(json.loads(json.dumps(msgspec.to_builtins(sent))), 10, TOKENS)
    assert received == sent
    assert received.digest() == sent.digest()
    assert received.endpoint == "tcp://10.0.0.1:5555"


def test_a_ticket_with_a_state():
    params = {**PARAMS, "remote_block_ids": [[7, 3, 9], [5]], "remote_block_size": [4, 1]}
    assert parse_ticket(params, 10, [*TOKENS, StateGroup(4)]).remote_block_ids == [[7, 3, 9], [5]]
    for blocks, size in (([], 1), ([5, 6], 1), ([5], 4)):
        bad = {**params, "remote_block_ids": [[7, 3, 9], blocks], "remote_block_size": [4, size]}
        with pytest.raises(TicketError, match="state in group 1"):
            parse_ticket(bad, 10, [*TOKENS, StateGroup(4)])


def test_a_ticket_names_blocks_for_complete_entries():
    """Of caches that keep one entry for several tokens."""
    params = {**PARAMS, "remote_block_ids": [[5], [1, 2]], "remote_block_size": [16, 16], "num_tokens": 19}
    params["remote_cached_tokens"] = 0

    def compressed(*ratios: int) -> list[TokenGroup]:
        return [TokenGroup(16, tokens_per_entry=ratio) for ratio in ratios]

    assert parse_ticket(params, 19, compressed(4, 1)).remote_block_ids == [[5], [1, 2]]
    with pytest.raises(TicketError, match="remote_block_ids: 1 blocks of 16 for 19 tokens"):
        parse_ticket(params, 19, compressed(2, 1))
    with pytest.raises(TicketError, match="remote_block_size 16 in group 1, which has an entry for 32 tokens"):
        parse_ticket(params, 19, compressed(4, 32))


def test_a_state_beside_tokens_that_ranks_share():
    params = {**PARAMS, "remote_block_ids": [[7, 3], [5]], "remote_block_size": [4, 1], "remote_dcp_size": 2}
    ticket = parse_ticket({**params, "remote_tp_size": 2, "remote_cached_tokens": 8}, 10, [*TOKENS, StateGroup(4)])
    assert ticket.remote_block_ids == [[7, 3], [5]]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ticket_id": TICKET_ID[:-1]}, "ticket_id"),
        ({"ticket_id": TICKET_ID + "0"}, "ticket_id"),
        ({"ticket_id": TICKET_ID.upper()}, "ticket_id"),
        ({"ticket_id": "٣" * 32}, "ticket_id"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"remote_port": "5555"}, "remote_port"),
        ({"remote_tp_size": 0}, "remote_tp_size"),
        ({"remote_tp_size": MAX_TP + 1}, "remote_tp_size"),
        *(
            ({"remote_host": host}, "neither an address nor a host's name")
            for host in ("decode\n10.0.0.1", "decode\0", "\x1b[31m", "\ud800", "décodeur.example", "eth0;10.0.0.1", "*")
        ),
        ({"remote_host": "10.0.0.1:80"}, "neither an address nor a host's name"),
        ({"remote_host": "a" * 254}, "neither an address nor a host's name"),
        ({"request_id": "x" * 513}, "length <= 512"),
        ({"request_id": "half of a pair: \ud83d"}, "unprintable"),
        ({"signature": "\ud83d"}, "unprintable"),
        ({"prompt": {"adapter": "\ud83d"}}, "unprintable"),
        ({"prompt": {"tokens": "\ud83d"}}, "unprintable"),
        pytest.param({"remote_block_ids": [[]] * 65}, "length <= 64", id="groups"),
        pytest.param({"remote_block_ids": [[7] * ((1 << 18) + 1)]}, "length <= 262144", id="block ids"),
        pytest.param({"token_ids": [7] * ((1 << 21) + 1)}, "length <= 2097152", id="token ids"),
        ({"remote_draft": "x\x1b[31m"}, "unprintable"),
        ({"expires_at": -1}, "expires_at"),
        ({"expires_at": 2**53}, "expires_at"),
        ({"expires_at": "soon"}, "expires_at"),
        ({"signature": "f" * 65}, "signature"),
        ({"remote_engine_id": "decode-0\r"}, "unprintable"),
        ({"remote_engine_id": "decode\u202e0"}, "unprintable"),
        ({"num_tokens": 8}, "the ticket is for 8 prompt tokens, the prompt has 10"),
        ({"num_tokens": 11}, "the ticket is for 11 prompt tokens, the prompt has 10"),
        ({"num_tokens": True}, "num_tokens"),
        ({"remote_block_ids": []}, "0 cache groups, this engine has 1"),
        ({"remote_block_ids": [[7, 3, 9]] * 2, "remote_block_size": [4] * 2}, "2 cache groups, this engine has 1"),
        ({"remote_block_size": [4, 4]}, "cache groups"),
        ({"remote_block_ids": [7, 3, 9]}, r"remote_block_ids\[0\]"),
        ({"remote_block_ids": [[7, 3]]}, "2 blocks of 4 for 10 tokens"),
        ({"remote_block_ids": [[]]}, "0 blocks of 4 for 10 tokens"),
        ({"remote_block_ids": [[7, -3, 9]]}, r"remote_block_ids\[0\]\[1\]"),
        ({"remote_block_ids": [[7, 3.0, 9]]}, r"remote_block_ids\[0\]\[1\]"),
        ({"remote_block_ids": [[7, 2**31, 9]]}, r"remote_block_ids\[0\]\[1\]"),
        ({"remote_block_size": [0], "remote_cached_tokens": 0}, r"remote_block_size\[0\]"),
        ({"remote_block_size": [2**64], "remote_cached_tokens": 0}, r"remote_block_size\[0\]"),
        ({"remote_cached_tokens": 3}, "does not fit remote_cached_tokens"),
        ({"remote_cached_tokens": 12}, "remote_cached_tokens 12 is out of range"),
        ({"remote_cached_tokens": -4}, "remote_cached_tokens"),
        ({"remote_pcp_size": 2}, "remote_pcp_size is 2: prefill context parallelism on decode"),
        ({"remote_dcp_size": 0}, "remote_dcp_size"),
        ({"remote_dcp_size": 4}, "remote_dcp_size 4 does not divide remote_tp_size 2"),
        ({"remote_dcp_size": 2}, "does not fit remote_cached_tokens"),  # a block id stands for 8
        ({"remote_dcp_size": 2, "remote_cached_tokens": 0, "remote_block_ids": [[7]]}, "1 blocks of 8 for 10 tokens"),
        ({"remote_interleave_size": 0}, "remote_interleave_size"),
        ({"remote_interleave_size": 3}, "remote_interleave_size 3 does not divide remote_block_size 4"),
    ],
    ids=str,
)
def test_what_is_refused(changes, complaint):
    with pytest.raises(TicketError, match=complaint):
        parse_ticket({**PARAMS, **changes}, 10, TOKENS)


def test_decode_may_compute_the_last_token_itself():
    blocks = {"remote_block_ids": [[7, 3]], "remote_block_size": [4]}  # it has none for that token yet
    assert parse_ticket({**PARAMS, **blocks, "num_tokens": 8}, 9, TOKENS).num_tokens == 8
    with pytest.raises(TicketError, match="the ticket is for 0 prompt tokens, the prompt has 1"):
        parse_ticket({**PARAMS, "num_tokens": 0, "remote_cached_tokens": 0}, 1, TOKENS)


@pytest.mark.parametrize("field", REQUIRED)
def test_no_field_may_be_missing(field):
    for params in ({name: value for name, value in PARAMS.items() if name != field}, {**PARAMS, field: None}):
        with pytest.raises(TicketError, match=f"not a ticket.*{field}"):
            parse_ticket(params, 10, TOKENS)


@pytest.mark.parametrize(
    "changes",
    [
        {"ticket_id": "f" * 32},
        {"remote_engine_id": "decode-1"},
        {"remote_cached_tokens": 0},
        {"num_tokens": 9},
        {"remote_block_ids": [[7, 3, 8]]},
        {"remote_block_ids": [[3, 7, 9]]},
        {"remote_block_ids": [[7, 3, 9, 0]]},
        {"remote_block_ids": [[7, 3], [9]]},
        {"remote_block_size": [8]},
        {"remote_draft": "eagle"},
        {"prompt": PromptDigest(tokens="0" * 32)},
    ],
    ids=str,
)
def test_the_digest_changes_with(changes):
    assert Ticket(**{**PARAMS, **changes}).digest() != Ticket(**PARAMS).digest()


def test_a_ticket_without_a_digest_of_its_prompt_has_the_digest_that_older_versions_know():
    assert Ticket(**PARAMS).digest() == "e76e01f860ef275531176a50605717f2"


def test_token_ids_are_dropped():
    """They are for the metaserver, so prefill's ranks do not carry them."""
    assert parse_ticket({**PARAMS, "token_ids": [1, 2, 3]}, 10, TOKENS).token_ids == []


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (5, "prompt"),
        ([], "prompt"),
        ({"tokens": 5}, "tokens"),
        ({"tokens": "0" * 33}, "tokens"),
        ({"num_media": -1}, "num_media"),
        ({"num_media": 1.5}, "num_media"),
        ({"adapter": "x" * 1025}, "adapter"),
        ({"salt": None}, "salt"),
    ],
    ids=str,
)
def test_a_malformed_digest_of_the_prompt_is_refused(prompt, complaint):
    with pytest.raises(TicketError, match=complaint):
        parse_ticket({**PARAMS, "prompt": prompt}, 10, TOKENS)


def test_a_digest_of_the_prompt_comes_back_as_it_was_sent_and_new_parts_are_left_alone():
    sent = Ticket(**PARAMS, prompt=PromptDigest(tokens="0" * 32, adapter="unread:sql"))
    params = json.loads(json.dumps(msgspec.to_builtins(sent)))
    assert params["prompt"] == {"tokens": "0" * 32, "adapter": "unread:sql"}
    params["prompt"]["of a later version"] = 1
    assert parse_ticket(params, 10, TOKENS) == sent


# --- signed tickets ----------------------------------------------------------------------------------------------

SECRET = Secret([b"a secret of this test, long enough"])
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
    "signature": "ü" * 64,
}


def verifies(ticket: Ticket) -> bool:
    try:
        verify(ticket, SECRET)
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


def test_a_ticket_without_a_digest_of_its_prompt_has_the_signature_that_other_versions_know():
    signature = "7c4f9d74f8e4347925eedeb68b0831645583b4f41cfe93917b0090ebd3c802d3"
    assert signed(TICKET, SECRET, EXPIRES).signature.startswith(signature)


@pytest.mark.parametrize("name", [name for name in Ticket.__struct_fields__ if name not in NOT_SIGNED])
def test_no_field_can_change(name):
    value = getattr(SIGNED, name)
    other = OTHER_VALUES.get(name)
    if name not in OTHER_VALUES:
        other = value + 1 if isinstance(value, int) else value + "x" if isinstance(value, str) else [*value, 9]
    assert other is None or type(other) is type(value)
    assert not verifies(msgspec.structs.replace(SIGNED, **{name: other}))


def test_bytes_cannot_move_from_one_field_to_another():
    moved = msgspec.structs.replace(SIGNED, request_id="cmpl-", remote_engine_id="1decode-0")
    assert not verifies(moved)
