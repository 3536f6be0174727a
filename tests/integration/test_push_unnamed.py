# SPDX-License-Identifier: Apache-2.0
"""Layers that vllm-ascend announces without a name leave when they are computed. Real processes, real Mooncake."""

from dataclasses import replace
from typing import Any

import pytest

from harness.kv import Model, Side, layer_name
from harness.rank_programs import PrefillRank
from harness.ranks import MakePair, expect_delivery, expect_failure, prompts, run
from vllm_ascend_pd.prefill.unnamed_layers import UnnamedLayers

LAYERS = 6
MODEL = replace(Model(), layers=LAYERS)
NAMES = [layer_name(layer) for layer in range(LAYERS)]
UNNAMED = [NAMES[0], NAMES[1], NAMES[3], NAMES[4]]


def announce_without_names(rank: PrefillRank) -> None:
    announce = rank.worker.push_layer
    rank.worker._unnamed = UnnamedLayers(NAMES, UNNAMED)
    rank.announced = []  # type: ignore[attr-defined]

    def computed(layer: str) -> None:
        before, sends = len(rank.worker._plan.unpushed), rank.worker._plan.sends
        announce("" if layer in UNNAMED else layer)
        if sends:
            rank.announced.append((layer, before - len(rank.worker._plan.unpushed)))  # type: ignore[attr-defined]

    rank.worker.push_layer = computed  # type: ignore[method-assign]


def announce_twice(rank: PrefillRank) -> None:
    announce = rank.worker.push_layer

    def computed(layer: str) -> None:
        announce(layer)
        if layer in UNNAMED:
            announce(layer)

    rank.worker.push_layer = computed  # type: ignore[method-assign]


def announced(rank: PrefillRank) -> Any:
    return rank.announced  # type: ignore[attr-defined]


@pytest.mark.parametrize("p_tp", [1, 2])
def test_they_leave_when_they_are_computed_once_a_step_has_shown_their_order(p_tp: int, make_pair: MakePair) -> None:
    pair = make_pair(MODEL, Side(p_tp), Side(1))
    pair.each(pair.p_ranks, "do", announce_without_names)
    requests = prompts(pair, [200, 130])
    run(pair, requests, chunk=64)
    expect_delivery(pair, requests)
    for seen in pair.each(pair.p_ranks, "do", announced):
        first, later = seen[:LAYERS], seen[LAYERS:]
        assert {layer for layer, left in first if left} == set(NAMES) - set(UNNAMED)
        assert len(later) >= 2 * LAYERS
        assert {left for _, left in later} == {1}


def test_another_order_fails_the_steps_requests(make_pair: MakePair) -> None:
    pair = make_pair(MODEL, Side(1), Side(1))
    pair.each(pair.p_ranks, "do", announce_without_names)
    first, second = prompts(pair, [40, 40])
    run(pair, [first])
    expect_delivery(pair, [first])
    pair.each(pair.p_ranks, "do", announce_twice)
    run(pair, [second])
    expect_failure(pair, "a state may have been sent before it was computed")
