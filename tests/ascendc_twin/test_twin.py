# SPDX-License-Identifier: Apache-2.0
"""The NPU's kernels, unmodified, on the CPU twin of AscendC in this folder, each against a line of numpy.

What passes here has copied the right bytes and kept the rules that the twin knows (see kernel_operator.h). It
says nothing about speed, or about rules of the hardware that the twin does not know.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "csrc" / "block_ops" / "npu"
KIB = 1024

Bytes = np.ndarray  # of uint8

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler")

# Three ops of these many random cases each, and two forms of checksums of half as many.
many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
half_as_many = settings(many, max_examples=100)


def build(source: str, target: Path, *flags: str) -> Path:
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    # The twin's kernel_operator.h comes first; CANN's, if there is one, is not asked for.
    command += ["-DVLLM_ASCEND_PD_ASC", f"-I{HERE}", f"-I{KERNELS}", str(HERE / source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@dataclass(frozen=True)
class Chip:
    cores: int
    unified_buffer: int


A2 = Chip(cores=40, unified_buffer=192 * KIB)
A3 = Chip(cores=48, unified_buffer=192 * KIB)
ONE_CORE = Chip(cores=1, unified_buffer=192 * KIB)
SMALL_BUFFER = Chip(cores=3, unified_buffer=20 * KIB)


@dataclass(frozen=True)
class SummedUnits:
    """Units of one cache whose checksums are taken: `[entries, heads, words]` each."""

    cache: Bytes
    offsets: np.ndarray  # [units]
    weights: np.ndarray  # [units, entries]
    places: np.ndarray  # [words]
    heads: int
    word_bytes: int


class Twin:
    """The kernels on the twin. Raises what the twin finds; returns how many launches it took."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for function in (
            self._library.twin_split,
            self._library.twin_interleave,
            self._library.twin_sum,
            self._library.twin_sum32,
            self._library.twin_fault,
        ):
            function.restype = ctypes.c_char_p

    def split(
        self,
        chip: Chip,
        caches: list[Bytes],
        unit_offsets: np.ndarray,
        splits: int,
        tokens: int,
        row: int,
        out: Bytes,
        out_offset: int,
        out_cache_stride: int,
        out_section_stride: int,
        section_units: int = 0,
    ) -> int:
        """`section_units`: 0 for all units."""
        addresses = (ctypes.c_void_p * len(caches))(*[cache.ctypes.data for cache in caches])
        sizes = (ctypes.c_int64 * len(caches))(*[cache.size for cache in caches])
        return self._launches(
            self._library.twin_split,
            *(chip.cores, chip.unified_buffer, len(caches), addresses, sizes, unit_offsets, len(unit_offsets)),
            *(section_units or len(unit_offsets), splits, tokens, row),
            *(out, out.size, out_offset, out_cache_stride, out_section_stride),
        )

    def interleave(
        self,
        chip: Chip,
        src: Bytes,
        src_offset: int,
        src_rank_stride: int,
        ranks: int,
        tokens: int,
        row: int,
        out: Bytes,
        out_offset: int,
    ) -> int:
        return self._launches(
            self._library.twin_interleave,
            *(chip.cores, chip.unified_buffer, src, src.size, src_offset, src_rank_stride),
            *(ranks, tokens, row, out, out.size, out_offset),
        )

    def sum(self, chip: Chip, units: list[SummedUnits], out: np.ndarray) -> int:
        def addresses(arrays: list[np.ndarray]) -> object:
            return (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])

        shapes = np.array([(*of.weights.shape, of.heads, len(of.places), of.word_bytes) for of in units])
        return self._launches(
            self._library.twin_sum,
            *(chip.cores, chip.unified_buffer, len(units), addresses([of.cache for of in units])),
            (ctypes.c_int64 * len(units))(*[of.cache.size for of in units]),
            *(addresses([getattr(of, name) for of in units]) for name in ("offsets", "weights", "places")),
            *(shapes, out),
        )

    def sum32(self, chip: Chip, units: list[SummedUnits], out: np.ndarray) -> int:
        """`weights` of the units are `[units, entries, 2]` and `places` `[2, 2, padded words]`, of int32."""

        def addresses(arrays: list[np.ndarray]) -> object:
            return (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])

        shapes = np.array([(*of.weights.shape[:2], of.heads, of.word_bytes) for of in units])
        return self._launches(
            self._library.twin_sum32,
            *(chip.cores, chip.unified_buffer, len(units), addresses([of.cache for of in units])),
            (ctypes.c_int64 * len(units))(*[of.cache.size for of in units]),
            *(addresses([getattr(of, name) for of in units]) for name in ("offsets", "weights", "places")),
            *(shapes, out),
        )

    def take_counts(self) -> dict[str, int]:
        """Returns what the kernels have done since the last call."""
        counts = (ctypes.c_int64 * 3)()
        self._library.twin_take_counts(counts)
        return dict(zip(("scalar accesses", "vector instructions", "vector repeats"), counts, strict=True))

    def fault(self, name: str) -> None:
        self._call(self._library.twin_fault, name.encode())

    def _launches(self, function: Callable[..., bytes | None], *args: object) -> int:
        launches = ctypes.c_int64()
        self._call(function, *args, ctypes.byref(launches))
        return launches.value

    def _call(self, function: Callable[..., bytes | None], *args: object) -> None:
        error = function(*[self._argument(arg) for arg in args])
        if error is not None:
            raise RuntimeError(error.decode())

    @staticmethod
    def _argument(arg: object) -> object:
        if isinstance(arg, np.ndarray):
            return ctypes.c_void_p(arg.ctypes.data)
        return ctypes.c_int64(arg) if isinstance(arg, int) else arg


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(build("library.cpp", tmp_path_factory.mktemp("twin") / "libtwin.so", "-shared", "-fPIC"))


