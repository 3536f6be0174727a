# SPDX-License-Identifier: Apache-2.0
"""Which versions of messages are read, and which values are refused. tests/hostile/test_decoders.py sends any bytes."""

import json
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from wire_messages import BODIES_SENT, DIGEST, ID, MESSAGES, SECRET, SEQ, TICKET, bodies, frames

from vllm_ascend_pd.core import protocol
from vllm_ascend_pd.core.layout import CacheTensor, RankCaches
from vllm_ascend_pd.core.prompt_digest import digest_of_names, digest_of_tokens
from vllm_ascend_pd.core.protocol import (
    MAX_CHECKSUM_BYTES,
    MAX_DESCRIPTION_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_SETTINGS,
    MAX_TICKET_BYTES,
    PROTOCOL_VERSION,
    Acknowledged,
    EngineDescription,
    GrantRequest,
    Message,
    OfferTicket,
    ProtocolError,
    RankDescription,
    TransferFailure,
    WaitingAnswer,
    WaitingQuestion,
    WriteReport,
    WriterId,
    decode,
    encode,
)
from vllm_ascend_pd.core.signing import verify
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.decode.bootstrap import Engine


def of_kind(kind: type) -> Any:
    """The message of this kind that this release sends."""
    [message] = [each for each in MESSAGES if isinstance(each, kind)]
    return message


def fields_of(kind: type) -> dict[str, Any]:
    return msgspec.to_builtins(of_kind(kind), builtin_types=[bytes])


def body(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def frame(body: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    return msgspec.msgpack.encode((version, 0, msgspec.Raw(body)))


# --- what a peer may get wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, -1, 2**63])
def test_another_version_is_named(version):
    with pytest.raises(ProtocolError, match=f"protocol version {version}, this side speaks {PROTOCOL_VERSION}"):
        decode(frame(body(Acknowledged()), version))


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [((2, 2), (2, 2), 2), ((2, 3), (2, 2), 2), ((2, 3), (3, 5), 3), ((2, 4), (1, 3), 3), ((3, 3), (2, 4), 3)],
)
def test_both_sides_take_the_highest_version_that_both_speak(monkeypatch, ours, theirs, common):
    for mine, peers in [(ours, theirs), (theirs, ours)]:
        monkeypatch.setattr(protocol, "OLDEST_PROTOCOL_VERSION", mine[0])
        monkeypatch.setattr(protocol, "PROTOCOL_VERSION", mine[1])
        assert protocol.common_version(*peers) == common
        sent = msgspec.msgpack.encode((peers[1], 7, msgspec.Raw(body(Acknowledged())), peers[0]))
        assert decode(sent) == (7, Acknowledged())


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ((2, 3), (4, 5), "protocol version 4 to 5, this side speaks 2 to 3"),
        ((3, 3), (2, 2), "protocol version 2, this side speaks 3"),
        ((2, 2), (3, 1), "protocol version 3 to 1, this side speaks 2"),
    ],
)
def test_versions_without_a_common_one_are_refused_by_name(monkeypatch, ours, theirs, said):
    monkeypatch.setattr(protocol, "OLDEST_PROTOCOL_VERSION", ours[0])
    monkeypatch.setattr(protocol, "PROTOCOL_VERSION", ours[1])
    with pytest.raises(ProtocolError, match=f"^{said}$"):
        decode(msgspec.msgpack.encode((theirs[1], 7, msgspec.Raw(body(Acknowledged())), theirs[0])))


def test_a_frame_of_version_1_reads_the_range_of_this_one():
    """Engines before ranges read the first three elements, and name the version that they refuse."""
    newest, seq, _, oldest = msgspec.msgpack.decode(encode(5, Acknowledged()))
    assert (newest, seq, oldest) == (PROTOCOL_VERSION, 5, protocol.OLDEST_PROTOCOL_VERSION)


# --- what releases have sent, and what later ones may send ------------------------------------------------------


def says(message, known):
    """Whether a message says all that is known of it, and perhaps more, in fields that came later."""
    if isinstance(known, dict):
        return isinstance(message, dict) and all(name in message and says(message[name], known[name]) for name in known)
    if isinstance(known, list) and isinstance(message, list):
        return len(message) >= len(known) and all(map(says, message, known))
    return message == known


def filled(value: object) -> Iterator[tuple[type, str]]:
    """The fields of all structs in `value` that have another value than the default."""
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            inner = getattr(value, field.name)
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            if inner != default:
                yield type(value), field.name
            yield from filled(inner)
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from filled(inner)


