# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of moving KV on the emulated NPU: what benchmarks/push.py --npu counts is exact."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from helpers import push_counts
from helpers.push_pair import Cache

pytestmark = [pytest.mark.npu, pytest.mark.emulated, pytest.mark.timeout(600)]

LAYERS = 4
CACHE = Cache(LAYERS, heads=2)  # a block of K or V: 64 KiB


def counts(prefill_tp: int, kernels: Path) -> list[push_counts.Count]:
    return list(push_counts.counts(CACHE, prefill_tp, mib=[2], requests=[1, 2], kernels=kernels))


def test_kv_that_decode_wants_as_it_is_costs_the_device_nothing(kernels: Path) -> None:
    for count in counts(1, kernels):
        assert (count.kernels, count.collectives, count.copies, count.passes) == (0, 0, 0, 0)
        assert (count.uploads, count.downloads, count.waits, count.allocated) == (0, 0, 0, 0)
        assert count.events == 1 + 1 / LAYERS  # and the step's end
        assert 1 / LAYERS <= count.calls <= 1, "one write for all requests, and for layers that wait"
        # K's and V's: one for each of 4 blocks, or for a request whose blocks lie together.
        assert count.descriptors == 2 * (4 if count.scattered else count.requests)
        assert count.holds


def test_regrouping_is_three_launches_a_layer_and_never_waits(kernels: Path) -> None:
    """A split, an all-to-all and an interleave, for all requests at once; the blocks' offsets are all that goes up."""
    for count in counts(2, kernels):
        assert (count.kernels, count.collectives, count.copies, count.passes) == (2, 1, 0, 2)
        assert (count.uploads, count.downloads, count.waits) == (1, 0, 0)
        assert 2 / LAYERS <= count.calls <= 2, "one of each rank, and for layers that wait"
        assert count.holds
