# SPDX-License-Identifier: Apache-2.0
"""What keeps a prefill rank from sending to a decode engine, said with both sides' values. Of what a decode engine that
lies says of itself nothing is used."""

import re
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.tickets import ticket_with
from vllm_ascend_pd.core import compatibility, described_engine
from vllm_ascend_pd.core.compatibility import different_settings, mismatch, why_misfit
from vllm_ascend_pd.core.config import parse_config
from vllm_ascend_pd.core.described_engine import why_foreign, why_unsound
from vllm_ascend_pd.core.hosts import AnyHost, HostList
from vllm_ascend_pd.core.layout import BlockKind, CacheTensor, Geometry, Order, RankCaches, TokenShare
from vllm_ascend_pd.core.prefill_ticket import PrefillTicket
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
from vllm_ascend_pd.core.topology import RankInfo, Sharding, sharding
from vllm_ascend_pd.prefill import decode_layout
from vllm_ascend_pd.prefill.control import ControlPlane
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout, RankMappings

MODEL = "LlamaForCausalLM with 4 layers of hidden size 64, 8 heads, 4 KV heads, vocabulary 512"
LAYERS = tuple(f"model.layers.{n}.self_attn.attn" for n in range(4))
TOTAL_HEADS = 4


def caches(tp: int = 1, layers: tuple[str, ...] = LAYERS, parts: int = 2, **changes: object) -> RankCaches:
    heads = max(1, TOTAL_HEADS // tp)
    geometry = Geometry(
        group=0,
        order=Order.TOKEN_MAJOR,
        dtype="bfloat16",
        block_size=16,
        block_stride=16 * heads * 32,
        heads=heads,
        total_heads=TOTAL_HEADS,
        head_bytes=32,
    )
    tensors = [CacheTensor(layer, part, 4096 * n, 10, 0) for n, layer in enumerate(layers) for part in range(parts)]
    return RankCaches((msgspec.structs.replace(geometry, **changes),), tuple(tensors))


def engine(
    tp: int = 1, stages: tuple[tuple[str, ...], ...] = (LAYERS,), model: str = MODEL, **changes: object
) -> EngineDescription:
    ranks = tuple(
        RankDescription(pp, rank, "tcp://127.0.0.1:1", "127.0.0.1:2", caches(tp, layers, **changes))
        for pp, layers in enumerate(stages)
        for rank in range(tp)
    )
    return EngineDescription("decode-0", model, tp, len(stages), ranks)


def prefill_rank(**settings: str) -> RankInfo:
    return RankInfo("prefill", MODEL, "127.0.0.1", 0, sharding(1), 0, 1, (0,), settings=settings)


def found(ours: RankCaches, decode: EngineDescription) -> str | None:
    return mismatch(ours, prefill_rank(), decode)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": BlockKind.STATE}, "kind is state on prefill, tokens on decode"),
        ({"dtype": "int8"}, "dtype is int8 on prefill, bfloat16 on decode"),
        ({"total_heads": 8}, "total_heads is 8 on prefill, 4 on decode"),
        ({"head_bytes": 64}, "head_bytes is 64 on prefill, 32 on decode"),
        ({"group": 1}, "group is 1 on prefill, 0 on decode"),
        ({"tokens_per_entry": 4}, "tokens_per_entry is 4 on prefill, 1 on decode"),
        ({"order": Order.HEAD_MAJOR}, "order is head_major on prefill, token_major on decode"),
    ],
)
def test_geometries_that_differ(changes, named):
    assert found(caches(**changes), engine()) == f"{LAYERS[0]}: {named}"


def test_blocks_of_other_lengths_fit_with_entries_of_as_many_tokens():
    assert found(caches(block_size=32, tokens_per_entry=4), engine(tokens_per_entry=4)) is None


def test_a_single_layer_that_differs():
    """Layers need not be alike; the one that does not fit is named."""
    last = caches(layers=LAYERS[3:], dtype="int8")
    ours = caches(layers=LAYERS[:3])
    tensors = (*ours.tensors, *(msgspec.structs.replace(tensor, geometry=1) for tensor in last.tensors))
    ours = RankCaches((*ours.geometries, *last.geometries), tensors)
    assert found(ours, engine()) == f"{LAYERS[3]}: dtype is int8 on prefill, bfloat16 on decode"


