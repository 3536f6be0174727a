# SPDX-License-Identifier: Apache-2.0
"""The block ops against a line of torch each, then chained as prefill ranks chain them. They release the GIL, and check
their arguments before they write anything."""

import ctypes
import importlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.device import ops, ops_fallback


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Every bit pattern, NaNs included: the ops move bytes."""
    return torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


# The CPU's ops, and what an NPU without compiled kernels runs.
IMPLEMENTATIONS = pytest.mark.parametrize("impl", [ops, ops_fallback], ids=["ops", "fallback"])

GATHER: dict[str, Any] = {
    "caches": [torch.zeros(4, 64, dtype=torch.uint8)],
    "unit_offsets": torch.tensor([0, 192]),
    "unit_bytes": 64,
    "section_units": 1,
    "out": torch.zeros(128, dtype=torch.uint8),
    "out_offset": 0,
    "out_cache_stride": 0,
    "out_section_stride": 64,
}
SPLIT: dict[str, Any] = {k: v for k, v in GATHER.items() if k not in ("unit_bytes", "section_units")} | {
    "splits": 2,
    "tokens": 4,
    "row_bytes": 8,
}
INTERLEAVE: dict[str, Any] = {
    "src": torch.zeros(128, dtype=torch.uint8),
    "src_offset": 0,
    "src_rank_stride": 64,
    "out": torch.zeros(128, dtype=torch.uint8),
    "out_offset": 0,
    "ranks": 2,
    "tokens": 8,
    "row_bytes": 8,
}
SUM_32: dict[str, Any] = {
    "caches": [torch.zeros(4, 64, dtype=torch.uint8)],
    "unit_offsets": [torch.tensor([0, 192])],
    "entry_weights": [torch.zeros(2, 4, 2, dtype=torch.int32)],
    "place_weights": [torch.zeros(2, 2, 8, dtype=torch.int32)],
    "heads": [2],
    "words": [2],
    "out": torch.zeros(8, dtype=torch.int32),
}
SUM: dict[str, Any] = {
    "caches": [torch.zeros(4, 64, dtype=torch.uint8)],
    "unit_offsets": [torch.tensor([0, 192])],
    "entry_weights": [torch.zeros(2, 4, dtype=torch.int64)],
    "place_weights": [torch.zeros(2, dtype=torch.int64)],
    "heads": [2],
    "word_bytes": [4],
    "out": torch.zeros(4, dtype=torch.int64),
}


GIB = 1 << 30
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def raw_view(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A cache cut out of a raw allocation behind its first 64 bytes, as vllm-ascend aligns its caches."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return random_tensor((64 + size + 32,))[64 : 64 + size].view(dtype).view(shape)


# [num_blocks, block_size, heads, head_size] caches as they lie in memory.
CACHES: dict[str, Callable[[tuple[int, ...], torch.dtype], torch.Tensor]] = {
    "own tensor": random_tensor,
    "V of [2, num_blocks, ...]": lambda shape, dtype: random_tensor((2, *shape), dtype)[1],
    "K of [num_blocks, 2, ...]": lambda shape, dtype: random_tensor((shape[0], 2, *shape[1:]), dtype)[:, 0],
    "V of [num_blocks, 2, ...]": lambda shape, dtype: random_tensor((shape[0], 2, *shape[1:]), dtype)[:, 1],
    "raw allocation": raw_view,
}


@dataclass(frozen=True)
class Paged:
    """Some units of a layer's paged caches, and how the results lie in the output."""

    caches: list[torch.Tensor]
    unit_offsets: torch.Tensor
    units: torch.Tensor  # their bytes, [num_caches, num_units, tokens, heads, head bytes]
    splits: int
    out_offset: int
    gap: int  # bytes between sections of the output
    cache_major: bool  # the splits of a cache one after another, or the caches of a split

    def output(self, sections: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int]]:
        """An output buffer, the same with `sections` [caches, splits, ...] where the op should write them, and
        out_offset, out_cache_stride and out_section_stride."""
        num_caches, splits = sections.shape[:2]
        size = sections[0, 0].numel()
        inner = size + self.gap
        outer = inner * (splits if self.cache_major else num_caches) + self.gap
        strides = (outer, inner) if self.cache_major else (inner, outer)
        out = random_tensor((self.out_offset + num_caches * splits * (inner + self.gap) + 5,))
        expected = out.clone()
        window = expected.as_strided((num_caches, splits, size), (*strides, 1), self.out_offset)
        window.copy_(sections.flatten(2))
        return out, expected, (self.out_offset, *strides)


