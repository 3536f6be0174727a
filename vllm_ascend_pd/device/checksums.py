# SPDX-License-Identifier: Apache-2.0
"""Takes the checksums of `core/checksum.py` on the device, by torch's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm_ascend_pd.core.caches import Quantize
from vllm_ascend_pd.core.checksum import SummedUnits, Sums, place_weights, word_bytes
from vllm_ascend_pd.core.layout import Geometry, Order
from vllm_ascend_pd.core.plan import Mask
from vllm_ascend_pd.device.base import Device, DeviceError
from vllm_ascend_pd.device.packing import packed

# Seconds that a device has to show that its checksums are exact: it may compile its operators then.
_CHECK_S = 300.0
# Most bytes of a dump.
_DUMPED = 4 << 20
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


class UnitSummer:
    """Takes the checksums of the same units in several tensors of one geometry.

    The number of operators that a tensor takes does not depend on how many requests or units there are.
    """

    def __init__(self, device: Device, summed: SummedUnits) -> None:
        """Uploads what all tensors share. The model's thread calls it. Raises `DeviceError`."""
        geometry, sent = summed.geometry, summed.geometry.sent
        self._geometry = geometry
        self._unit_bytes = summed.unit_bytes
        # Rows of a tensor begin every so many bytes: all units begin with one.
        self._step = math.gcd(geometry.block_stride, self._unit_bytes)
        self._rows = device.upload(torch.from_numpy(summed.offsets // self._step))
        self._entry_weights = device.upload(_signed(summed.entry_weights))
        self._place_weights = device.upload(_signed(place_weights(sent)))
        self._words = _WORDS[word_bytes(sent)]

    def sums(self, tensor: torch.Tensor, base: int, quantize: Quantize | None = None) -> torch.Tensor:
        """Returns the checksums of the units as they are sent, `[units, heads]`, of int64, without the heads' weights.

        `base`: address of block 0. `quantize`: what quantizes the tensor on its way. Call it in submitted work.
        """
        units, heads = len(self._rows), self._geometry.heads
        entries = self._entry_weights.shape[1]
        found = self._bytes(tensor, base).index_select(0, self._rows)
        if self._geometry.is_packed_on_the_way:
            found = packed(found, tensor, self._geometry.block_size, quantize).contiguous()
        words = found.view(-1).view(self._words).to(torch.int64)
        by_head = _dot(words.view(-1, len(self._place_weights)), self._place_weights)
        if self._geometry.sent.order is Order.HEAD_MAJOR:
            return by_head.view(units, heads) * self._entry_weights
        return (by_head.view(units, entries, heads) * self._entry_weights[:, :, None]).sum(1)

    def content(self, tensor: torch.Tensor, base: int, chosen: Mask) -> tuple[npt.NDArray[np.uint8], list[int]]:
        """Returns the bytes of chosen units, `[units, bytes]`, `_DUMPED` at most, and blocks that seem to have those of
        the first one, too."""
        every = self._bytes(tensor, base)
        rows = self._rows[torch.from_numpy(chosen).to(self._rows.device)][: max(1, _DUMPED // self._unit_bytes)]
        content = every.index_select(0, rows).cpu().numpy()
        block, within = divmod(int(rows[0]), self._geometry.block_stride // self._step)
        beginnings = every[within :: self._geometry.block_stride // self._step, :64]
        alike = (beginnings == beginnings[block]).all(1).nonzero()[:, 0].tolist()
        return content, [copy for copy in alike if copy != block][:8]

    def _bytes(self, tensor: torch.Tensor, base: int) -> torch.Tensor:
        """Returns the bytes of a cache tensor as rows of a unit, which overlap if blocks are no multiple of units."""
        storage = tensor.untyped_storage()
        geometry = self._geometry
        num_bytes = (tensor.shape[0] - 1) * geometry.block_stride + geometry.block_bytes
        shape = ((num_bytes - self._unit_bytes) // self._step + 1, self._unit_bytes)
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return whole.set_(storage, base - storage.data_ptr(), shape, (self._step, 1))


def check_exact(device: Device) -> None:
    """Takes checksums of some bytes on the device. Raises `DeviceError` unless they are exact."""
    geometry = Geometry(0, Order.TOKEN_MAJOR, "int8", 16, 16 * 2 * 8, heads=2, total_heads=2, head_bytes=8)
    summed = SummedUnits.of(geometry, 16, [(0, 32)], [[1, 2]])
    host = torch.randint(256, (3, geometry.block_stride), dtype=torch.uint8)
    words = host[1:].numpy().view(np.int32).astype(np.uint64).reshape(2, 16, 2, -1)
    by_entry = (words * place_weights(geometry)).sum(-1, dtype=np.uint64) * summed.entry_weights[:, :, None]
    summer, tensor = UnitSummer(device, summed), device.upload(host)
    got: list[torch.Tensor] = []

    def take() -> None:
        got.append(stack_on_host([summer.sums(tensor, tensor.data_ptr())]))

    device.submit(take, device.record_event()).wait(_CHECK_S)
    if not np.array_equal(to_numpy(got[0])[0], by_entry.sum(1, dtype=np.uint64)):
        raise DeviceError("its operators give other checksums than the host")


def to_numpy(sums: torch.Tensor) -> Sums:
    """Returns checksums, which are on the host, as unsigned numbers."""
    unsigned: Sums = sums.numpy().view(np.uint64)
    return unsigned


def stack_on_host(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns `[tensors, units, heads]` on the host. Its content is there when the submitted work has ended."""
    stacked = torch.stack(tuple(sums))
    if stacked.is_cpu:
        return stacked
    host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
    return host.copy_(stacked, non_blocking=True)


def _signed(weights: Sums) -> torch.Tensor:
    return torch.from_numpy(weights.view(np.int64))


def _dot(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # NPUs have no product of int64 matrices. On a CPU it takes a fiftieth of the time.
    return rows @ weights if rows.is_cpu else (rows * weights).sum(-1)