@pytest.mark.parametrize(("p_block", "d_block"), [(16, 32), (32, 16)])
def test_head_major_blocks_of_other_sizes(p_block, d_block):
    ours = caches(order=Order.HEAD_MAJOR, block_size=p_block)
    answer = found(ours, engine(order=Order.HEAD_MAJOR, block_size=d_block))
    assert answer is not None
    assert answer.startswith(f"{LAYERS[0]}: block sizes {p_block} (prefill) and {d_block} (decode): ")


DRAFT_LAYER = "model.layers.4.self_attn.attn"
DRAFT = "eagle LlamaForCausalLM with 1 layers"


def drafting(draft: str = DRAFT, layers: tuple[str, ...] = LAYERS, **changes: object) -> RankCaches:
    """Beside the model's layers one of a draft."""
    model = caches(layers=layers)
    [geometry] = model.geometries
    tensors = [CacheTensor(DRAFT_LAYER, part, 4096 * 9, 10, 1) for part in range(2)]
    return RankCaches((geometry, msgspec.structs.replace(geometry, draft=draft, **changes)), (*model.tensors, *tensors))


def drafting_engine(draft: str = DRAFT) -> EngineDescription:
    [rank] = engine().ranks
    return EngineDescription("decode-0", MODEL, 1, 1, (msgspec.structs.replace(rank, caches=drafting(draft)),))


@pytest.mark.parametrize("ours", [caches(), drafting(), drafting("draft_model of other layers", head_bytes=64)])
@pytest.mark.parametrize("decode", [engine(), drafting_engine(), drafting_engine("mtp")])
def test_drafts_fit_whatever_drafts_on_the_other_side(ours, decode):
    """Their layers only have to fit where both sides have the same."""
    assert found(ours, decode) is None


THREE = LAYERS[:3]
MISFITS = {
    f"prefill serves {MODEL}, decode serves GemmaForCausalLM": (caches(), engine(model="GemmaForCausalLM")),
    f"{LAYERS[0]}: tensor parallel size 3 and 4 KV heads: neither divides the other": (caches(), engine(3, heads=1)),
    "prefill has cache ('extra', 0) that decode lacks (10 against 8 tensors)": (
        caches(layers=(*LAYERS, "extra")),
        engine(),
    ),
    f"decode has cache ('{LAYERS[3]}', 0) that prefill lacks (8 against 6 tensors)": (caches(layers=THREE), engine()),
    # Of drafts: the same one with other caches. Nor does one excuse layers of the model.
    f"{DRAFT_LAYER}: head_bytes is 64 on prefill, 32 on decode": (drafting(head_bytes=64), drafting_engine()),
    f"decode has cache ('{LAYERS[3]}', 0) that prefill lacks (10 against 8 tensors)": (
        drafting(layers=THREE),
        drafting_engine(),
    ),
}


@pytest.mark.parametrize("reason", MISFITS)
def test_engines_that_do_not_fit(reason):
    assert found(*MISFITS[reason]) == reason


def sharing(described: EngineDescription, dcp: int, interleave: int) -> EngineDescription:
    """`described`, with tokens dealt out to its ranks."""
    dealt = sharding(described.tp, dcp, interleave)
    ranks = tuple(
        msgspec.structs.replace(
            rank,
            caches=RankCaches(
                tuple(msgspec.structs.replace(g, share=dealt.share(rank.tp_rank)) for g in rank.caches.geometries),
                rank.caches.tensors,
            ),
        )
        for rank in described.ranks
    )
    return msgspec.structs.replace(described, ranks=ranks, dcp=dcp, interleave=interleave)


@pytest.mark.parametrize(("dcp", "interleave"), [(1, 1), (2, 8), (4, 16)])
def test_ranks_that_hold_other_tokens_than_their_engine_says(dcp, interleave):
    decode = msgspec.structs.replace(sharing(engine(4, heads=1, total_heads=1), 2, 16), dcp=dcp, interleave=interleave)
    its = sharding(4, dcp, interleave).share(0)
    reason = f"it describes share 0 of 2, interleaved by 16 tokens of the tokens, its engine {its}"
    assert why_unsound(decode, AnyHost()) == f"decode's rank (0, 0): {reason}"


