# SPDX-License-Identifier: Apache-2.0
"""States of Mamba and linear attention arrive beside attention's KV: real processes and Mooncake over TCP, no model."""

from dataclasses import replace

import pytest

from harness.kv import LINEAR, MAMBA, Prompt, Side
from harness.rank_programs import DecodeRank
from harness.ranks import Pair, deliver, pair_of_each, prompts, run
from harness.states import LAYER
from vllm_ascend_pd.decode.checksums import Delivered

SHAPES = {
    "LINEAR_WITH_MTP_TP2_TO_TP1": (replace(LINEAR, layers=3, drafts=1), Side(2), Side(1)),
    "LINEAR_TP1_TO_TP2": (LINEAR, Side(1), Side(2)),
    "MAMBA_TP4_TO_TP1": (MAMBA, Side(4), Side(1)),
    "MAMBA_TP1_TO_TP2": (MAMBA, Side(1), Side(2)),
    # Ranks of context parallelism share tokens, and each has the states of its own heads.
    "LINEAR_DCP2_TO_TP1": (LINEAR, Side(4, dcp=2, interleave=16), Side(1)),
    "LINEAR_TP1_TO_DCP2": (LINEAR, Side(1), Side(4, dcp=2, interleave=16)),
    "MAMBA_DCP2_TO_DCP2": (MAMBA, Side(4, dcp=2, interleave=16), Side(4, dcp=2, interleave=16)),
    "LINEAR_PCP2_TO_DCP2": (LINEAR, Side(1, pcp=2, interleave=16), Side(4, dcp=2, interleave=16)),
}

LONG = ("MAMBA_TP4_TO_TP1", "LINEAR_DCP2_TO_TP1", "LINEAR_TP1_TO_DCP2", "LINEAR_PCP2_TO_DCP2")


pair = pair_of_each(SHAPES, long_ones=LONG, config={"verify_kv": "all"})


@pytest.mark.parametrize(("chunk", "cached"), [(None, 0), (40, 0), (None, 32)], ids=["whole", "chunked", "cached"])
def test_bytes_arrive(pair: Pair, chunk: int | None, cached: int) -> None:
    pair.each(pair.d_ranks, "do", counts)
    deliver(pair, chunk, cached)
    for counted in pair.each(pair.d_ranks, "do", counts):
        assert set(counted) == {"right"}, counted


def counts(rank: DecodeRank) -> dict[str, int]:
    """Returns the results of `verify_kv` since the last call."""
    found = dict(rank.verified)
    rank.verified.clear()
    return found


def spoil_state(rank: DecodeRank, victim: Prompt) -> None:
    """Changes the victim's state when it has arrived and is not compared yet."""
    begin = rank.worker._verifier.begin

    def begin_spoiled(delivered: list[Delivered]) -> None:
        if any(each.expect.request_id == victim.request_id for each in delivered):
            rank.states[-1][victim.states[1]].add_(1)
        begin(delivered)

    rank.worker._verifier.begin = begin_spoiled


def mend(rank: DecodeRank) -> None:
    rank.worker._verifier.__dict__.pop("begin", None)


def test_a_wrong_state_is_found_and_blamed(pair: Pair) -> None:
    requests = prompts(pair, [40, 70, 60])
    victim = requests[1]
    pair.each(pair.d_ranks, "clear")
    pair.d_ranks[-1].call("do", spoil_state, victim)
    try:
        run(pair, requests)
        _, failed = pair.wait_arrivals(len(requests))
    finally:
        pair.each(pair.d_ranks, "do", mend)
    assert list(failed) == [victim.request_id]
    assert f"{LAYER} tensor " in failed[victim.request_id]
    assert f" in blocks {victim.states[1]}, from prefill rank " in failed[victim.request_id]
    pair.wait_sent(len(requests))
