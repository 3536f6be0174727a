# SPDX-License-Identifier: Apache-2.0
"""Layers that vllm-ascend announces without a name leave when the step ends. Real processes, real Mooncake."""

import pytest

from harness.kv import Model, Side, layer_name
from harness.rank_programs import PrefillRank
from harness.ranks import MakePair, expect_delivery, prompts, run

LAYERS = 6
MODEL = Model(layers=LAYERS)
UNNAMED = [layer_name(layer) for layer in (0, 1, 3, 4)]


def announce_without_names(rank: PrefillRank) -> None:
    announce = rank.worker.push_layer

    def computed(layer: str) -> None:
        before = dict(rank.worker._plan.unpushed)
        announce("" if layer in UNNAMED else layer)
        if layer in UNNAMED:
            assert rank.worker._plan.unpushed == before

    rank.worker.push_layer = computed  # type: ignore[method-assign]


@pytest.mark.parametrize("p_tp", [1, 2])
def test_they_leave_when_the_step_ends(p_tp: int, make_pair: MakePair) -> None:
    pair = make_pair(MODEL, Side(p_tp), Side(1))
    pair.each(pair.p_ranks, "do", announce_without_names)
    requests = prompts(pair, [200, 130])
    run(pair, requests, chunk=64)
    expect_delivery(pair, requests)
