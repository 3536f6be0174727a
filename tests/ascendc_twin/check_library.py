# SPDX-License-Identifier: Apache-2.0
"""python check_library.py LIBRARY TASK_QUEUE_ENABLE [USER]: the ops of the NPU's library on a side stream of emulated
CANN, against the CPU's; with USER, a number, loaded as that user."""

import os
import sys
from typing import TYPE_CHECKING

import cann_on_host

if TYPE_CHECKING:
    import torch

RATIO, NUM_UNITS, BLOCK, ROW = 2, 11, 128, 4 * 256
UNIT = BLOCK * ROW
SECTION = -(-NUM_UNITS // RATIO) * UNIT


def layer(device: str, kv: list["torch.Tensor"], unit_offsets: "torch.Tensor") -> dict[str, "torch.Tensor"]:
    """What gather, interleave (of what was gathered), split and the checksums make of K and V."""
    import torch

    ops = torch.ops.vllm_ascend_pd
    kv, unit_offsets = [cache.to(device) for cache in kv], unit_offsets.to(device)
    gathered, interleaved, split = (torch.zeros(2 * RATIO * SECTION, dtype=torch.uint8, device=device) for _ in "gis")
    ops.gather_units(kv, unit_offsets, UNIT, SECTION // UNIT, gathered, 0, SECTION, 2 * SECTION)
    ops.interleave_heads(gathered, 0, 2 * SECTION, interleaved, 0, RATIO, 2 * SECTION // ROW, ROW)
    ops.split_heads(kv, unit_offsets, RATIO, BLOCK, ROW // RATIO, split, 0, RATIO * SECTION, SECTION)
    sums, weights = (
        torch.zeros(2 * 4 * NUM_UNITS, dtype=torch.int64, device=device),
        torch.arange(7, 7 + NUM_UNITS * BLOCK),
    )
    entries, places = weights[: NUM_UNITS * BLOCK].view(NUM_UNITS, BLOCK).to(device), weights[:64].to(device)
    ops.sum_units(kv, [unit_offsets] * 2, [entries] * 2, [places] * 2, [4, 4], [4, 4], sums)
    return {"gather": gathered, "interleave": interleaved, "split": split, "sum": sums}


def main(library: str, task_queue: str, user: str = "") -> None:
    cann_on_host.activate()
    os.environ["TASK_QUEUE_ENABLE"] = task_queue
    import pytest
    import torch
    import torch_npu  # noqa: F401
    import vllm_ascend_pd._C  # noqa: F401

    if user:
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
    torch.ops.load_library(library)
    torch.npu.set_device(0)
    kv = [torch.randint(256, (40, BLOCK, 4, 256), dtype=torch.uint8) for _ in "kv"]
    unit_offsets = torch.randperm(40)[:NUM_UNITS] * UNIT
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        on_npu = layer("npu", kv, unit_offsets)
    side.synchronize()
    for name, expected in layer("cpu", kv, unit_offsets).items():
        assert torch.equal(on_npu[name].cpu(), expected), name

    with pytest.raises(ValueError, match="ranks is 0, must be at least 1"):
        torch.ops.vllm_ascend_pd.interleave_heads(on_npu["gather"], 0, 0, on_npu["split"], 0, 0, 1, 1)


main(*sys.argv[1:])
