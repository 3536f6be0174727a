# SPDX-License-Identifier: Apache-2.0
"""What a decode engine that lies can say of itself: nothing of it is used, and looking at it costs little."""

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compatibility import MODEL, caches, engine, found

from vllm_ascend_pd.core.compatibility import different_settings, mismatch, unsound
from vllm_ascend_pd.core.hosts import AnyHost, decode_hosts
from vllm_ascend_pd.core.layout import CacheTensor, Geometry, Order, RankCaches, TokenShare
from vllm_ascend_pd.core.protocol import (
    MAX_REASON_CHARS,
    PROTOCOL_VERSION,
    EngineDescription,
    GrantRefused,
    Problem,
    ProtocolError,
    RankDescription,
    Revoke,
    TransportInfo,
    WriteReport,
    WriterId,
    decode,
    encode,
)
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout

replace = msgspec.structs.replace


def tuples(elements: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(elements, max_size=3).map(tuple)


TEXT, NAMES = st.text(), st.text().filter(str.isprintable)
INTS = st.integers(-(2**63), 2**63 - 1)
INDICES, SIZES, ADDRESSES = st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1), st.integers(0, 2**62 - 1)
GEOMETRIES = st.builds(Geometry, INDICES, st.sampled_from(Order), TEXT, SIZES, SIZES, SIZES, SIZES, SIZES)
OF_A_SHARE = st.builds(
    lambda whole, rank, interleave: replace(whole, block_size=16 * interleave, share=TokenShare(4, rank, interleave)),
    GEOMETRIES,
    st.integers(0, 3),
    st.integers(1, 1000),
)
TENSORS = st.builds(CacheTensor, TEXT, INDICES, ADDRESSES, INDICES, st.integers(0, 1))
CACHES = st.builds(RankCaches, st.tuples(GEOMETRIES, OF_A_SHARE), tuples(TENSORS))
RANKS = st.builds(RankDescription, INTS, INTS, TEXT, TEXT, st.just(RankCaches((), ())) | CACHES)
SETTINGS = st.dictionaries(TEXT, TEXT, max_size=5)
LISTED = decode_hosts(("127.0.0.0/8",), "127.0.0.1", signed=False)


def with_ranks(description: EngineDescription, *ranks: RankDescription) -> EngineDescription:
    return replace(description, ranks=ranks)


def with_rank(**changes: object) -> EngineDescription:
    description = engine()
    return with_ranks(description, replace(description.ranks[0], **changes))


def with_tensor(**changes: object) -> EngineDescription:
    rank = caches()
    return with_rank(caches=replace(rank, tensors=(replace(rank.tensors[0], **changes), *rank.tensors[1:])))


ONE, TWO = engine(1), engine(2)
LIES = {
    "unprintable-setting": (replace(ONE, settings={"rope_theta": "10000\n"}), "a setting"),
    "unprintable-setting-name": (replace(ONE, settings={"\x1b[2J": "10000"}), "a setting"),
    "unprintable-transport": (with_ranks(ONE, replace(ONE.ranks[0], transport=TransportInfo("tcp\n"))), "a transport"),
    "long-transport": (
        with_ranks(ONE, replace(ONE.ranks[0], transport=TransportInfo("tcp", "1" * 513))),
        "a transport",
    ),
    "long-setting": (replace(ONE, settings={"rope_theta": "1" * 513}), "a setting"),
    "too-few-ranks": (with_ranks(TWO, TWO.ranks[0]), "each of these ranks once"),
    "no-ranks": (with_ranks(ONE), "each of these ranks once"),
    "a-rank-twice": (with_ranks(TWO, TWO.ranks[0], TWO.ranks[0]), "each of these ranks once"),
    "two-of-one": (with_ranks(ONE, ONE.ranks[0], ONE.ranks[0]), "each of these ranks once"),
    "a-rank-outside": (with_ranks(TWO, TWO.ranks[0], replace(TWO.ranks[1], tp_rank=2)), "each of these ranks once"),
    "a-negative-rank": (with_rank(pp_rank=-1), "each of these ranks once"),
    "control-of-another-kind": (with_rank(control="ipc:///tmp/x"), "not host:port"),
    "control-without-tcp": (with_rank(control="127.0.0.1:1"), "is not tcp://host:port"),
    "control-with-a-source": (with_rank(control="tcp://127.0.0.9:0;127.0.0.1:1"), "not host:port"),
    "control-elsewhere": (with_rank(control="tcp://192.0.2.1:1", session="192.0.2.1:2"), "not in decode_allowlist"),
    "session-elsewhere": (
        with_rank(session="127.0.0.2:2"),
        "its control address and its session are on different hosts",
    ),
    "session-of-nonsense": (with_rank(session="x" * 10_000), "not host:port"),
    "session-at-a-url": (with_rank(session="http://127.0.0.1:1/v1/metaserver"), "not host:port"),
    "model-unprintable": (replace(ONE, model="\x1b[2J"), "unprintable"),
    "model-long": (replace(ONE, model="x" * 1000), "too long"),
    "engine-unprintable": (replace(ONE, engine_id="a\nb"), "unprintable"),
    "layer-unprintable": (with_tensor(layer="model\r"), "unprintable"),
    "dtype-long": (engine(dtype="x" * 1000), "too long"),
    "draft-unprintable": (engine(draft="\u202e"), "unprintable"),
    "blocks-that-overlap": (engine(block_stride=16 * 4 * 32 - 1), "bytes, 2047 apart"),
    "more-heads-than-are-its": (engine(2, heads=4, block_stride=1 << 20), "4 of 4 KV heads with tp 2"),
    "a-tensor-twice": (with_rank(caches=replace(caches(), tensors=caches().tensors[:1] * 2)), "same tensor of a layer"),
}


