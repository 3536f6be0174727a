# SPDX-License-Identifier: Apache-2.0
"""The work that regrouping one layer's K and V queues on an NPU (benchmarks/launches.py), by side."""

import ctypes
import sys
from pathlib import Path

import pytest

import cann_on_host

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import launches

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

TOKENS = 1024


def runtime_knows_kernels() -> bool:
    library = cann_on_host.library_folder() / "libascendcl.so"
    return library.exists() and hasattr(ctypes.CDLL(str(library)), "cann_on_host_count_launch")


@pytest.mark.skipif(not runtime_knows_kernels(), reason="these emulated CANN libraries cannot count compiled kernels")
def test_compiled_kernels_are_within_the_bar(kernels: Path) -> None:
    count = launches.count("kernels", TOKENS, kernels)
    assert count.operators == {"vllm_ascend_pd_split": 1, "vllm_ascend_pd_interleave": 1}
    assert (count.launches, count.passes) == (3, 2)
    assert (count.copies_from_host, count.copies_to_host) == (0, 0), "regrouping a layer waits for the host"
    assert count.launches <= launches.MAX_LAUNCHES
    assert count.passes <= launches.MAX_PASSES


def test_torch_npus_operators_take_more() -> None:
    """They are a division for the indices, a gather and a strided copy per tensor, and a copy that interleaves."""
    count = launches.count("operators", TOKENS)
    assert (count.kernels, count.copies, count.collectives) == (6, 0, 1)
    assert count.passes == pytest.approx(3, abs=0.001)  # and a few indices
    assert (count.copies_from_host, count.copies_to_host) == (0, 0), "regrouping a layer waits for the host"


def test_vllm_ascends_layerwise_connector() -> None:
    """Ours is compared with this one. If this fails, vllm-ascend has changed: see docs/performance.md."""
    count = launches.count("reference", TOKENS)
    assert (count.launches, count.passes) == (11, 5)


def test_a_layer_smaller_than_the_allocated_buffer() -> None:
    """A device allocates whole pages, so the staging buffer is longer than this layer. Its bytes are checked, too."""
    assert launches.count("operators", 256).exchanged == 1


def test_one_side_does_not_pass_for_another() -> None:
    with pytest.raises(ValueError, match="kernels with library None"):
        launches.count("kernels", TOKENS)