def test_a_size_of_context_parallelism_that_does_not_divide():
    decode = msgspec.structs.replace(engine(2), dcp=3)
    assert why_unsound(decode, AnyHost()) == "decode has tp 2 and dcp 3, which does not divide it"


def test_tokens_dealt_out_among_ranks_of_different_heads():
    answer = found(caches(), sharing(engine(4), 2, 16))
    assert answer is not None
    assert "4 ranks with tensor parallel size 4 do not all share the tokens of 4 KV heads by 2" in answer


def test_caches_that_ranks_copy_where_they_share_others():
    """Their blocks are longer, and both sides must take them for copied."""
    own = {"heads": 1, "total_heads": 1}
    copied = {**own, "block_size": 32, "block_stride": 32 * 32, "copied": True}
    decode = msgspec.structs.replace(engine(2, **copied), dcp=2, interleave=16)
    assert why_unsound(decode, AnyHost()) is None
    assert found(caches(**own, copied=True), decode) is None
    assert found(caches(**own), decode) == f"{LAYERS[0]}: copied is False on prefill, True on decode"
    ticket = ticket_with(request_id="r", remote_tp_size=2, remote_dcp_size=2, remote_interleave_size=16)
    assert why_foreign(ticket, decode, DecodeLayout(decode).smallest) is None
    odd = msgspec.structs.replace(engine(2, **{**copied, "block_size": 31}), dcp=2, interleave=16)
    assert why_unsound(odd, AnyHost()) == "decode's rank (0, 0): blocks of 31 tokens, which 2 ranks copy"


def test_head_major_blocks_that_are_dealt_out_in_parts():
    """A block's tokens are packed together, so it goes to one rank or stays with one."""
    one_head = {"order": Order.HEAD_MAJOR, "heads": 1, "total_heads": 1}
    assert found(caches(**one_head), sharing(engine(2, **one_head), 2, 16)) is None
    answer = found(caches(**one_head), sharing(engine(2, **one_head), 2, 4))
    assert answer is not None
    assert "runs of 16 (prefill) and 4 (decode) tokens in blocks of 16" in answer


@pytest.mark.parametrize(
    ("dcp", "interleave", "reason"),
    [
        (2, 16, None),
        (1, 1, "the ticket says decode's dcp is 1, interleaved by 1; decode says 2, by 16"),
        (2, 8, "the ticket says decode's dcp is 2, interleaved by 8; decode says 2, by 16"),
    ],
)
def test_a_ticket_that_deals_out_tokens_otherwise_than_its_engine(dcp, interleave, reason):
    """Prefill has planned by the ticket: it must be right."""
    ticket = ticket_with(request_id="r", remote_tp_size=2, remote_dcp_size=dcp, remote_interleave_size=interleave)
    layout = DecodeLayout(sharing(engine(2, heads=1, total_heads=1), 2, 16))
    assert why_foreign(ticket, layout.description, layout.smallest) == reason


ROTATED = {"rope_theta": "20000"}


def misfit_of(settings: dict[str, str], **config: object) -> str | None:
    described = msgspec.structs.replace(engine(), settings=settings)
    return why_misfit(prefill_rank(rope_theta="10000"), parse_config(config), caches(), TransportInfo(), described)


def test_other_settings_are_refused_unless_prefill_allows_it(caplog):
    named = "rope_theta is 10000 on prefill, 20000 on decode"
    assert misfit_of({"rope_theta": "10000"}) is None
    assert misfit_of({}) is None, "an engine that does not say"
    assert misfit_of(ROTATED) == f"the engines compute other KV: {named}"
    assert misfit_of(ROTATED, allow_other_model=True) is None
    assert f"{named}: allow_other_model is set" in caplog.text


def test_a_transport_that_cannot_write_to_one_of_decodes_ranks_is_refused():
    rank_info = prefill_rank()
    ours = TransportInfo("ascend", "mooncake-transfer-engine-npu 0.3.13.post1", "client/server", "AutoConnect")
    theirs = TransportInfo("ascend", "mooncake-transfer-engine-npu 0.3.11.post1", "comm", "Connect")
    described = engine(2)
    silent, other = described.ranks
    ranks = (silent, msgspec.structs.replace(other, transport=theirs))
    reason = why_misfit(rank_info, parse_config({}), caches(), ours, msgspec.structs.replace(described, ranks=ranks))
    assert reason is not None
    assert str(ours) in reason
    assert str(theirs) in reason
    assert why_misfit(rank_info, parse_config({}), caches(), ours, described) is None, "an engine that does not say"


