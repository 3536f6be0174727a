# SPDX-License-Identifier: Apache-2.0
"""A child of the doctor: compares the regroup ops on NPU 0 with torch's operators and with the CPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch
import torch_npu  # noqa: F401 - makes torch.npu

from vllm_ascend_pd.device import ops, ops_fallback
from vllm_ascend_pd.tools.doctor import child
from vllm_ascend_pd.tools.doctor.kernels import ROWS, Compared

BLOCKS, UNITS, TOKENS = 64, 32, 128
CACHES, SPLITS = 2, 2
_TIMES = 10

Op = Callable[..., None]
Call = Callable[[Op, Sequence[torch.Tensor], torch.Tensor, torch.Tensor, int], None]
"""Calls an op with caches, offsets of units, `out` and the bytes of a token's row in a cache."""


def _gather(op: Op, caches: Sequence[torch.Tensor], offsets: torch.Tensor, out: torch.Tensor, row: int) -> None:
    section = UNITS // SPLITS * TOKENS * row
    op(caches, offsets, TOKENS * row, UNITS // SPLITS, out, 0, section, CACHES * section)


def _split(op: Op, caches: Sequence[torch.Tensor], offsets: torch.Tensor, out: torch.Tensor, row: int) -> None:
    section = UNITS * TOKENS * row // SPLITS
    op(caches, offsets, SPLITS, TOKENS, row // SPLITS, out, 0, SPLITS * section, section)


def _interleave(op: Op, caches: Sequence[torch.Tensor], offsets: torch.Tensor, out: torch.Tensor, row: int) -> None:
    tokens = CACHES * UNITS * TOKENS // SPLITS
    op(caches[0], 0, tokens * row, out, 0, SPLITS, tokens, row)


CALLS: dict[str, Call] = {"gather_units": _gather, "split_heads": _split, "interleave_heads": _interleave}


def main() -> None:
    out = child.take_stdout()
    torch.npu.set_device(0)
    chance = random.Random(0)
    for row in ROWS:
        unit = TOKENS * row
        caches = [_random_bytes(chance, BLOCKS * unit).view(BLOCKS, unit) for _ in range(CACHES)]
        offsets = torch.tensor(chance.sample(range(BLOCKS), UNITS), dtype=torch.int64) * unit
        for name, call in CALLS.items():
            child.say(out, _compare(name, call, caches, offsets, row))


def _compare(name: str, call: Call, caches: list[torch.Tensor], offsets: torch.Tensor, row: int) -> Compared:
    wanted = torch.zeros(CACHES * UNITS * TOKENS * row, dtype=torch.uint8)
    call(getattr(ops, name), caches, offsets, wanted, row)
    on_npu = [cache.npu() for cache in caches], offsets.npu()
    seconds, wrong = [], []
    for op in (getattr(ops, name), getattr(ops_fallback, name)):
        got = torch.zeros_like(wanted).npu()
        call(op, *on_npu, got, row)
        wrong.append(int(got.cpu().ne(wanted).sum()))
        began = time.monotonic()
        for _ in range(_TIMES):
            call(op, *on_npu, got, row)
        torch.npu.synchronize()
        seconds.append((time.monotonic() - began) / _TIMES)
    return Compared(
        op=name,
        row_bytes=row,
        num_bytes=wanted.numel(),
        chip=torch.npu.get_device_name(0),
        not_compiled=ops.npu_kernels.reason,
        wrong=wrong[0],
        fallback_wrong=wrong[1],
        seconds=seconds[0],
        fallback_seconds=seconds[1],
    )


def _random_bytes(chance: random.Random, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(chance.randbytes(num_bytes)), dtype=torch.uint8)
