# SPDX-License-Identifier: Apache-2.0
"""Children of the doctor that run on NPUs.

`kernels`: compares the block ops on NPU 0 with the CPU, times each beside a copy of the same bytes, and asks what int32
`Mul` keeps of a product.
`rank RANK SIZE STORE`: runs a model's all-reduce with the connector's all-to-all beside it. STORE is a new file by
which the ranks find each other.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401 - makes torch.npu

from vllm_ascend_pd.device import ops
from vllm_ascend_pd.device.base import Group
from vllm_ascend_pd.device.event import Event
from vllm_ascend_pd.device.npu import NpuDevice
from vllm_ascend_pd.tools.doctor.hardware import MODE, STAGES, WITHOUT_KERNELS, stage_failed
from vllm_ascend_pd.tools.doctor.report import Finding, Level, error, ok

BLOCKS, UNITS, TOKENS = 64, 32, 128
CACHES, SPLITS = 2, 2
ROWS = (2048, 1152, 40)
"""Bytes of a token in a rank's cache: 8 heads of 128 in bfloat16, MLA, and a size that is not a multiple of 32."""

OPS = ("gather_units", "split_heads", "interleave_heads", "sum_units", "sum_units_32")
_MEASURED_S = 0.2  # each op runs for at least this long


def try_kernels() -> Iterator[Finding]:
    yield (found := compare_kernels())
    if found.level is Level.OK:
        yield from (time_op(op) for op in OPS)
    yield multiply()


def compare_kernels() -> Finding:
    torch.npu.set_device(0)
    check, chance = "hardware.kernels", random.Random(0)
    for row in ROWS:
        unit = TOKENS * row
        caches, offsets = _units(chance, unit)
        for op in OPS:
            wanted = _room(op, unit)
            _call(op, caches, offsets, wanted, row)
            on_npu, places, got = [cache.npu() for cache in caches], offsets.npu(), torch.zeros_like(wanted).npu()
            _call(op, on_npu, places, got, row)
            if wrong := int(got.cpu().ne(wanted).sum()):
                found = f"{wrong} of {wanted.numel()} numbers of {op} with rows of {row} bytes differ from the CPU's"
                return error(check, found, WITHOUT_KERNELS, op=op, row_bytes=row)
    compiled = not ops.npu_kernels.reason  # loading.kernels says what to do where they are not
    used = "compiled kernels" if compiled else "torch's operators"
    return ok(check, f"{used} give the CPU's results in {len(ROWS) * len(OPS)} cases", compiled=compiled)


def time_op(op: str) -> Finding:
    """Measures an op with rows of 8 heads of 128 in bfloat16, beside a copy of the bytes that it reads."""
    row = ROWS[0]
    unit = TOKENS * row
    caches, offsets = _units(random.Random(1), unit)
    on_npu, places, out = [cache.npu() for cache in caches], offsets.npu(), _room(op, unit).npu()
    num_bytes = UNITS * unit if op == "interleave_heads" else CACHES * UNITS * unit  # it reads half of one cache
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="npu")
    target = torch.empty_like(source)
    seconds = _seconds(lambda: _call(op, on_npu, places, out, row))
    copied = _seconds(lambda: target.copy_(source))
    found = (
        f"{op}: {num_bytes / 2**20:g} MiB in {seconds * 1e6:.0f} us, {num_bytes / seconds / 1e9:.3g} GB/s; a copy of "
        f"the same bytes {copied * 1e6:.0f} us"
    )
    figures = {"bytes": num_bytes, "seconds": round(seconds, 9), "copy_seconds": round(copied, 9)}
    return ok(f"hardware.speed.{op}", found, "", compiled=not ops.npu_kernels.reason, **figures)


def _seconds(run: Callable[[], object]) -> float:
    """Returns what one of many runs takes on the device."""
    run()
    torch.npu.synchronize()
    times, began = 0, time.monotonic()
    while (elapsed := time.monotonic() - began) < _MEASURED_S or not times:
        run()
        torch.npu.synchronize()
        times += 1
    return max(elapsed / times, 1e-9)


def multiply() -> Finding:
    """Asks whether int32 `Mul` and `Muls` keep the low 32 bits of a product, on which 32-bit checksums depend."""
    numbers = torch.tensor(_PAIRS, dtype=torch.int64)
    one, other = numbers.T.to(torch.int32)
    low = (numbers.prod(1) + 2**31) % 2**32 - 2**31
    kept = {
        "Mul": bool((one.npu() * other.npu()).cpu().to(torch.int64).eq(low).all()),
        "Muls": all(int((one[n : n + 1].npu() * b).cpu()) == int(low[n]) for n, (_, b) in enumerate(_PAIRS)),
    }
    said = ", ".join(f"{name} {'keeps the low 32 bits' if is_low else 'does not'}" for name, is_low in kept.items())
    figures = {f"{name.lower()}_keeps_low_bits": is_low for name, is_low in kept.items()}
    return ok("hardware.multiply", f"products of int32 beyond 32 bits: {said}", "", **figures)


