# SPDX-License-Identifier: Apache-2.0
"""Takes the checksums of `core/checksum.py` on the device."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_ascend_pd.core.caches import Quantize
from vllm_ascend_pd.core.checksum import (
    Form,
    SummedUnits,
    Sums,
    half_weights,
    of_lane,
    place_weights,
    word_bytes,
    words_of,
)
from vllm_ascend_pd.core.layout import Geometry, Order
from vllm_ascend_pd.core.plan import Mask
from vllm_ascend_pd.device import ops, ops_fallback
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.event import DeviceError
from vllm_ascend_pd.device.packing import packed

logger = logging.getLogger(__name__)

# Seconds that a device has to show that its checksums are exact: it may compile its operators then.
_CHECK_S = 300.0
# Most bytes of a dump.
_DUMPED = 4 << 20


class UnitSums(NamedTuple):
    """Units of one tensor whose checksums are to be taken: arguments of `ops.sum_units` or `ops.sum_units_32`."""

    cache: torch.Tensor
    unit_offsets: torch.Tensor
    entry_weights: torch.Tensor
    place_weights: torch.Tensor
    heads: int
    # Bytes of a word; of `Form.SUM_32` the number of words.
    words: int


class UnitSummer:
    """What the checksums of the same units in several tensors of one geometry share."""

    def __init__(self, device: Device, summed: SummedUnits, form: Form = Form.SUM_64) -> None:
        """Uploads it. The model's thread calls it. Raises `DeviceError`."""
        self._summed, sent = summed, summed.geometry.sent
        self._offsets = device.upload(torch.from_numpy(summed.offsets))
        if form is Form.SUM_64:
            entries, places, self._words = summed.entry_weights, place_weights(sent), word_bytes(sent)
        else:
            entries = np.stack([of_lane(summed.entry_weights, lane) for lane in form.lanes], -1)
            places = half_weights(sent)
            self._words = words_of(sent)
        self._entry_weights = device.upload(_signed(entries))
        self._place_weights = device.upload(_signed(places))

    def of(self, tensor: torch.Tensor, base: int, quantize: Quantize | None = None) -> UnitSums:
        """Returns the units of a tensor, as they are sent.

        `base`: address of block 0. `quantize`: what quantizes the tensor on its way. Call it in submitted work.
        """
        summed, cache, offsets = self._summed, self._blocks(tensor, base), self._offsets
        if summed.geometry.is_packed_on_the_way:
            units = len(summed.units)
            found = torch.empty(units, summed.unit_bytes, dtype=torch.uint8, device=tensor.device)
            ops.gather_units([cache], self._offsets, summed.unit_bytes, units, found.view(-1), 0, 0, 0)
            cache = packed(found, tensor, summed.geometry.block_size, quantize).contiguous().view(units, -1)
            offsets = torch.arange(units, device=tensor.device) * cache.shape[1]
        sent = summed.geometry.sent
        return UnitSums(cache, offsets, self._entry_weights, self._place_weights, sent.heads, self._words)

    def content(self, tensor: torch.Tensor, base: int, chosen: Mask) -> tuple[npt.NDArray[np.uint8], list[int]]:
        """Returns the bytes of chosen units, `[units, bytes]`, `_DUMPED` at most, and blocks that seem to have those of
        the first one, too."""
        blocks, size = self._blocks(tensor, base), self._summed.unit_bytes
        rows = self._summed.offsets[chosen][: max(1, _DUMPED // size)]
        at = [divmod(offset, self._summed.geometry.block_stride) for offset in rows.tolist()]
        content = torch.stack([blocks[block, within : within + size] for block, within in at]).cpu().numpy()
        block, within = at[0]
        beginnings = blocks[:, within : within + min(size, 64)]
        alike = (beginnings == beginnings[block]).all(1).nonzero()[:, 0].tolist()
        return content, [copy for copy in alike if copy != block][:8]

    def _blocks(self, tensor: torch.Tensor, base: int) -> torch.Tensor:
        """Returns the bytes of a cache tensor, `[num_blocks, block bytes]`."""
        storage, geometry = tensor.untyped_storage(), self._summed.geometry
        shape, strides = (tensor.shape[0], geometry.block_bytes), (geometry.block_stride, 1)
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return whole.set_(storage, base - storage.data_ptr(), shape, strides)


def take_sums(units: Sequence[UnitSums]) -> list[torch.Tensor]:
    """Takes checksums, without the heads' weights. All are of one form.

    Returns for each, on the host, `[units, heads]` of int64, or `[units, heads, 2]` of int32. Their content is there
    when the submitted work that calls this has ended.
    """
    caches, offsets, entries, places, heads, words = zip(*units, strict=True)
    kind = entries[0].dtype
    lanes = (2,) if kind == torch.int32 else ()
    shapes = [(len(of), n, *lanes) for of, n in zip(offsets, heads, strict=True)]
    taken = torch.empty(sum(map(math.prod, shapes)), dtype=kind, device=caches[0].device)
    if kind == torch.int64:
        ops.sum_units(caches, offsets, entries, places, heads, words, taken)
    elif _exact_32:
        ops.sum_units_32(caches, offsets, entries, places, heads, words, taken)
    else:
        ops_fallback.sum_units_32(caches, offsets, entries, places, heads, words, taken)
    if not taken.is_cpu:
        taken = torch.empty(taken.shape, dtype=kind, pin_memory=True).copy_(taken, non_blocking=True)
    return [part.view(shape) for part, shape in zip(taken.split(list(map(math.prod, shapes))), shapes, strict=True)]


# Whether `ops.sum_units_32` is exact on this process's device. `best_form` finds out.
_exact_32 = True


def best_form(device: Device) -> Form:
    """Takes checksums of some bytes on the device, and returns the form that prefill should take there.

    Of 32 bits on an NPU with compiled kernels whose products keep their low 32 bits, which is not documented. Raises
    `DeviceError` unless those of 64 bits are exact.
    """
    global _exact_32
    if not _is_exact(device, Form.SUM_64):
        raise DeviceError("its operators give other checksums than the host")
    _exact_32 = True
    if not _is_exact(device, Form.SUM_32):
        _exact_32 = False
        logger.warning("verify_kv: this device's int32 products do not keep their low bits: its scalar units take sums")
    has_kernels = device.name != "cpu" and not ops.npu_kernels.reason
    return Form.SUM_32 if _exact_32 and has_kernels else Form.SUM_64


def _is_exact(device: Device, form: Form) -> bool:
    geometry = Geometry(0, Order.TOKEN_MAJOR, "int8", 16, 16 * 2 * 8, heads=2, total_heads=2, head_bytes=8)
    summed = SummedUnits.of(geometry, 16, [(0, 32)], [[1, 2]])
    host = torch.randint(256, (3, geometry.block_stride), dtype=torch.uint8)
    if form is Form.SUM_64:
        words = host[1:].numpy().view(np.int32).astype(np.uint64).reshape(2, 16, 2, -1)
        by_entry = (words * place_weights(geometry)).sum(-1, dtype=np.uint64) * summed.entry_weights[:, :, None]
    else:
        halves = host[1:].numpy().view(np.uint16).astype(np.uint32).reshape(2, 16, 2, 1, -1, 2)
        places = half_weights(geometry)[:, :, : geometry.head_bytes // 4].transpose(0, 2, 1)
        weights = np.stack([of_lane(summed.entry_weights, lane) for lane in form.lanes], -1)
        by_entry = (halves * places).sum((-2, -1), dtype=np.uint32) * weights[:, :, None]
    summer, tensor = UnitSummer(device, summed, form), device.upload(host)
    got: list[torch.Tensor] = []

    def take() -> None:
        got.extend(take_sums([summer.of(tensor, tensor.data_ptr())]))

    device.submit(take, device.record_event()).wait(_CHECK_S)
    return np.array_equal(to_numpy(got[0]), by_entry.sum(1, dtype=by_entry.dtype))


def to_numpy(sums: torch.Tensor) -> Sums:
    """Returns checksums, which are on the host, as unsigned numbers."""
    unsigned: Sums = sums.numpy().view(np.uint64 if sums.dtype == torch.int64 else np.uint32)
    return unsigned


def _signed(weights: Sums) -> torch.Tensor:
    return torch.from_numpy(weights.view(np.int64 if weights.dtype == np.uint64 else np.int32))