# --- decode engines that lie -----------------------------------------------------------------------------------

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
LISTED = HostList(("127.0.0.0/8:7",), "is not in peers")


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
    "control-elsewhere": (with_rank(control="tcp://192.0.2.1:1", session="192.0.2.1:2"), "not in peers"),
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
    "block-sizes-without-end": (
        with_rank(
            caches=replace(
                caches(),
                geometries=tuple(
                    replace(caches().geometries[0], block_size=size, block_stride=1 << 20) for size in range(1, 300)
                ),
            )
        ),
        "299 pairs of cache group and block size, 256 at most",
    ),
    "a-tensor-twice": (with_rank(caches=replace(caches(), tensors=caches().tensors[:1] * 2)), "same tensor of a layer"),
}


def test_many_geometries_cost_one_mapping_and_one_share(monkeypatch):
    """Each may have cost a walk over all ranks."""
    [geometry] = caches().geometries
    geometries = tuple(replace(geometry, block_stride=geometry.block_stride + n) for n in range(8))
    tensors = tuple(replace(tensor, geometry=n) for n, tensor in enumerate(caches().tensors))
    many = with_rank(caches=RankCaches(geometries, tensors))
    calls: Counter[str] = Counter()
    for module, name in ((described_engine, "held"), (compatibility, "make_mapping")):

        def counted(name, called, *args):
            calls[name] += 1
            return called(*args)

        monkeypatch.setattr(module, name, partial(counted, name, getattr(module, name)))
    assert why_unsound(many, AnyHost()) is None
    assert found(caches(), many) is None
    assert calls == {"held": 1, "make_mapping": 1}


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ({}, [(0, 0), (0, 1)]),
        ({"model": "another"}, [(0, 0), (0, 1)]),
        ({"stages": (("another.layer",),) * 8}, [(0, 0)]),
    ],
    ids=["our layers", "another model with our layers", "other layers"],
)
def test_why_an_engine_gets_nothing_is_told_to_ranks_that_would_get_something(lie, told):
    layout = DecodeLayout(engine(4, **lie))
    rank = RankInfo("prefill", MODEL, "127.0.0.1", 0, sharding(2), 0, 1, (0, 1))
    state = PrefillTicket(100.0)
    transfer: Any = SimpleNamespace(
        ticket=ticket_with(remote_tp_size=4, remote_block_size=[16]),
        state=state,
        sender=SimpleNamespace(finish=lambda transfers: None),
    )
    control: Any = SimpleNamespace(_mappings=RankMappings(rank, caches(2)), _follow=lambda transfer: None)
    control._fail = partial(ControlPlane._fail, control)
    peer: Any = SimpleNamespace(endpoints=set())
    ControlPlane._contact(control, peer, transfer, layout, "it gets nothing")
    assert state.failure == "it gets nothing"
    assert sorted(state.destinations or {}) == told
    assert peer.endpoints == {layout.ranks[key].control for key in told}, "others are not connected to"


def test_mappings_that_are_kept_are_bounded(monkeypatch):
    """Tickets name the shapes of decode engines, so they could name ever new ones."""
    monkeypatch.setattr(decode_layout, "MAX_CACHED_TARGETS", 100)
    mappings = RankMappings(RankInfo("prefill", MODEL, "127.0.0.1", 0, sharding(2), 0, 1, (0, 1)), caches(2))
    most = 0
    for interleave in range(1, 201):
        shape = Sharding(4, (0, 0, 0, 0), interleave)
        assert mappings.mapping(0, shape, (16,)) is mappings.mapping(0, shape, (16,))
        most = max(most, len(mappings._mappings))
    assert 2 < most < 50


@pytest.mark.parametrize(("lie", "complaint"), LIES.values(), ids=LIES.keys())
def test_lies(lie, complaint):
    reason = why_unsound(lie, LISTED)
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
    assert why_unsound(largest, LISTED) is None
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
    reason = why_unsound(description, AnyHost())
    assert reason is None or (reason.isprintable() and len(reason) < 1000)
    if reason is None:
        mismatch(caches(), prefill_rank(), description)
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
