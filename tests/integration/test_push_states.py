# SPDX-License-Identifier: Apache-2.0
"""States of Mamba and linear attention arrive beside attention's KV: real processes and Mooncake over TCP, no model."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.kv import Side
from harness.pool import long
from harness.ranks import deliver
from harness.states import GATED_DELTA, ONE_GROUP, HybridModel, HybridPair, with_states

LINEAR = HybridModel(layers=2, heads=2, states=GATED_DELTA)
MAMBA = HybridModel(layers=2, heads=2, states=ONE_GROUP)

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


@pytest.fixture(scope="module", params=[long(name) if name in LONG else name for name in SHAPES])
def pair(request: pytest.FixtureRequest) -> Iterator[HybridPair]:
    made = HybridPair(*SHAPES[request.param])
    yield made
    assert made.close() == []


@pytest.mark.parametrize(("chunk", "cached"), [(None, 0), (40, 0), (None, 32)], ids=["whole", "chunked", "cached"])
def test_bytes_arrive(pair: HybridPair, chunk: int | None, cached: int) -> None:
    deliver(pair, chunk, cached, with_states)