@st.composite
def paged(draw: st.DrawFn) -> Paged:
    splits = draw(st.sampled_from([1, 2, 3, 4, 8]))
    parts, num_blocks = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    tokens, heads = splits * draw(st.integers(1, 4)), splits * draw(st.integers(1, 3))
    # Rows of all sorts: odd, one vector, several; 32 and 256 bytes and what lies between take paths of their own.
    head_size = draw(st.sampled_from([1, 3, 16, 24, 32, 64, 128]))
    dtype, make = draw(st.sampled_from(DTYPES)), CACHES[draw(st.sampled_from(sorted(CACHES)))]
    caches = [make((num_blocks, parts * tokens, heads, head_size), dtype) for _ in range(draw(st.integers(1, 3)))]

    ids = torch.tensor(draw(st.lists(st.integers(0, num_blocks * parts - 1), max_size=8)), dtype=torch.int64)
    block, part = ids // parts, ids % parts
    in_bytes = [cache.view(torch.uint8) for cache in caches]
    offsets = block * in_bytes[0].stride(0) + part * tokens * in_bytes[0].stride(1)
    units = torch.stack([cache.unflatten(1, (parts, tokens))[block, part] for cache in in_bytes])
    offset, gap = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    return Paged(caches, offsets, units, splits, offset, gap, draw(st.booleans()))


