# SPDX-License-Identifier: Apache-2.0
"""The block ops check their arguments before they write anything."""

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from op_calls import GATHER, IMPLEMENTATIONS, INTERLEAVE, SPLIT, SUM, random_tensor

from vllm_ascend_pd.device import ops, ops_fallback

SHARED = torch.zeros(256, dtype=torch.uint8)
OVERLAP = {"out": SHARED[63:191]}
STRIDED = torch.zeros(256, dtype=torch.uint8)[::2]
HUGE = 2**62
TWO_CACHES = {"caches": GATHER["caches"] * 2}
APART = {"out": torch.zeros(256, dtype=torch.uint8), "out_cache_stride": 128}

# Of gather_units and split_heads: their caches, units and sections are the same 4 * 64 and 2 * 64 bytes.
SPLIT_ERRORS = [
    ({"out_offset": -1}, "out_offset is -1, must be at least 0"),
    ({"out_offset": 1}, r"end of the last section in out is 129, must be at most 128 \(bytes of out\)"),
    ({"out_offset": HUGE, "out_section_stride": HUGE}, "end of the last section in out is 9223372036854775807"),
    ({"out_section_stride": -1}, "out_section_stride is -1, must be at least 0"),
    ({"out_section_stride": 63}, "out_section_stride is 63, must be at least 64"),
    ({"out_section_stride": 65}, "end of the last section in out is 129"),
    ({"out_cache_stride": -1}, "out_cache_stride is -1, must be at least 0"),
    ({"caches": []}, "the number of caches is 0, must be at least 1"),
    (TWO_CACHES, "out_cache_stride is 0, must be at least 64"),
    (TWO_CACHES | {"out_cache_stride": 127}, "out_cache_stride is 127, must be at least 128"),
    (
        TWO_CACHES | {"out_cache_stride": 64, "out_section_stride": 127},
        "out_section_stride is 127, must be at least 128",
    ),
    (TWO_CACHES | {"out_cache_stride": 128}, r"end of the last section in out is 256, must be at most 128 "),
    ({"unit_offsets": torch.tensor([0, -1])}, r"unit_offsets\[1\] is -1, must be at least 0"),
    ({"unit_offsets": torch.tensor([193, 0])}, r"unit_offsets\[0\] is 193, must be at most 192 "),
    ({"unit_offsets": torch.tensor([0, 2**63 - 1])}, r"unit_offsets\[1\] is 9223372036854775807"),
    ({"unit_offsets": torch.tensor([0, 1], dtype=torch.int32)}, "1-d tensor of Int, must be 1-d of Long"),
    ({"unit_offsets": torch.tensor([[0, 1]])}, "2-d tensor of Long, must be 1-d of Long"),
    ({"unit_offsets": torch.arange(4)[::2]}, r"unit_offsets has shape \[2\] and strides \[2\]"),
    ({"caches": [*GATHER["caches"], torch.zeros(63, dtype=torch.uint8)]} | APART, r"a unit's size is 64, .* most 63"),
    ({"caches": [torch.zeros(0, dtype=torch.uint8)]}, r"a unit's size is 64, must be at most 0"),
    ({"out": STRIDED}, r"out has shape \[128\] and strides \[2\], must be contiguous"),
    ({"caches": [SHARED[:64]]} | OVERLAP, r"out \(128 bytes\) overlaps cache \(64 bytes\)"),
    ({"unit_offsets": SHARED[:16].view(torch.int64), "out": SHARED[8:136]}, "overlaps unit_offsets"),
]
ERRORS = [
    *[("gather_units", GATHER, bad, message) for bad, message in SPLIT_ERRORS],
    ("gather_units", GATHER, {"unit_bytes": 0}, "unit_bytes is 0, must be at least 1"),
    ("gather_units", GATHER, {"unit_bytes": HUGE}, "out_section_stride is 64, must be at least"),
    ("gather_units", GATHER, {"section_units": 0}, "section_units is 0, must be at least 1"),
    ("split_heads", SPLIT, {"splits": 0}, "splits is 0, must be at least 1"),
    *[("split_heads", SPLIT, bad, message) for bad, message in SPLIT_ERRORS],
    ("split_heads", SPLIT, {"tokens": -1}, "tokens is -1, must be at least 0"),
    ("split_heads", SPLIT, {"row_bytes": 0}, "row_bytes is 0, must be at least 1"),
    ("split_heads", SPLIT, {"tokens": HUGE, "row_bytes": HUGE}, "out_section_stride is 64, must be at least"),
    *[
        ("interleave_heads", INTERLEAVE, bad, message)
        for bad, message in [
            ({"src_offset": -1}, "src_offset is -1, must be at least 0"),
            ({"src_offset": 1}, r"end of the last rank in src is 129, must be at most 128 \(bytes of src\)"),
            ({"src_rank_stride": -1}, "src_rank_stride is -1, must be at least 0"),
            ({"src_rank_stride": 63}, "src_rank_stride is 63, must be at least 64"),
            ({"src_rank_stride": HUGE, "ranks": 8}, "end of the last rank in src is 9223372036854775807"),
            ({"out_offset": -1}, "out_offset is -1, must be at least 0"),
            ({"out_offset": 1}, r"end of the last token in out is 129, must be at most 128 \(bytes of out\)"),
            ({"ranks": 0}, "ranks is 0, must be at least 1"),
            ({"tokens": -1}, "tokens is -1, must be at least 0"),
            ({"row_bytes": 0}, "row_bytes is 0, must be at least 1"),
            ({"tokens": HUGE, "row_bytes": HUGE}, "src_rank_stride is 64, must be at least"),
            ({"src": STRIDED}, r"src has shape \[128\] and strides \[2\], must be contiguous"),
            ({"out": STRIDED}, r"out has shape \[128\] and strides \[2\], must be contiguous"),
            ({"src": SHARED[:128]} | OVERLAP, r"out \(128 bytes\) overlaps src \(128 bytes\)"),
        ]
    ],
    *[
        ("sum_units", SUM, bad, message)
        for bad, message in [
            ({"heads": [0]}, "heads is 0, must be at least 1"),
            ({"heads": [HUGE]}, "a unit's size is 9223372036854775807"),
            ({"heads": []}, "there are 1 caches and 0 of an argument that has one for each"),
            ({"word_bytes": [8]}, "word_bytes is 8, must be 1, 2 or 4"),
            ({"place_weights": [torch.zeros(0, dtype=torch.int64)]}, "words is 0, must be at least 1"),
            ({"place_weights": [torch.zeros(9, dtype=torch.int64)]}, "a unit's size is 288, must be at most 256"),
            ({"place_weights": [torch.zeros(2)]}, "place_weights is a 1-d tensor of Float, must be 1-d of Long"),
            ({"entry_weights": [torch.zeros(2, 0, dtype=torch.int64)]}, "entries is 0, must be at least 1"),
            ({"entry_weights": [torch.zeros(3, 4, dtype=torch.int64)]}, "entry_weights are of 3 units, must be of 2"),
            ({"entry_weights": [torch.zeros(4, 2, dtype=torch.int64).T]}, "entry_weights has shape .* contiguous"),
            ({"unit_offsets": [torch.tensor([0, 193])]}, r"unit_offsets\[1\] is 193, must be at most 192 "),
            ({"out": torch.zeros(3, dtype=torch.int64)}, "the number of checksums is 4, must be at most 3"),
            ({"out": torch.zeros(4)}, "out is a 1-d tensor of Float"),
            ({"caches": [SHARED], "out": SHARED[:32].view(torch.int64)}, r"out \(32 bytes\) overlaps cache"),
        ]
    ],
]


