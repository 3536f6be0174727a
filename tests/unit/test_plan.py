# SPDX-License-Identifier: Apache-2.0
"""Executing the plan gives decode exactly the cache that a single engine would have, in as few copies as can be."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate import MAX_HEADS, Case, Engine, Model, Request, partition_states, simulate, sizes

from vllm_ascend_pd.core.layout import Order
from vllm_ascend_pd.core.plan import merge
from vllm_ascend_pd.core.topology import writers_to


def run(case: Case) -> tuple[int, ...]:
    """Simulates `case`; checks who wrote against the topology. Returns the numbers of copies."""
    result = simulate(case)
    prefill, decode = case.prefill.sharding, case.decode.sharding
    for i, request in enumerate(case.requests):
        for d_rank in range(decode.tp):
            wrote = result.writers.get((i, d_rank), set())
            nothing_to_send = request.cached == request.num_tokens
            token_major = case.model.order is Order.TOKEN_MAJOR
            expected = writers_to(d_rank, decode, prefill, case.model.heads, request.replica_hash, token_major)
            assert wrote == (set() if nothing_to_send else {*expected})
    return result.copies


# --- named configurations ------------------------------------------------------------------------------------

SCATTERED = Request(num_tokens=11, p_blocks=(5, 2, 3), d_blocks=(1, 6, 4), replica_hash=5)
CHUNKED = dataclasses.replace(SCATTERED, steps=(3, 4, 9))


K_AND_V = (3, 5)


def case(heads: int, p_tp: int, d_tp: int, request: Request, order: Order) -> Case:
    prefill, decode = (Engine(tp, block_size=4, num_blocks=8) for tp in (p_tp, d_tp))
    return Case(Model(heads, (2,), order), prefill, decode, (request,))


SHARED = (
    Request(29, p_blocks=tuple(range(8)), d_blocks=(9, 3, 5, 0, 1, 2, 7, 8), replica_hash=3, steps=(3, 17)),
    Request(1, p_blocks=(9,), d_blocks=(10,), replica_hash=4),  # most shares have none of it
    Request(30, p_blocks=tuple(range(10, 18)), d_blocks=tuple(range(18, 10, -1)), cached=24, replica_hash=5),
)


def whole(tp: int) -> Engine:
    """Without context parallelism."""
    return Engine(tp, block_size=4, num_blocks=20)


def shares(tp: int, dcp: int = 1, pcp: int = 1, interleave: int = 2) -> Engine:
    return dataclasses.replace(whole(tp), shares=partition_states(tp, dcp, pcp), interleave=interleave)


def shared(
    heads: int, prefill: Engine, decode: Engine, part_bytes: tuple[int, ...], order: Order = Order.TOKEN_MAJOR
) -> Case:
    return Case(Model(heads, part_bytes, order), prefill, decode, SHARED)


CONTEXT_PARALLEL = {
    "MLA_DCP2_TO_ALL_TOKENS": shared(1, shares(2, dcp=2), whole(1), (16, 2)),
    "MLA_ALL_TOKENS_TO_DCP2": shared(1, whole(1), shares(2, dcp=2), (16, 2)),
    "MLA_DCP4_TO_DCP2": shared(1, shares(4, dcp=4), shares(2, dcp=2), (16, 2)),
    "MLA_DCP2_TO_DCP3": shared(1, shares(2, dcp=2), shares(3, dcp=3), (16, 2)),
    "MLA_PCP2_DCP2_TO_DCP2_OF_OTHER_INTERLEAVE": shared(1, shares(4, 2, 2, interleave=4), shares(2, dcp=2), (16, 2)),
    "MLA_PCP2_TO_PCP1": shared(1, shares(1, pcp=2), whole(1), (16, 2)),
    "MLA_PCP2_OF_COPIES": shared(1, dataclasses.replace(whole(2), shares=(0,) * 4), whole(1), (16, 2)),
    "GQA_REPLICATED_ON_P_DCP2": shared(2, shares(8, dcp=2), whole(1), K_AND_V),
    "GQA_REPLICATED_ON_D_DCP2": shared(2, whole(1), shares(4, dcp=2), K_AND_V),
    "GQA_REPLICATED_ON_BOTH_DCP2": shared(2, shares(4, dcp=2, interleave=4), shares(4, dcp=2), K_AND_V),
    "GQA_GATHERED_PCP2": shared(4, shares(4, pcp=2), whole(2), K_AND_V),
    "GQA_SPLIT_PCP2_TO_DCP2": shared(2, shares(1, pcp=2), shares(4, dcp=2), K_AND_V),
    "HEAD_MAJOR_PCP2_TO_DCP2": shared(
        2, shares(1, pcp=2, interleave=4), shares(4, dcp=2, interleave=4), (8,), Order.HEAD_MAJOR
    ),
}


@pytest.mark.parametrize("name", CONTEXT_PARALLEL)
def test_shares_of_the_tokens(name):
    run(CONTEXT_PARALLEL[name])


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("heads", range(1, MAX_HEADS + 1))
def test_every_combination_of_sizes(heads, order):
    for p_tp in sizes(heads):
        for d_tp in sizes(heads):
            for replica_hash in range(max(1, p_tp // heads)):
                request = dataclasses.replace(CHUNKED, replica_hash=replica_hash)
                run(case(heads, p_tp, d_tp, request, order))


# --- any configuration ---------------------------------------------------------------------------------------


def stages(draw: st.DrawFn, layers: int) -> tuple[tuple[int, ...], ...]:
    """Layers 0..layers-1 cut into pipeline stages."""
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
    return tuple(tuple(range(a, b)) for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


def block_ids(rng: np.random.Generator, count: int, num_blocks: int, scattered: bool) -> list[int]:
    """Distinct ids: in any order, or mostly neighbours as an idle engine hands them out."""
    if scattered:
        return rng.permutation(num_blocks)[:count].tolist()
    first = int(rng.integers(0, num_blocks - count + 1))
    return list(range(first, first + count))


def token_shares(draw: st.DrawFn, heads: int, tp: int, prefills: bool) -> tuple[int, ...]:
    """Any context parallelism that `tp` ranks of `heads` KV heads allow; prefill ranks may be several times as many,
    holding shares or copies."""
    replicas = max(1, tp // heads)
    dcp = draw(st.sampled_from([size for size in range(1, replicas + 1) if replicas % size == 0]))
    pcp = draw(st.integers(1, 3)) if prefills else 1
    if pcp > 1 and draw(st.booleans()):
        return partition_states(tp, dcp) * pcp
    return partition_states(tp, dcp, pcp)


def engine(
    draw: st.DrawFn, model: Model, block_size: int, stages: tuple[tuple[int, ...], ...], prefills: bool
) -> Engine:
    """`num_blocks` is still to be filled in."""
    tp = draw(st.sampled_from(sizes(model.heads)))
    shares = token_shares(draw, model.heads, tp, prefills) if draw(st.booleans()) else ()
    interleave = block_size
    if model.order is Order.TOKEN_MAJOR:
        interleave = draw(st.sampled_from([n for n in range(1, block_size + 1) if block_size % n == 0]))
    gap = draw(st.sampled_from([0, 0, 1, 5]))
    return Engine(tp, block_size, 0, stages, gap, shares, interleave if max(shares, default=0) else 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    order = draw(st.sampled_from(Order))
    parts = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    model = Model(draw(st.integers(1, MAX_HEADS)), parts, order)
    layers = draw(st.integers(1, 3))
    p_block = d_block = draw(st.integers(1, 6))
    if order is Order.TOKEN_MAJOR:
        d_block = draw(st.one_of(st.just(d_block), st.integers(1, 12)))
    prefill = engine(draw, model, p_block, stages(draw, layers), prefills=True)
    decode = engine(draw, model, d_block, stages(draw, layers), prefills=False)
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    lengths = draw(st.lists(st.integers(1, 3 * max(prefill.span, decode.span, 4)), min_size=1, max_size=3))
    p_needs, d_needs = ([-(-n // side.span) for n in lengths] for side in (prefill, decode))
    p_spare, d_spare = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    scattered = draw(st.booleans())
    p_ids = block_ids(rng, sum(p_needs), sum(p_needs) + p_spare, scattered)
    d_ids = block_ids(rng, sum(d_needs), sum(d_needs) + d_spare, scattered)
    shares_prefix = draw(st.booleans())
    requests: list[Request] = []
    for num_tokens, p_need, d_need in zip(lengths, p_needs, d_needs, strict=True):
        p_blocks, p_ids = p_ids[:p_need], p_ids[p_need:]
        d_blocks, d_ids = d_ids[:d_need], d_ids[d_need:]
        if shares_prefix and requests:
            # Only blocks that both prompts fill can be shared.
            shared = min(num_tokens, requests[0].num_tokens) // prefill.span
            p_blocks[:shared] = requests[0].p_blocks[:shared]
        requests.append(
            Request(
                num_tokens,
                tuple(p_blocks),
                tuple(d_blocks),
                cached=draw(st.integers(0, num_tokens // decode.span)) * decode.span,
                replica_hash=draw(st.integers(0, 2**32 - 1)),
                steps=tuple(sorted(draw(st.sets(st.integers(1, num_tokens), max_size=3)))),
            )
        )
    return Case(
        model,
        dataclasses.replace(prefill, num_blocks=sum(p_needs) + p_spare),
        dataclasses.replace(decode, num_blocks=sum(d_needs) + d_spare),
        tuple(requests),
        seed,
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_configuration(case):
    run(case)


# --- how few copies ------------------------------------------------------------------------------------------

THREE_BLOCKS = Request(12, p_blocks=(2, 5, 1), d_blocks=(7, 0, 3))
THREE_NEIGHBOURS = Request(12, p_blocks=(2, 3, 4), d_blocks=(5, 6, 7))


@pytest.mark.parametrize(
    ("heads", "p_tp", "d_tp", "order", "scattered", "neighbours"),
    [
        pytest.param(2, 1, 1, Order.TOKEN_MAJOR, 3, 1, id="same heads"),
        pytest.param(2, 2, 1, Order.HEAD_MAJOR, 3, 3, id="head-major"),
        pytest.param(2, 2, 1, Order.TOKEN_MAJOR, 2, 1, id="gather"),
        pytest.param(2, 1, 2, Order.TOKEN_MAJOR, 3, 1, id="split"),
        pytest.param(6, 3, 2, Order.TOKEN_MAJOR, 1, 1, id="ratio does not divide"),
        pytest.param(1, 4, 2, Order.TOKEN_MAJOR, 3, 1, id="MLA"),
    ],
)
def test_copies_per_tensor_and_decode_rank(heads, p_tp, d_tp, order, scattered, neighbours):
    for request, expected in ((THREE_BLOCKS, scattered), (THREE_NEIGHBOURS, neighbours)):
        copies = run(case(heads, p_tp, d_tp, request, order))
        assert max(copies) == expected


def fewest(pairs: list[tuple[int, int]], nbytes: int) -> int:
    """How many maximal runs the byte-by-byte copies form: no list of copies can be shorter."""
    source_of = {dst + i: src + i for src, dst in pairs for i in range(nbytes)}
    return sum(source_of.get(dst - 1, -2) != src - 1 for dst, src in source_of.items())


def byte_copies(pairs: Iterator[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return sorted((src + i, dst + i) for src, dst, nbytes in pairs for i in range(nbytes))


@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 8), max_size=12),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_merge_is_minimal(nbytes, sources, random, aligned):
    """Sources may repeat (two requests share a prefix in prefill's cache), destinations never do."""
    places = random.sample(range(2 * len(sources)), len(sources))
    if random.random() < 0.5:
        places.sort()
    dst = [place * nbytes if aligned else place * (nbytes + 1) for place in places]
    pairs = list(zip([source * nbytes for source in sources], dst, strict=True))
    merged = (
        merge(*(np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True)), nbytes)
        if pairs
        else merge(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), nbytes)
    )
    assert byte_copies(zip(merged.src, merged.dst, merged.nbytes, strict=True)) == byte_copies(
        (src, dst, nbytes) for src, dst in pairs
    )
    assert len(merged.src) == fewest(pairs, nbytes)
    assert merged.nbytes.sum() == len(pairs) * nbytes


@pytest.mark.parametrize(
    ("src", "dst"),
    [([0, 8, 0, 8], [0, 8, 100, 108]), ([0, 0, 8, 8], [0, 100, 8, 108]), ([8, 8, 0, 0], [108, 8, 0, 100])],
)
def test_merge_of_a_prefix_that_two_requests_share(src, dst):
    merged = merge(np.array(src), np.array(dst), 8)
    assert sorted(zip(merged.src, merged.dst, merged.nbytes, strict=True)) == [(0, 0, 16), (0, 100, 16)]