@pytest.mark.parametrize(("lie", "complaint"), LIES.values(), ids=LIES.keys())
def test_lies(lie, complaint):
    reason = unsound(lie, LISTED)
    assert complaint in reason
    assert reason.isprintable()
    assert len(reason) < 400
    assert not re.search(r"\d+\.\d+\.\d+\.\d+", reason), "clients are told the reason"


def test_no_address_overflows():
    """Ranges of the single numbers see to it: they are bounds of what a sender computes with."""
    geometry = replace(caches().geometries[0], block_stride=2**31 - 1)
    tensor = CacheTensor("layer", 0, 2**62 - 1, 2**31 - 1, 0)
    largest = with_rank(caches=RankCaches((geometry,), (tensor,)))
    assert decode(encode(0, largest))[1] == largest
    assert unsound(largest, LISTED) is None
    assert tensor.base + tensor.num_blocks * geometry.block_stride < 2**63
    for changes in ({"base": 2**62}, {"num_blocks": 2**31}, {"base": -1}, {"num_blocks": -1}, {"layer": 7}):
        with pytest.raises(ProtocolError):
            decode(encode(0, with_tensor(**changes)))


@pytest.mark.parametrize("what", ["dtype", "head_bytes", "group", "kind"])
def test_one_rank_of_several_that_lies_about_its_layout(what):
    """Whichever it is."""
    other = {"dtype": "float32", "head_bytes": 16, "group": 1, "kind": None}
    for liar in (0, 1):
        ranks = list(TWO.ranks)
        geometry = ranks[liar].caches.geometries[0]
        changes = {"kind": type(geometry.kind).STATE} if what == "kind" else {what: other[what]}
        lying = replace(ranks[liar].caches, geometries=(replace(geometry, **changes),))
        ranks[liar] = replace(ranks[liar], caches=lying)
        assert what in found(caches(), with_ranks(TWO, *ranks))


@given(
    st.builds(
        EngineDescription, NAMES, NAMES, st.integers(-1, 2), st.integers(-1, 2), tuples(RANKS), SIZES, SIZES, SETTINGS
    )
)
@settings(max_examples=300)
def test_whatever_decodes_is_sound_or_refused_with_a_reason(description):
    reason = unsound(description, AnyHost())
    assert reason is None or (reason.isprintable() and len(reason) < 1000)
    if reason is None:
        mismatch(caches(), MODEL, 0, sharding(1), True, description)
        different = different_settings({"rope_theta": "10000"}, description.settings)
        assert different is None or (different.isprintable() and len(different) < 3000)
        DecodeLayout(description)


HOSTILE_TEXT = "\x1b[31mred\nfake log line\x00\u202e" + "x" * 100_000


@pytest.mark.parametrize(
    "message",
    [
        Problem(HOSTILE_TEXT),
        GrantRefused(HOSTILE_TEXT, retry=False),
        Revoke("0" * 32, WriterId("prefill", 0, 0), HOSTILE_TEXT),
        WriteReport("0" * 32, WriterId("prefill", 0, 0), HOSTILE_TEXT),
    ],
    ids=lambda message: type(message).__name__,
)
def test_reasons_are_one_short_line_whoever_wrote_them(message):
    raw = msgspec.to_builtins(message) | {"reason": HOSTILE_TEXT}
    _, received = decode(msgspec.msgpack.encode((PROTOCOL_VERSION, 0, raw)))
    for reason in (message.reason, received.reason):
        assert reason.isprintable()
        assert reason.startswith("[31mred fake log line x")
        assert len(reason) <= MAX_REASON_CHARS + 3
    assert decode(encode(0, received))[1] == received