@IMPLEMENTATIONS
@settings(max_examples=50)
@given(case=paged(), section_units=st.integers(1, 9))
def test_gather_units(impl: ModuleType, case: Paged, section_units: int) -> None:
    units = case.units.flatten(2)
    count, unit_bytes = units.shape[1:]
    sections = max(1, -(-count // section_units))
    section_units = min(section_units, max(count, 1))
    padded = torch.zeros(len(units), sections * section_units, unit_bytes, dtype=torch.uint8)
    padded[:, :count] = units
    out, expected, layout = case.output(padded.unflatten(1, (sections, section_units)))
    # What the last section has room for beyond the units is not written.
    offset, cache_stride, section_stride = layout
    for cache in range(len(units)):
        for n in range(count, sections * section_units):
            at = offset + cache * cache_stride + n // section_units * section_stride + n % section_units * unit_bytes
            expected[at : at + unit_bytes] = out[at : at + unit_bytes]
    impl.gather_units(case.caches, case.unit_offsets, max(unit_bytes, 1), section_units, out, *layout)
    assert torch.equal(out, expected)


@IMPLEMENTATIONS
@settings(max_examples=50)
@given(case=paged())
def test_split_heads(impl: ModuleType, case: Paged) -> None:
    groups = case.units.unflatten(3, (case.splits, -1)).permute(0, 3, 1, 2, 4, 5)
    out, expected, layout = case.output(groups)
    tokens, row_bytes = groups.shape[3], groups.shape[4] * groups.shape[5]
    impl.split_heads(case.caches, case.unit_offsets, case.splits, tokens, row_bytes, out, *layout)
    assert torch.equal(out, expected)


@st.composite
def units_of_words(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks of whole units, where units begin, words `[units, entries, heads, words]`, and the entries' weights."""
    dtype, heads = draw(st.sampled_from([torch.int32, torch.int16, torch.uint8])), draw(st.integers(1, 4))
    entries, words, parts = draw(st.integers(1, 9)), draw(st.integers(1, 70)), draw(st.integers(1, 3))
    blocks = random_tensor((draw(st.integers(1, 5)), parts, entries, heads, words), dtype)
    ids = torch.tensor(draw(st.lists(st.integers(0, len(blocks) * parts - 1), max_size=6)), dtype=torch.int64)
    unit = entries * heads * words * dtype.itemsize
    return blocks.flatten(1), ids * unit, blocks.flatten(0, 1)[ids], random_tensor((len(ids), entries), torch.int64)


@IMPLEMENTATIONS
@given(cases=st.lists(units_of_words(), max_size=4))
def test_sum_units(impl: ModuleType, cases: list[tuple[torch.Tensor, ...]]) -> None:
    """Caches of several forms in one call. Torch counts modulo 2^64, too."""
    places = [random_tensor((words.shape[3],), torch.int64) for _, _, words, _ in cases]
    expected = [torch.tensor([], dtype=torch.int64)]
    for (_, _, words, weights), of in zip(cases, places, strict=True):
        expected.append(((words.long() * of).sum(-1) * weights[:, :, None]).sum(1).flatten())
    caches, offsets, every, weights = zip(*cases, strict=True) if cases else ((),) * 4
    out = torch.full((sum(map(len, expected)) + 1,), 5)
    sizes = [words.itemsize for words in every]
    impl.sum_units(caches, offsets, weights, places, [words.shape[2] for words in every], sizes, out)
    assert torch.equal(out, torch.cat([*expected, torch.tensor([5])]))


@st.composite
def units_of_halves(draw: st.DrawFn) -> tuple[torch.Tensor, ...]:
    """As `units_of_words`, of words of 4 bytes, and the places' weights."""
    entries, heads, words = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 70))
    blocks = random_tensor((draw(st.integers(1, 5)), entries, heads, words), torch.int32)
    ids = torch.tensor(draw(st.lists(st.integers(0, len(blocks) - 1), max_size=6)), dtype=torch.int64)
    places = torch.zeros(2, 2, -(-words // 8) * 8, dtype=torch.int32)
    places[:, :, :words] = random_tensor((2, 2, words), torch.int32)
    weights = random_tensor((len(ids), entries, 2), torch.int32)
    return blocks.flatten(1), ids * 4 * entries * heads * words, blocks[ids], weights, places


@IMPLEMENTATIONS
@given(cases=st.lists(units_of_halves(), max_size=4))
def test_sum_units_32(impl: ModuleType, cases: list[tuple[torch.Tensor, ...]]) -> None:
    expected = [torch.tensor([], dtype=torch.int64)]
    for _, _, units, weights, places in cases:
        words = units.shape[3]
        halves = torch.stack((units.long() & 0xFFFF, (units.long() >> 16) & 0xFFFF), 3)
        by_entry = torch.einsum("nehiw,kiw->nehk", halves, places[:, :, :words].long())
        expected.append((by_entry * weights.long()[:, :, None]).sum(1).flatten())
    low = torch.cat(expected) & 0xFFFFFFFF
    wanted = torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)
    caches, offsets, every, weights, places = zip(*cases, strict=True) if cases else ((),) * 5
    out = torch.full((len(wanted) + 1,), 5, dtype=torch.int32)
    heads, words = [units.shape[2] for units in every], [units.shape[3] for units in every]
    impl.sum_units_32(caches, offsets, weights, places, heads, words, out)
    assert torch.equal(out, torch.cat([wanted, torch.tensor([5], dtype=torch.int32)]))


SMALL = st.integers(0, 9)


@IMPLEMENTATIONS
@given(
    dtype=st.sampled_from(DTYPES),
    ranks=st.integers(1, 8),
    tokens=SMALL,
    row=st.integers(1, 70),
    offset=SMALL,
    gap=SMALL,
)
def test_interleave_heads(
    impl: ModuleType, dtype: torch.dtype, ranks: int, tokens: int, row: int, offset: int, gap: int
) -> None:
    src = random_tensor((offset + ranks * (tokens * row + gap),), dtype)
    sections = src.as_strided((ranks, tokens, row), (tokens * row + gap, row, 1), offset)
    out = random_tensor((offset + ranks * tokens * row + 5,), dtype)
    expected = out.clone()
    expected[offset:-5] = sections.transpose(0, 1).flatten()
    size = dtype.itemsize
    stride = (tokens * row + gap) * size
    impl.interleave_heads(src, offset * size, stride, out, offset * size, ranks, tokens, row * size)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_offsets_past_4_gib() -> None:
    """The buffers are never touched outside of a few pages, so they cost address space, not memory."""
    far, row = 4 * GIB + 4096, 64
    big, other = (torch.empty(far + 4096, dtype=torch.uint8) for _ in range(2))
    small = torch.zeros(2 * row, dtype=torch.uint8)
    near_row, far_row = random_tensor((2, row))
    big[:row], big[far : far + row] = near_row, far_row

    ops.gather_units([big], torch.tensor([far, 0]), row, 2, small, 0, 0, 0)
    assert torch.equal(small, torch.cat([far_row, near_row]))
    ops.gather_units([small], torch.tensor([0, row]), row, 1, other, 0, 0, far)
    assert torch.equal(other[far : far + row], near_row)
    ops.split_heads([small], torch.tensor([0]), 1, 2, row, other, far, 0, 0)
    assert torch.equal(other[far : far + 2 * row], small)
    ops.interleave_heads(big, 0, far, small, 0, 2, 1, row)
    assert torch.equal(small, torch.cat([near_row, far_row]))


def ticks_during(call: Callable[[], object]) -> int:
    """How often another Python thread ran during a call that gives up the GIL only if it means to."""
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is forced to hand over the GIL
    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        start = time.perf_counter()
        call()
        end = time.perf_counter()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        ticker.join()
    return sum(start < at < end for at in ticks)


def test_ops_release_the_gil() -> None:
    """The connector runs them on a side thread while the model computes."""
    size = 256 << 20
    src, out = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
    holding_it = ctypes.PyDLL(None).memmove
    holding_it.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    assert ticks_during(lambda: holding_it(out.data_ptr(), src.data_ptr(), size)) == 0
    offsets, half = torch.tensor([0]), size // 2
    halves = torch.tensor([0, half])
    assert ticks_during(lambda: ops.gather_units([src], halves, half, 1, out, 0, 0, half)) > 0
    assert ticks_during(lambda: ops.split_heads([src], offsets, 2, 1, half, out, 0, 0, half)) > 0
    assert ticks_during(lambda: ops.interleave_heads(src, 0, half, out, 0, 2, half // 256, 256)) > 0


# --- arguments -------------------------------------------------------------------------------------------------------


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
        ("sum_units_32", SUM_32, bad, message)
        for bad, message in [
            ({"heads": [0]}, "heads is 0, must be at least 1"),
            ({"heads": []}, "there are 1 caches and 0 of an argument that has one for each"),
            ({"words": [0]}, "words is 0, must be at least 1"),
            ({"words": [9]}, "a unit's size is 288, must be at most 256"),
            ({"place_weights": [torch.zeros(2, 2, 2, dtype=torch.int32)]}, "place_weights is of Int and shape"),
            ({"place_weights": [torch.zeros(2, 2, 8)]}, "place_weights is of Float"),
            ({"entry_weights": [torch.zeros(2, 0, 2, dtype=torch.int32)]}, "entries is 0, must be at least 1"),
            ({"entry_weights": [torch.zeros(3, 4, 2, dtype=torch.int32)]}, "entry_weights is of Int and shape"),
            ({"unit_offsets": [torch.tensor([0, 193])]}, r"unit_offsets\[1\] is 193, must be at most 192 "),
            ({"out": torch.zeros(7, dtype=torch.int32)}, "the number of checksums is 8, must be at most 7"),
            ({"out": torch.zeros(8)}, "out is of Float"),
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
    [
        ("gather_units", GATHER),
        ("split_heads", SPLIT),
        ("interleave_heads", INTERLEAVE),
        ("sum_units", SUM),
        ("sum_units_32", SUM_32),
    ],
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