def random_bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(256, size=size, dtype=np.uint8)


chips = st.sampled_from([A2, A3, ONE_CORE, SMALL_BUFFER])
parts = st.sampled_from([1, 2, 3, 4, 8])  # splits or ranks
gaps = st.integers(0, 9)
# Multiples of 32 bytes and others, some longer than a tile.
rows = st.sampled_from([1, 7, 32, 33, 96, 256, 1000, 1024, 2048, 4096, 8224, 65536, 70001, 131072])


# Chip, caches, unit offsets, splits, tokens and row bytes.
PagedCase = tuple[Chip, list[Bytes], np.ndarray, int, int, int]


@st.composite
def paged_case(draw: st.DrawFn, max_tokens: int) -> PagedCase:
    """Some 3 MiB at most."""
    splits, row = draw(parts), draw(rows)
    tokens = draw(st.integers(1, max(1, min(max_tokens, 2**18 // (splits * row)))))
    unit = splits * tokens * row
    num_caches = draw(st.integers(1, 3 if unit > KIB else 20))
    caches = [random_bytes(3 * unit + draw(gaps), seed) for seed in range(num_caches)]
    offsets = draw(st.lists(st.integers(0, 2 * unit), min_size=1, max_size=6))
    return draw(chips), caches, np.array(offsets, dtype=np.int64), splits, tokens, row


def check_split(
    twin: Twin,
    case: PagedCase,
    sections: np.ndarray,
    begin: int,
    gap: int,
    cache_major: bool,
) -> None:
    """`sections`: the expected [caches, splits, section bytes]."""
    chip, caches, offsets, splits, tokens, row = case
    num_caches, _, section = sections.shape
    inner = section + gap
    outer = inner * (splits if cache_major else num_caches) + gap
    cache_stride, split_stride = (outer, inner) if cache_major else (inner, outer)
    out = random_bytes(begin + num_caches * splits * (inner + gap) + 5)
    expected = out.copy()
    window = np.lib.stride_tricks.as_strided(expected[begin:], sections.shape, (cache_stride, split_stride, 1))
    window[:] = sections
    launches = twin.split(chip, caches, offsets, splits, tokens, row, out, begin, cache_stride, split_stride)
    assert np.array_equal(out, expected)
    assert launches == -(-num_caches // 8)


@many
@given(case=paged_case(max_tokens=1), share=st.integers(1, 6), begin=gaps, gap=gaps, cache_major=st.booleans())
def test_gather_units(twin: Twin, case: PagedCase, share: int, begin: int, gap: int, cache_major: bool) -> None:
    chip, caches, offsets, splits, _, row = case
    unit, share = splits * row, min(share, len(offsets))
    sections = -(-len(offsets) // share)
    inner = share * unit + gap
    outer = inner * (sections if cache_major else len(caches)) + gap
    cache_stride, section_stride = (outer, inner) if cache_major else (inner, outer)
    out = random_bytes(begin + len(caches) * sections * (inner + gap) + outer)
    expected = out.copy()
    for c, cache in enumerate(caches):
        for n, at in enumerate(offsets):
            to = begin + c * cache_stride + n // share * section_stride + n % share * unit
            expected[to : to + unit] = cache[at:][:unit]
    launches = twin.split(chip, caches, offsets, 1, 1, unit, out, begin, cache_stride, section_stride, share)
    assert np.array_equal(out, expected)
    assert launches == -(-len(caches) // 8)


@many
@given(case=paged_case(max_tokens=130), begin=gaps, gap=gaps, cache_major=st.booleans())
def test_split_heads(twin: Twin, case: PagedCase, begin: int, gap: int, cache_major: bool) -> None:
    _, caches, offsets, splits, tokens, row = case
    units = np.stack([[cache[at:][: splits * tokens * row] for at in offsets] for cache in caches])
    groups = units.reshape(len(caches), len(offsets), tokens, splits, row).transpose(0, 3, 1, 2, 4)
    check_split(twin, case, groups.reshape(len(caches), splits, -1), begin, gap, cache_major)


@many
@given(chip=chips, ranks=parts, row=rows, data=st.data(), begin=gaps, gap=gaps)
def test_interleave_heads(
    twin: Twin, chip: Chip, ranks: int, row: int, data: st.DataObject, begin: int, gap: int
) -> None:
    tokens = data.draw(st.integers(1, max(1, min(5000, 2**20 // (ranks * row)))))
    stride = tokens * row + gap
    src = random_bytes(begin + ranks * stride)
    sections = np.lib.stride_tricks.as_strided(src[begin:], (tokens, ranks, row), (row, stride, 1))
    out = random_bytes(begin + sections.size + 5, seed=1)
    expected = out.copy()
    expected[begin : begin + sections.size] = sections.reshape(-1)
    assert twin.interleave(chip, src, begin, stride, ranks, tokens, row, out, begin) == 1
    assert np.array_equal(out, expected)


@st.composite
def summed_units(draw: st.DrawFn) -> SummedUnits:
    """Some 128 KiB at most: rows of some bytes, and now and then some that are longer than a tile."""
    word_bytes, is_long = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 7)) == 7
    words = draw(st.integers(32 * KIB // word_bytes - 3, 33 * KIB // word_bytes) if is_long else st.integers(1, 100))
    entries, heads = draw(st.integers(1, 2 if is_long else 30)), draw(st.integers(1, 2 if is_long else 4))
    unit, units = entries * heads * words * word_bytes, draw(st.integers(1, 3))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights, places = (numbers.integers(-(2**63), 2**63, size) for size in ((units, entries), words))
    offsets = numbers.integers(0, unit, units, endpoint=True)
    return SummedUnits(random_bytes(2 * unit + draw(gaps), 3), offsets, weights, places, heads, word_bytes)


@half_as_many
@given(
    chip=chips,
    units=st.one_of(st.lists(summed_units(), min_size=1, max_size=3), st.lists(summed_units(), min_size=9, max_size=9)),
)
def test_sum_units(twin: Twin, chip: Chip, units: list[SummedUnits]) -> None:
    expected = []
    for of in units:
        shape = (of.weights.shape[1], of.heads, len(of.places))
        for offset, weights in zip(of.offsets, of.weights, strict=True):
            content = of.cache[offset:][: np.prod(shape) * of.word_bytes].tobytes()
            words = np.frombuffer(content, {1: "u1", 2: "<i2", 4: "<i4"}[of.word_bytes]).astype(np.int64)
            expected.append(((words.reshape(shape) * of.places).sum(-1) * weights[:, None]).sum(0))
    out = np.full(sum(map(len, expected)) + 1, -1)
    assert twin.sum(chip, units, out) == -(-len(units) // 8)
    assert np.array_equal(out, [*np.concatenate(expected), -1])


@st.composite
def units_of_words(draw: st.DrawFn) -> SummedUnits:
    """As `summed_units`, of words of 4 bytes: `word_bytes` is the number of words. Some are longer than a piece."""
    is_long = draw(st.integers(0, 7)) == 7
    words = draw(st.integers(2000, 4500) if is_long else st.integers(1, 100))
    entries, heads = draw(st.integers(1, 3 if is_long else 30)), draw(st.integers(1, 2 if is_long else 4))
    unit, units = 4 * entries * heads * words, draw(st.integers(1, 3))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = numbers.integers(-(2**31), 2**31, (units, entries, 2), dtype=np.int32)
    places = numbers.integers(-(2**31), 2**31, (2, 2, -(-words // 8) * 8), dtype=np.int32)
    places[:, :, words:] = 0
    offsets = numbers.integers(0, unit, units, endpoint=True)
    return SummedUnits(random_bytes(2 * unit + draw(gaps), 3), offsets, weights, places, heads, words)


def sums_of_32_bits(of: SummedUnits) -> np.ndarray:
    """Returns `[units, heads, 2]`."""
    entries, words, sums = of.weights.shape[1], of.word_bytes, []
    for offset, weights in zip(of.offsets, of.weights, strict=True):
        content = of.cache[offset:][: 4 * entries * of.heads * words].tobytes()
        halves = np.frombuffer(content, "<u2").reshape(entries, of.heads, words, 2).astype(np.int64)
        by_row = np.einsum("ehwi,kiw->ehk", halves, of.places[:, :, :words].astype(np.int64))
        sums.append((by_row * weights[:, None]).sum(0))
    return np.array(sums).astype(np.int32)


@half_as_many
@given(
    chip=chips,
    units=st.one_of(
        st.lists(units_of_words(), min_size=1, max_size=3), st.lists(units_of_words(), min_size=9, max_size=9)
    ),
)
def test_sum_units_32(twin: Twin, chip: Chip, units: list[SummedUnits]) -> None:
    expected = np.concatenate([sums_of_32_bits(of).reshape(-1) for of in units])
    out = np.full(len(expected) + 1, -1, dtype=np.int32)
    assert twin.sum32(chip, units, out) == -(-len(units) // 8)
    assert np.array_equal(out, [*expected, -1])


@pytest.mark.parametrize(
    ("kind", "rows"), [("MLA", [(1, 256), (1, 32)]), ("GQA", [(2, 64), (2, 64)]), ("one head", [(1, 64), (1, 64)])]
)
def test_the_vector_unit_does_the_work_of_32_bit_sums(twin: Twin, kind: str, rows: list[tuple[int, int]]) -> None:
    """4,096 tokens in blocks of 128. `rows`: heads and words of the layer's tensors. Per MB, beside the 64-bit sums."""
    counts = {}
    for bits in (64, 32):
        units = []
        for heads, words in rows:
            numbers, blocks = np.random.default_rng(0), 32
            cache, offsets = random_bytes(blocks * 128 * heads * words * 4), np.arange(blocks) * 128 * heads * words * 4
            if bits == 64:
                weights, places = (numbers.integers(2**63, size=size) for size in ((blocks, 128), words))
                units.append(SummedUnits(cache, offsets, weights, places, heads, 4))
            else:
                weights = numbers.integers(2**31, size=(blocks, 128, 2), dtype=np.int32)
                places = numbers.integers(2**31, size=(2, 2, words), dtype=np.int32)
                units.append(SummedUnits(cache, offsets, weights, places, heads, words))
        twin.take_counts()
        out = np.zeros(sum(2 * len(of.offsets) * of.heads for of in units), dtype=np.int64)
        (twin.sum if bits == 64 else twin.sum32)(A2, units, out)
        megabytes = sum(of.cache.size for of in units) / 2**20
        counts[bits] = {name: round(count / megabytes) for name, count in twin.take_counts().items()}
    print(kind, counts)
    assert counts[32]["scalar accesses"] * 20 <= counts[64]["scalar accesses"]
    assert counts[64]["vector instructions"] == 0
    assert counts[32]["vector repeats"] < 100_000


@dataclass(frozen=True)
class Regroup:
    """Prefill TP to decode TP, `ratio` to 1, in vllm-ascend's shapes; heads are one prefill rank's."""

    ratio: int
    heads: int
    num_ids: int


TP2_TO_TP1 = Regroup(ratio=2, heads=4, num_ids=11)
TP4_TO_TP1 = Regroup(ratio=4, heads=2, num_ids=5)
TP8_TO_TP1 = Regroup(ratio=8, heads=1, num_ids=3)


@pytest.mark.parametrize("cfg", [TP2_TO_TP1, TP4_TO_TP1, TP8_TO_TP1], ids=lambda cfg: f"TP{cfg.ratio}_TO_TP1")
def test_a_layer_is_one_gather_one_all_to_all_and_one_interleave(twin: Twin, cfg: Regroup) -> None:
    """K and V of every rank, [num_blocks, 128 tokens, heads, 256 bytes], become decode's blocks."""
    r, num_blocks, row = cfg.ratio, 16, cfg.heads * 256
    caches = [[random_bytes(num_blocks * 128 * row, 2 * rank + i) for i in range(2)] for rank in range(r)]
    ids = np.random.default_rng(0).permutation(num_blocks)[: cfg.num_ids]
    unit, share = 128 * row, -(-cfg.num_ids // r)
    section = share * unit

    sends = [np.zeros((r, 2, share, 128, row), dtype=np.uint8) for _ in range(r)]
    for kv, send in zip(caches, sends, strict=True):
        offsets = ids.astype(np.int64) * unit
        assert twin.split(A2, kv, offsets, 1, 1, unit, send, 0, section, 2 * section, share) == 1
    received = [np.stack([send[rank] for send in sends]) for rank in range(r)]
    staged = [np.empty((2, share, 128, r, row), dtype=np.uint8) for _ in range(r)]
    for src, out in zip(received, staged, strict=True):
        assert twin.interleave(A2, src, 0, 2 * section, r, 2 * share * 128, row, out, 0) == 1

    decode = np.concatenate(staged, axis=1)[:, : cfg.num_ids]
    for i in range(2):
        blocks = [kv[i].reshape(num_blocks, 128, row)[ids] for kv in caches]
        assert np.array_equal(decode[i], np.stack(blocks, axis=2))


def test_unit_offsets_outside_of_the_cache_are_out_of_bounds(twin: Twin) -> None:
    cache, out = random_bytes(256), np.empty(64, dtype=np.uint8)
    for offset in (-1, 193, 2**40, -(2**63)):
        with pytest.raises(RuntimeError, match="global memory: elements"):
            twin.split(A2, [cache], np.array([offset], dtype=np.int64), 1, 1, 64, out, 0, 0, 0)


def test_offsets_past_4_gib(twin: Twin) -> None:
    """Of the buffers only a few pages are touched: they cost address space, not memory."""
    far, row = 4 * KIB**3 + 4096, 64
    big, other = np.empty(far + 4096, dtype=np.uint8), np.empty(far + 4096, dtype=np.uint8)
    small = np.empty(2 * row, dtype=np.uint8)
    near_row, far_row = random_bytes(row, 1), random_bytes(row, 2)
    big[:row], big[far : far + row] = near_row, far_row

    twin.split(A2, [big], np.array([far, 0], dtype=np.int64), 1, 1, row, small, 0, 0, 0, 2)
    assert np.array_equal(small, np.concatenate([far_row, near_row]))
    twin.split(A2, [small], np.array([0], dtype=np.int64), 2, 1, row, other, 0, 0, far)
    assert np.array_equal(other[far : far + row], near_row)
    twin.interleave(A2, big, 0, far, 2, 1, row, small, 0)
    assert np.array_equal(small, np.concatenate([near_row, far_row]))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("read past the end", r"global memory: elements \[1000, \+25\) of 1024"),
        ("read before the start", r"global memory: elements \[-1, "),
        ("write past the end", "global memory"),
        ("second block past the end", "global memory"),
        ("value past the end", "global memory"),
        ("tile too long", "tile: bytes"),
        ("padded blocks past the tile", "tile: bytes"),
        ("unaligned tile", "not aligned to 32 bytes"),
        ("no blocks", "blockCount"),
        ("too many blocks", "blockCount"),
        ("no bytes", "blockLen"),
        ("too many bytes", "blockLen"),
        ("tile gap too long", "gap in the unified buffer"),
        ("unified buffer used up", "more than the unified buffer has"),
        ("alloc without free", "all buffers are in use"),
        ("dequeue of nothing", "the queue is empty"),
        ("enqueued twice", "EnQue: not allocated"),
        ("enqueued in part", "not a tensor that AllocTensor"),
        ("freed before dequeued", "FreeTensor: not dequeued"),
        ("read after enqueued", "reads into a tensor that is not allocated"),
        ("written before dequeued", "writes from a tensor that is not dequeued"),
        ("written after freed", "writes from a tensor that is not dequeued"),
        ("never freed", "a tensor was not freed"),
        ("scalar unit before reading has ended", "before another pipe is done"),
        ("writing before the scalar unit is done", "before another pipe is done"),
        ("scalar unit before writing has ended", "before another pipe is done"),
        ("reading before the scalar unit is done", "before another pipe is done"),
        ("waits for no flag", "nothing sets it"),
        ("value past the tile", "tile: bytes"),
        ("read into VECCALC", "reads into VECCALC"),
        ("written from VECCALC", "writes from VECCALC"),
    ],
)
def test_the_twin_finds(twin: Twin, fault: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        twin.fault(fault)


def test_a_kernel_without_its_type_does_not_compile(tmp_path: Path) -> None:
    """asc-devkit does not find out by itself which cores the scalar kernel is for."""
    kernel = 'extern "C" __global__ {}__aicore__ void kernel(GM_ADDR) {{}}\n'
    for vector, compiles in (("__vector__ ", True), ("", False)):
        source = tmp_path / "kernel.cpp"
        source.write_text('#include "kernel_operator.h"\n' + kernel.format(vector))
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-fsyntax-only", f"-I{HERE}", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is compiles, done.stderr


def test_the_twin_finds_nothing_in_a_right_kernel(twin: Twin) -> None:
    twin.fault("none")
    twin.fault("no missing flag")


SANITIZERS = {"address and undefined": "address,undefined", "thread": "thread"}


def run(program: Path, argument: str) -> subprocess.CompletedProcess[str]:
    # vLLM's CPU backend, which other tests import, sets LD_PRELOAD; a sanitizer must be loaded first.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([program, argument], capture_output=True, text=True, check=False, env=environment)
    if "unexpected memory mapping" in done.stderr:  # older ThreadSanitizers and newer kernels' random addresses
        command = ["setarch", "-R", program, argument]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done


@pytest.mark.parametrize("sanitizer", SANITIZERS.values(), ids=SANITIZERS.keys())
def test_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    flags = ("-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    program = build("random_cases.cpp", tmp_path / "random_cases", *flags)
    done = run(program, "100")
    assert done.returncode == 0, done.stdout + done.stderr
    if sanitizer == "thread":
        assert "data race" in run(program, "race").stderr