SPOKEN = range(protocol.OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
FRAMES = [pytest.param(*kept, id=f"{n}-{kept[1]['type']}") for v in SPOKEN for n, kept in enumerate(frames(v))]
READERS = {
    "Ticket": Ticket,
    "TransferFailure": TransferFailure,
    "WaitingQuestion": WaitingQuestion,
    "WaitingAnswer": WaitingAnswer,
    "bootstrap": dict[str, Engine],
}


@pytest.mark.parametrize(("frame_hex", "known"), FRAMES)
def test_what_engines_of_each_version_that_is_spoken_have_sent_is_read(frame_hex, known):
    seq, message = decode(bytes.fromhex(frame_hex))
    assert seq == SEQ
    assert says(json.loads(msgspec.json.encode(message)), known)


@pytest.mark.parametrize(("kind", "body"), bodies())
def test_what_has_been_sent_as_json_is_read(kind, body):
    read = msgspec.json.decode(body, type=READERS[kind])
    assert says(msgspec.to_builtins(read), json.loads(body))
    if kind == "Ticket":
        verify(read, SECRET)  # whatever fields it has gained
        assert read.digest() == "738f65e90183a7555fac6346b8d895f1"


def test_digests_of_prompts_stay_as_releases_compute_them():
    assert digest_of_tokens(ID, [1, 2, 3]) == "3b7f17c71ffd01e67e81a167f22ffb7c"
    assert digest_of_names(ID, ["salt", "hash"]) == "00ac07a1254d124e85a17d0fc6611e2e"


def test_everything_that_this_version_sends_is_kept():
    """`python tests/unit/wire_messages.py` adds what is missing."""
    kept = dict(frames(PROTOCOL_VERSION))
    assert [message for message in MESSAGES if encode(SEQ, message).hex() not in kept] == []
    assert {kind: body.decode() for kind, body in BODIES_SENT.items()}.items() <= set(bodies())
    assert {type(message) for message in MESSAGES} == set(typing.get_args(Message))
    sent = [*MESSAGES, *(msgspec.json.decode(body, type=READERS[kind]) for kind, body in BODIES_SENT.items())]
    said = set(filled(sent))
    kinds = {kind for kind, _ in said}
    assert {(kind, field) for kind in kinds for field in kind.__struct_fields__} - said == set()


def extended(value: object, name: str = "") -> object:
    """A message as a later version may send it: each struct has a field more. `name`: the field that holds it."""
    if isinstance(value, dict):
        later = {} if name == "settings" else {"later": [1]}
        return {**{key: extended(inner, key) for key, inner in value.items()}, **later}
    if isinstance(value, list):
        return [extended(inner) for inner in value] + (["later"] if name in ("writer", "sharding") else [])
    return value


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_of_a_later_version_with_more_fields_is_read(message):
    later = extended(msgspec.to_builtins(message, builtin_types=[bytes]))
    newest = PROTOCOL_VERSION + 3
    sent = msgspec.msgpack.encode((newest, SEQ, msgspec.Raw(body(later)), PROTOCOL_VERSION, "later"))
    assert decode(sent) == (SEQ, message)
    refused = msgspec.msgpack.encode((newest, SEQ, msgspec.Raw(body(later)), PROTOCOL_VERSION + 1))
    with pytest.raises(ProtocolError, match=f"version {PROTOCOL_VERSION + 1} to {newest}, this side speaks"):
        decode(refused)


@pytest.mark.parametrize("kind", READERS)
def test_json_of_a_later_version_with_more_fields_is_read(kind):
    if kind == "bootstrap":  # a mapping of names
        later = {rank: extended(engine) for rank, engine in json.loads(BODIES_SENT[kind]).items()}
        for engine in later.values():
            del engine["worker_addr"]["later"], engine["worker_addr"]["0"]["later"]
    else:
        later = extended(json.loads(BODIES_SENT[kind]))
    now = msgspec.json.decode(BODIES_SENT[kind], type=READERS[kind])
    assert msgspec.json.decode(msgspec.json.encode(later), type=READERS[kind]) == now


# --- ranges ------------------------------------------------------------------------------------------------------

GRANT_REQUEST, OFFER = fields_of(GrantRequest), fields_of(OfferTicket)
REPORT, DESCRIPTION = fields_of(WriteReport), fields_of(EngineDescription)


def altered(message: dict, **fields: object) -> bytes:
    return body({**message, **fields})


def described(part: str, **fields: object) -> bytes:
    """A description with other `fields` in the first of its `geometries` or `tensors`."""
    [rank] = DESCRIPTION["ranks"]
    [first, *others] = rank["caches"][part]
    caches = {**rank["caches"], part: [{**first, **fields}, *others]}
    return altered(DESCRIPTION, ranks=[{**rank, "caches": caches}])


def many(part: str, count: int) -> bytes:
    """A description with `count` of its `geometries` or `tensors`."""
    [rank] = DESCRIPTION["ranks"]
    caches = {**rank["caches"], part: rank["caches"][part][:1] * count}
    return altered(DESCRIPTION, ranks=[{**rank, "caches": caches}])


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(altered(GRANT_REQUEST, weights="x" * 65), id="fingerprint that is too long"),
        pytest.param(altered(GRANT_REQUEST, weights="two\nlines"), id="fingerprint of two lines"),
        pytest.param(
            altered(DESCRIPTION, settings=dict.fromkeys(map(str, range(MAX_SETTINGS + 1)), "")), id="settings"
        ),
        pytest.param(altered(GRANT_REQUEST, writer=["prefill-0", 1]), id="writer without rank"),
        pytest.param(altered(REPORT, cached_tokens=-1), id="fewer cached tokens than none"),
        pytest.param(altered(REPORT, bytes_before_end=-1), id="negative count before the end"),
        pytest.param(altered(GRANT_REQUEST, sharding=[1, [], 1]), id="no ranks at all"),
        pytest.param(described("tensors", geometry=-1), id="negative geometry"),
        pytest.param(altered(GRANT_REQUEST, writer=["prefill-0", -1, 0]), id="negative stage"),
        pytest.param(altered(GRANT_REQUEST, writer=["prefill-0", 0, -1]), id="negative rank of a writer"),
        pytest.param(altered(GRANT_REQUEST, writer=["prefill-0", 64, 0]), id="more stages than a writer's number"),
        pytest.param(altered(GRANT_REQUEST, writer=["prefill-0", 0, 2**20]), id="more ranks than a writer's number"),
        pytest.param(altered(GRANT_REQUEST, writer=["two\nlines", 0, 0]), id="writer's name of two lines"),
        pytest.param(altered(GRANT_REQUEST, sharding=[0, [0], 1]), id="no ranks of tensor parallelism"),
        pytest.param(altered(GRANT_REQUEST, sharding=[1, [-1], 1]), id="negative share"),
        pytest.param(altered(GRANT_REQUEST, sharding=[1, [0], 0]), id="interleaved by nothing"),
        pytest.param(altered(REPORT, cached_tokens=2**31), id="more cached tokens than a prompt has"),
        pytest.param(altered(REPORT, checksums=bytes(MAX_CHECKSUM_BYTES + 1)), id="too many checksums"),
        pytest.param(altered(REPORT, checksums="12345678"), id="checksums as text"),
        pytest.param(altered(DESCRIPTION, tp=0), id="no tensor-parallel ranks"),
        pytest.param(altered(DESCRIPTION, tp=2**40), id="more ranks than can be counted"),
        pytest.param(altered(DESCRIPTION, pp=-1), id="negative pipeline stages"),
        pytest.param(altered(DESCRIPTION, dcp=0), id="no ranks of context parallelism"),
        pytest.param(altered(DESCRIPTION, interleave=-1), id="negative interleave"),
        pytest.param(described("geometries", share={"ranks": 2, "rank": 2}), id="share beyond the ranks"),
        pytest.param(described("geometries", share={"ranks": 2, "interleave": 3}), id="uneven interleave"),
        pytest.param(altered(REPORT, num_bytes=-1), id="negative count"),
        pytest.param(altered(REPORT, num_bytes=2**41), id="more than a rank can have"),
        pytest.param(altered(REPORT, bytes_before_end=2**64 - 1), id="more than a rank can have before the end"),
        pytest.param(altered(REPORT, settle_s=-0.5), id="settling before now"),
        pytest.param(altered(REPORT, settle_s=3601), id="settling for hours"),
        pytest.param(altered(GRANT_REQUEST, settle_s=float("inf")), id="endless seconds"),
        pytest.param(altered(GRANT_REQUEST, settle_s=float("nan")), id="nan seconds"),
        pytest.param(body({"type": "Granted", "lease_s": 0}), id="empty lease"),
        pytest.param(body({"type": "Granted", "lease_s": -10.0}), id="negative lease"),
        pytest.param(body({"type": "Granted", "lease_s": 86401}), id="lease of more than a day"),
        pytest.param(body({"type": "Granted", "lease_s": float("nan")}), id="lease of nan"),
        pytest.param(altered(OFFER, ticket=None), id="offer without a ticket"),
        pytest.param(altered(OFFER, ticket={**OFFER["ticket"], "remote_block_ids": [[-1]]}), id="negative block id"),
        pytest.param(altered(OFFER, ticket={**OFFER["ticket"], "ticket_id": "x" * 100_000}), id="unusable ticket id"),
        pytest.param(
            altered(OFFER, ticket={**OFFER["ticket"], "ticket_id": "0" * 32 + "\n"}), id="ticket id of two lines"
        ),
        pytest.param(altered(OFFER, transfer_id="x" * 129), id="transfer id that is too long"),
        pytest.param(altered(OFFER, transfer_id="two\nlines"), id="transfer id of two lines"),
        pytest.param(described("geometries", block_size=0), id="empty blocks"),
        pytest.param(described("geometries", block_stride=-32768), id="blocks in reverse"),
        pytest.param(described("geometries", total_heads=0), id="no heads"),
        pytest.param(described("geometries", head_bytes=2**31), id="heads of 2 GiB"),
        pytest.param(described("geometries", group=-1), id="negative cache group"),
        pytest.param(described("tensors", geometry=4), id="geometry that is not described"),
        pytest.param(described("tensors", base=2**63), id="address beyond int64"),
        pytest.param(described("tensors", num_blocks=2**31), id="more blocks than ids"),
        pytest.param(altered(DESCRIPTION, tp=1025), id="more ranks than a stage has"),
        pytest.param(altered(DESCRIPTION, pp=65), id="more stages than a pipeline has"),
        pytest.param(altered(DESCRIPTION, ranks=DESCRIPTION["ranks"] * 4097), id="more ranks than an engine has"),
        pytest.param(many("geometries", 1025), id="more geometries than a rank has"),
        pytest.param(many("tensors", 8193), id="more tensors than a rank has"),
        pytest.param(altered(GRANT_REQUEST, sharding=[1, [0] * 1025, 1]), id="more shares than a stage has ranks"),
        pytest.param(altered(GRANT_REQUEST, sharding=[1025, [0], 1]), id="more ranks than tensor parallelism has"),
        pytest.param(altered(GRANT_REQUEST, sharding=[1, [1024], 1]), id="share beyond the ranks of a stage"),
        pytest.param(altered(GRANT_REQUEST, covers=[0] * 8193), id="more tensors covered than a rank has"),
        pytest.param(altered(GRANT_REQUEST, covers=[8192]), id="tensor beyond those of a rank"),
        pytest.param(body({"type": "Granted"}), id="field missing"),
        pytest.param(body({"type": "Greeting"}), id="unknown message"),
    ],
)
def test_malformed_bodies(body):
    with pytest.raises(ProtocolError, match="malformed message"):
        decode(frame(body))


