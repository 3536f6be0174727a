# SPDX-License-Identifier: Apache-2.0
"""What keeps a prefill rank from sending to a decode engine, said with both sides' values."""

import msgspec
import pytest

from vllm_ascend_pd.core.compatibility import mismatch
from vllm_ascend_pd.core.layout import CacheTensor, Geometry, Kind, Order, RankCaches
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription

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
    answers = {mismatch(ours, MODEL, rank, tp, whole_model, decode) for rank in range(tp)}
    [answer] = answers  # all ranks of an engine agree
    return answer


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (4, 1), (1, 4), (2, 4), (8, 2), (2, 8)])
@pytest.mark.parametrize("order", Order)
def test_engines_that_fit(p_tp, d_tp, order):
    assert found(caches(p_tp, order=order), engine(d_tp, order=order), p_tp) is None


def test_pipeline_stages_that_fit():
    two_stages = engine(stages=(LAYERS[:1], LAYERS[1:]))
    assert found(caches(), two_stages) is None
    assert found(caches(layers=LAYERS[:2]), two_stages, whole_model=False) is None
    assert found(caches(layers=LAYERS[2:]), two_stages, whole_model=False) is None


def test_blocks_of_other_sizes_that_fit():
    assert found(caches(block_size=128), engine()) is None
    assert found(caches(), engine(block_size=128)) is None
    assert found(caches(block_stride=9999), engine()) is None


def test_another_model():
    assert (
        found(caches(), engine(model="GemmaForCausalLM")) == f"prefill serves {MODEL}, decode serves GemmaForCausalLM"
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": Kind.STATE}, "kind is state on prefill, tokens on decode"),
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


def test_block_sizes_without_a_common_unit():
    answer = found(caches(block_size=24), engine(block_size=16))
    assert answer is not None
    assert "block sizes 24 (prefill) and 16 (decode)" in answer


def test_a_tensor_parallel_size_that_the_heads_do_not_allow():
    three = engine(tp=3, heads=1)
    assert found(caches(), three) == f"{LAYERS[0]}: tensor parallel size 3 and 4 KV heads: neither divides the other"


def test_layers_that_decode_lacks():
    """The draft layer of a model, say, that only prefill runs."""
    extra = "model.layers.4.self_attn.attn"
    answer = found(caches(layers=(*LAYERS, extra)), engine())
    assert answer == f"prefill has cache ('{extra}', 0) that decode lacks (10 against 8 tensors)"


def test_layers_that_prefill_lacks():
    answer = found(caches(layers=LAYERS[:3]), engine())
    assert answer == f"decode has cache ('{LAYERS[3]}', 0) that prefill lacks (8 against 6 tensors)"


def test_k_and_v_together_and_apart():
    answer = found(caches(parts=1), engine())
    assert answer == f"decode has cache ('{LAYERS[0]}', 1) that prefill lacks (8 against 4 tensors)"
    answer = found(caches(), engine(parts=1))
    assert answer == f"prefill has cache ('{LAYERS[0]}', 1) that decode lacks (8 against 4 tensors)"


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(lambda ranks: ranks[:-1], id="one missing"),
        pytest.param(lambda ranks: (), id="all missing"),
        pytest.param(lambda ranks: (*ranks, ranks[0]), id="one twice"),
        pytest.param(lambda ranks: (*ranks[:-1], ranks[0]), id="one in another's place"),
        pytest.param(lambda ranks: (*ranks[:-1], msgspec.structs.replace(ranks[-1], tp_rank=7)), id="out of range"),
        pytest.param(lambda ranks: (*ranks[:-1], msgspec.structs.replace(ranks[-1], tp_rank=-1)), id="negative"),
    ],
)
def test_ranks_that_are_not_all_there(ranks):
    decode = engine(tp=2, stages=(LAYERS[:2], LAYERS[2:]))
    answer = found(caches(), msgspec.structs.replace(decode, ranks=ranks(decode.ranks)))
    assert answer is not None
    assert answer.startswith("decode describes ranks [")
    assert answer.endswith("but says tp 2, pp 2")


@pytest.mark.parametrize(("tp", "pp"), [(2**62, 1), (1, 2**62), (2**40, 2**40), (0, 1), (-1, -1), (1, -1)])
@pytest.mark.timeout(10)
def test_sizes_that_no_engine_has(tp, pp):
    """They are not believed, nor counted up to."""
    answer = found(caches(), msgspec.structs.replace(engine(), tp=tp, pp=pp))
    assert answer == f"decode describes ranks [(0, 0)] but says tp {tp}, pp {pp}"