_PAIRS = [(2**31 - 1, 2**31 - 1), (-(2**31), 3), (0x12345679, -0x76543211), (65535, 0x7FFFFFFF), (-1, -(2**31) + 1)]


def _units(chance: random.Random, unit: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns random caches, and the offsets of random units of them."""
    content = torch.frombuffer(bytearray(chance.randbytes(CACHES * BLOCKS * unit)), dtype=torch.uint8)
    offsets = torch.tensor(chance.sample(range(BLOCKS), UNITS), dtype=torch.int64) * unit
    return list(content.view(CACHES, BLOCKS, unit)), offsets


def _room(op: str, unit: int) -> torch.Tensor:
    if op.startswith("sum_units"):
        sums = CACHES * UNITS * SPLITS
        return (
            torch.zeros(2 * sums, dtype=torch.int32) if op == "sum_units_32" else torch.zeros(sums, dtype=torch.int64)
        )
    return torch.zeros(CACHES * UNITS * unit, dtype=torch.uint8)


def _odd_lanes(count: int) -> torch.Tensor:
    """Returns odd numbers of 32 bits, most of whose products with 16 bits need more than 32."""
    return (torch.arange(count, dtype=torch.int64) * 0x9E3779B1 % 2**32 - 2**31).to(torch.int32) | 1


def _call(op: str, caches: Sequence[torch.Tensor], offsets: torch.Tensor, out: torch.Tensor, row: int) -> None:
    """Calls an op with caches, offsets of units, `out` and the bytes of a token's row in a cache."""
    section = UNITS // SPLITS * TOKENS * row
    if op == "gather_units":
        ops.gather_units(caches, offsets, TOKENS * row, UNITS // SPLITS, out, 0, section, CACHES * section)
    elif op == "split_heads":
        ops.split_heads(caches, offsets, SPLITS, TOKENS, row // SPLITS, out, 0, SPLITS * section, section)
    elif op == "sum_units":
        words = row // SPLITS // 4
        places = torch.arange(1, 2 * words, 2, dtype=torch.int64, device=out.device)
        entries = torch.arange(1, 2 * UNITS * TOKENS, 2, dtype=torch.int64, device=out.device).view(UNITS, TOKENS)
        n = len(caches)
        ops.sum_units(caches, [offsets] * n, [entries] * n, [places] * n, [SPLITS] * n, [4] * n, out)
    elif op == "sum_units_32":
        n, words = len(caches), row // SPLITS // 4
        places = torch.zeros(2, 2, -(-words // 8) * 8, dtype=torch.int32)
        places[:, :, :words] = _odd_lanes(4 * words).view(2, 2, words)
        entries = _odd_lanes(2 * UNITS * TOKENS).view(UNITS, TOKENS, 2).to(out.device)
        weights = [entries] * n, [places.to(out.device)] * n
        ops.sum_units_32(caches, [offsets] * n, *weights, [SPLITS] * n, [words] * n, out)
    else:
        tokens = CACHES * UNITS * TOKENS // SPLITS
        ops.interleave_heads(caches[0], 0, tokens * row, out, 0, SPLITS, tokens, row)


LAYERS = 8
"""Layers of a round. Each has two all-reduces and one all-to-all."""

SECTION_BYTES = 1 << 20
"""Bytes that a rank sends to each rank per layer."""

HIDDEN = (512, 4096)
"""Tokens and elements that the model's ranks reduce twice per layer: 4 MiB."""

_TOGETHER_S = 3.0
_TIMEOUT_S = 20.0
_JITTER_S = 1e-3
_CHECK = "hardware.collectives"


class CollectiveRank:
    """One rank: runs the stages one after the other, and checks their results.

    The world's group is the model's and reduces on the current stream. The second group is made as the connector makes
    it, and exchanges on the side stream.
    """

    def __init__(self, rank: int, size: int, store: Path) -> None:
        self.rank, self.size = rank, size
        torch.npu.set_device(rank)
        timeout = timedelta(seconds=_TIMEOUT_S)
        dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
        self.device = NpuDevice()
        self.hidden = torch.zeros(HIDDEN, dtype=torch.bfloat16, device="npu")
        self.sent = [self.device.allocate(size * SECTION_BYTES)[: size * SECTION_BYTES] for _ in range(LAYERS)]
        self.received = [self.device.allocate(size * SECTION_BYTES)[: size * SECTION_BYTES] for _ in range(LAYERS)]
        for layer, buffer in enumerate(self.sent):
            values = [self._value(layer, rank, receiver) for receiver in range(size)]
            buffer.view(size, -1).copy_(torch.tensor(values, dtype=torch.uint8).view(-1, 1).npu())
        self.group: Group | None = None
        self._chance = random.Random(rank)

    def connect_model(self) -> Finding:
        self._reduce(0)
        self.device.record_event().wait(_TIMEOUT_S)
        return ok(_CHECK, STAGES[0])

    def connect_exchange(self) -> Finding:
        """Measures the memory that the group takes."""
        ranks = tuple(range(self.size))
        before, _ = torch.npu.mem_get_info()
        self.group = self.device.new_groups([ranks], _TIMEOUT_S)[ranks]
        self._exchange(0).wait(_TIMEOUT_S)
        after, _ = torch.npu.mem_get_info()
        self.group_bytes = max(0, before - after)
        return ok(_CHECK, STAGES[1])

    def together(self) -> Finding:
        """Runs rounds for some seconds. All ranks stop after the same round."""
        began, best, rounds = time.monotonic(), float("inf"), 0
        while True:
            started = time.monotonic()
            events = []
            for layer in range(LAYERS):
                if self._chance.random() < 0.1:  # so that ranks queue the two groups' collectives at different times
                    time.sleep(self._chance.random() * _JITTER_S)
                self._reduce(layer)
                events.append(self._exchange(layer))
                self._reduce(layer)
            for event in [*events, self.device.record_event()]:
                event.wait(_TIMEOUT_S)
            best, rounds = min(best, time.monotonic() - started), rounds + 1
            if self._all_are_past(began + _TOGETHER_S):
                break
        if wrong := self._wrong_results():
            action = "do not run prefill with tensor parallelism on these versions, and send us this report"
            return error(_CHECK, f"rank {self.rank}: {wrong}", action)
        mode, speed = os.environ.get(MODE, ""), LAYERS * (self.size - 1) * SECTION_BYTES / max(best, 1e-9)
        found = (
            f"{self.size} ranks, {rounds} rounds of {LAYERS} layers, all results right with {MODE} {mode or 'not set'} "
            f"for the model: all-to-all {speed / 1e9:.3g} GB/s a rank beside all-reduce; the connector's group takes "
            f"{self.group_bytes >> 20} MiB"
        )
        figures = {"ranks": self.size, "rounds": rounds, "all_to_all_bytes_per_second": round(speed)}
        return ok(_CHECK, found, "", mode=mode, group_bytes=self.group_bytes, **figures)

    def _reduce(self, layer: int) -> None:
        self.hidden.fill_(float(self.rank + layer))
        dist.all_reduce(self.hidden)

    def _exchange(self, layer: int) -> Event:
        assert self.group is not None
        group, received, sent = self.group, self.received[layer], self.sent[layer]
        return self.device.submit(
            lambda: self.device.all_to_all(received, sent, group), after=self.device.record_event()
        )

    def _all_are_past(self, deadline: float) -> bool:
        over = torch.tensor([int(time.monotonic() >= deadline)], dtype=torch.int32).npu()
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        return bool(over.item())

    def _value(self, layer: int, sender: int, receiver: int) -> int:
        return (31 * layer + 7 * sender + receiver) % 251 + 1

    def _wrong_results(self) -> str:
        """Returns what is wrong in the last round's results, "" if nothing is."""
        expected = float(sum(rank + LAYERS - 1 for rank in range(self.size)))
        if wrong := int(self.hidden.cpu().ne(expected).sum()):
            return f"{wrong} of {self.hidden.numel()} sums of the all-reduce are wrong"
        for layer, buffer in enumerate(self.received):
            values = [self._value(layer, sender, self.rank) for sender in range(self.size)]
            expected_bytes = torch.tensor(values, dtype=torch.uint8).view(-1, 1)
            if wrong := int(buffer.cpu().view(self.size, -1).ne(expected_bytes).sum()):
                return f"{wrong} of {buffer.numel()} bytes of the all-to-all of layer {layer} are wrong"
        return ""


def run_rank(rank: int, size: int, store: Path) -> Iterator[Finding]:
    stage = 0
    try:
        each = CollectiveRank(rank, size, store)
        for run in (each.connect_model, each.connect_exchange, each.together):
            yield run()
            stage += 1
        dist.barrier()
    except Exception as problem:  # noqa: BLE001 - torch_npu raises all kinds
        yield stage_failed(min(stage, 2), f"rank {rank}: {type(problem).__name__}: {problem}", os.environ.get(MODE, ""))
        os._exit(1)


def main() -> Iterator[Finding]:
    if sys.argv[1] == "kernels":
        yield from try_kernels()
    else:
        _, _, rank, size, store = sys.argv
        yield from run_rank(int(rank), int(size), Path(store))