@IMPLEMENTATIONS
@pytest.mark.parametrize(("op", "good", "bad", "message"), ERRORS)
def test_bad_arguments(impl: ModuleType, op: str, good: dict[str, Any], bad: dict[str, Any], message: str) -> None:
    getattr(impl, op)(**good)
    out = (good | bad)["out"].fill_(7)
    with pytest.raises(ValueError, match=f"^{op}: .*{message}"):
        getattr(impl, op)(**good | bad)
    assert (out == 7).all()


@pytest.mark.parametrize(("op", "good"), [("gather_units", GATHER), ("interleave_heads", INTERLEAVE)])
def test_tensors_on_different_devices(op: str, good: dict[str, Any]) -> None:
    elsewhere = torch.empty(128, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match=f"^{op}: .* is on cpu, must be on meta as out is"):
        getattr(torch.ops.vllm_ascend_pd, f"check_{op}")(**good | {"out": elsewhere})


@pytest.mark.parametrize(
    ("op", "good", "empty"),
    [
        ("gather_units", GATHER, {"unit_offsets": torch.tensor([], dtype=torch.int64)}),
        ("split_heads", SPLIT, {"unit_offsets": torch.tensor([], dtype=torch.int64)}),
        ("split_heads", SPLIT, {"tokens": 0}),
        ("interleave_heads", INTERLEAVE, {"tokens": 0}),
    ],
)
@IMPLEMENTATIONS
def test_nothing_to_copy(impl: ModuleType, op: str, good: dict[str, Any], empty: dict[str, Any]) -> None:
    getattr(impl, op)(**good | empty | {"out": torch.empty(0)})


def test_a_unit_may_end_where_a_strided_cache_ends() -> None:
    cache = random_tensor((4, 2, 64))[:, 0]  # 64 bytes every 128: addressable to 3 * 128 + 64
    out = torch.zeros(64, dtype=torch.uint8)
    ops.gather_units([cache], torch.tensor([384]), 64, 1, out, 0, 0, 0)
    assert torch.equal(out, cache[3])
    with pytest.raises(ValueError, match=r"unit_offsets\[0\] is 385, must be at most 384"):
        ops.gather_units([cache], torch.tensor([385]), 64, 1, out, 0, 0, 0)


@pytest.mark.parametrize(
    ("op", "kwargs"),
    [("gather_units", GATHER), ("split_heads", SPLIT), ("interleave_heads", INTERLEAVE), ("sum_units", SUM)],
)
def test_ops_trace(op: str, kwargs: dict[str, Any]) -> None:
    torch.library.opcheck(getattr(torch.ops.vllm_ascend_pd, op).default, (), kwargs)


# --- builds without the compiled ops or the NPU's kernels --------------------------------------------------------


def test_a_missing_build_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm_ascend_pd.device.ops")
    monkeypatch.setitem(sys.modules, "vllm_ascend_pd._C", None)
    with pytest.raises(ImportError, match="pip install --no-build-isolation"):
        importlib.import_module("vllm_ascend_pd.device.ops")


def test_the_fallback_refuses_units_off_its_grid() -> None:
    cache = torch.zeros(4, 64, dtype=torch.uint8)
    out = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiples of 64 bytes"):
        ops_fallback.gather_units([cache], torch.tensor([32]), 64, 1, out, 0, 0, 0)
