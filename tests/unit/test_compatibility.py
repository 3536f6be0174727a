# SPDX-License-Identifier: Apache-2.0
"""What keeps a prefill rank from sending to a decode engine, said with both sides' values."""

import msgspec
import pytest

from harness.tickets import ticket_with
from vllm_ascend_pd.core.compatibility import FitCheck, foreign, mismatch, unsound
from vllm_ascend_pd.core.config import ConnectorConfig, parse_config
from vllm_ascend_pd.core.hosts import AnyHost
from vllm_ascend_pd.core.layout import BlockKind, CacheTensor, Geometry, Order, RankCaches
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription, TransportInfo
from vllm_ascend_pd.core.topology import RankInfo, sharding
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout

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


def found(ours: RankCaches, decode: EngineDescription, tp: int = 1, whole_model: bool = True) -> str | None:
    answers = {mismatch(ours, MODEL, rank, sharding(tp), whole_model, decode) for rank in range(tp)}
    [answer] = answers  # all ranks of an engine agree
    return answer


def test_another_model():
    assert (
        found(caches(), engine(model="GemmaForCausalLM")) == f"prefill serves {MODEL}, decode serves GemmaForCausalLM"
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": BlockKind.STATE}, "kind is state on prefill, tokens on decode"),
        ({"dtype": "int8"}, "dtype is int8 on prefill, bfloat16 on decode"),
        ({"total_heads": 8}, "total_heads is 8 on prefill, 4 on decode"),
        ({"head_bytes": 64}, "head_bytes is 64 on prefill, 32 on decode"),
        ({"group": 1}, "group is 1 on prefill, 0 on decode"),
        ({"order": Order.HEAD_MAJOR}, "order is head_major on prefill, token_major on decode"),
    ],
)
def test_geometries_that_differ(changes, named):
    assert found(caches(**changes), engine()) == f"{LAYERS[0]}: {named}"


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


def test_a_tensor_parallel_size_that_the_heads_do_not_allow():
    three = engine(tp=3, heads=1)
    assert found(caches(), three) == f"{LAYERS[0]}: tensor parallel size 3 and 4 KV heads: neither divides the other"


def test_layers_that_decode_lacks():
    extra = "model.layers.4.self_attn.attn"
    answer = found(caches(layers=(*LAYERS, extra)), engine())
    assert answer == f"prefill has cache ('{extra}', 0) that decode lacks (10 against 8 tensors)"


def test_layers_that_prefill_lacks():
    answer = found(caches(layers=LAYERS[:3]), engine())
    assert answer == f"decode has cache ('{LAYERS[3]}', 0) that prefill lacks (8 against 6 tensors)"


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


def test_the_same_draft_with_other_caches():
    answer = found(drafting(head_bytes=64), drafting_engine())
    assert answer == f"{DRAFT_LAYER}: head_bytes is 64 on prefill, 32 on decode"


def test_a_draft_does_not_excuse_layers_of_the_model():
    answer = found(drafting(layers=LAYERS[:3]), drafting_engine())
    assert answer == f"decode has cache ('{LAYERS[3]}', 0) that prefill lacks (10 against 8 tensors)"


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
    assert unsound(decode, AnyHost()) == f"decode's rank (0, 0): {reason}"


def test_a_size_of_context_parallelism_that_does_not_divide():
    decode = msgspec.structs.replace(engine(2), dcp=3)
    assert unsound(decode, AnyHost()) == "decode has tp 2 and dcp 3, which does not divide it"


def test_tokens_dealt_out_among_ranks_of_different_heads():
    answer = found(caches(), sharing(engine(4), 2, 16))
    assert answer is not None
    assert "4 ranks with tensor parallel size 4 do not all share the tokens of 4 KV heads by 2" in answer


def test_caches_that_ranks_copy_where_they_share_others():
    """Their blocks are longer, and both sides must take them for copied."""
    own = {"heads": 1, "total_heads": 1}
    copied = {**own, "block_size": 32, "block_stride": 32 * 32, "copied": True}
    decode = msgspec.structs.replace(engine(2, **copied), dcp=2, interleave=16)
    assert unsound(decode, AnyHost()) is None
    assert found(caches(**own, copied=True), decode) is None
    assert found(caches(**own), decode) == f"{LAYERS[0]}: copied is False on prefill, True on decode"
    ticket = ticket_with(request_id="r", remote_tp_size=2, remote_dcp_size=2, remote_interleave_size=16)
    assert foreign(ticket, decode, DecodeLayout(decode).smallest) is None
    odd = msgspec.structs.replace(engine(2, **{**copied, "block_size": 31}), dcp=2, interleave=16)
    assert unsound(odd, AnyHost()) == "decode's rank (0, 0): blocks of 31 tokens, which 2 ranks copy"


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
    assert foreign(ticket, layout.description, layout.smallest) == reason


ROTATED = {"rope_theta": "20000"}


def misfit(
    rank_info: RankInfo,
    config: ConnectorConfig,
    caches: RankCaches,
    transport: TransportInfo,
    decode: EngineDescription,
) -> str | None:
    return FitCheck(rank_info, config, caches, transport).misfit(decode)


def misfit_of(settings: dict[str, str], **config: object) -> str | None:
    rank_info = RankInfo("prefill", MODEL, "127.0.0.1", 0, sharding(1), 0, 1, (0,), settings={"rope_theta": "10000"})
    described = msgspec.structs.replace(engine(), settings=settings)
    return misfit(rank_info, parse_config(config), caches(), TransportInfo(), described)


def test_other_settings_are_refused_unless_prefill_allows_it(caplog):
    named = "rope_theta is 10000 on prefill, 20000 on decode"
    assert misfit_of({"rope_theta": "10000"}) is None
    assert misfit_of({}) is None, "an engine that does not say"
    assert misfit_of(ROTATED) == f"the engines compute other KV: {named}"
    assert misfit_of(ROTATED, allow_other_model=True) is None
    assert f"{named}: allow_other_model is set" in caplog.text


def test_a_transport_that_cannot_write_to_one_of_decodes_ranks_is_refused():
    rank_info = RankInfo("prefill", MODEL, "127.0.0.1", 0, sharding(1), 0, 1, (0,))
    ours = TransportInfo("ascend", "mooncake-transfer-engine-npu 0.3.13.post1", "client/server", "AutoConnect")
    theirs = TransportInfo("ascend", "mooncake-transfer-engine-npu 0.3.11.post1", "comm", "Connect")
    described = engine(2)
    silent, other = described.ranks
    ranks = (silent, msgspec.structs.replace(other, transport=theirs))
    reason = misfit(rank_info, parse_config({}), caches(), ours, msgspec.structs.replace(described, ranks=ranks))
    assert reason is not None
    assert str(ours) in reason
    assert str(theirs) in reason
    assert misfit(rank_info, parse_config({}), caches(), ours, described) is None, "an engine that does not say"