# How large messages may be, and what older engines leave out of them.


def test_large_engines_stay_within_the_bounds():
    """64 ranks of 61 layers with K and V: still far from what a listener accepts."""
    layers = tuple(
        CacheTensor(f"model.layers.{n}.self_attn.attn", part, 2**47, 100_000, 0) for n in range(61) for part in (0, 1)
    )
    caches = RankCaches(of_kind(EngineDescription).ranks[0].caches.geometries, layers)
    ranks = tuple(RankDescription(0, n, "tcp://10.0.0.1:55555", "10.0.0.1:55555", caches) for n in range(64))
    assert len(encode(0, EngineDescription("decode-0", "large", 64, 1, ranks))) < MAX_DESCRIPTION_BYTES / 4
    request = GrantRequest(ID, DIGEST, WriterId("prefill-0", 1, 3), sharding(64), tuple(range(10_000)), 5.0)
    assert len(encode(0, request)) < 1024 + 5 * len(request.covers) < MAX_MESSAGE_BYTES


def test_the_ticket_of_a_long_prompt_stays_within_the_bounds() -> None:
    """A million tokens in blocks of 16, in two cache groups."""
    blocks = list(range(2**31 - 62_500, 2**31))
    ticket = msgspec.structs.replace(TICKET, remote_block_ids=[blocks, blocks], remote_block_size=[16, 16])
    assert len(encode(0, OfferTicket("prefill-0", "xfer-0", ticket))) < MAX_TICKET_BYTES


def test_an_engine_that_leaves_out_optional_fields_is_understood() -> None:
    for kind, field, nothing in (
        (GrantRequest, "weights", ""),
        (EngineDescription, "settings", {}),
        (WriteReport, "cached_tokens", None),
        (WriteReport, "checksums", None),
    ):
        old = {name: value for name, value in fields_of(kind).items() if name != field}
        assert getattr(decode(frame(body(old)))[1], field) == nothing
