# SPDX-License-Identifier: Apache-2.0
"""Takes checksums of KV as prefill computed it, for `verify_kv` (docs/garbled.md).

The model's thread plans them with the step, and submits each layer's. The side stream takes them before the layer is
regrouped or written. So when a transfer's writes are over, all its checksums are on the host, and the control thread
adds up those that it reports to a decode rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from vllm_ascend_pd.core.caches import LayerTensors, Quantize
from vllm_ascend_pd.core.checksum import MAX_ROWS, SummedUnits, Tally, column_tokens, common_heads
from vllm_ascend_pd.core.layout import Geometry
from vllm_ascend_pd.core.prefill_ticket import Destination
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import held
from vllm_ascend_pd.device.base import Device, DeviceError, Event
from vllm_ascend_pd.device.checksums import UnitSummer, take_sums, to_numpy

logger = logging.getLogger(__name__)


class StepChecksums:
    """Checksums of what one step completes of some requests, in caches of one geometry."""

    def __init__(self, device: Device, own_heads: range, summed: SummedUnits, ticket_ids: Sequence[str]) -> None:
        """`own_heads`: this rank's, of the whole model. `ticket_ids`: of the requests that units belong to.

        Raises `DeviceError`.
        """
        self.own_heads = own_heads
        self.summed = summed
        self.ticket_ids = tuple(ticket_ids)
        self.summer = UnitSummer(device, summed)
        # By layer and part: `[units, heads]` on the host. The side stream adds to it, the control thread reads it when
        # all writes are over.
        self.taken: dict[tuple[str, int], torch.Tensor] = {}


def submit_layer(
    device: Device,
    layer: Sequence[tuple[StepChecksums, LayerTensors]],
    quantize: Mapping[tuple[str, int], Quantize],
    computed: Event,
) -> Event:
    """Queues the checksums of a layer on the side stream: with the compiled kernels one launch for 8 tensors, and one
    copy.

    `quantize`: as in `RegisteredCaches`. Returns when they are taken, whether that succeeds or not: a failure never
    fails the requests.
    """
    each = [
        (step, (described.layer, described.part), described.base, tensor)
        for step, tensors in layer
        for described, tensor in zip(tensors.described, tensors.tensors, strict=True)
    ]

    def take() -> None:
        try:
            units = [step.summer.of(tensor, base, quantize.get(name)) for step, name, base, tensor in each]
            for (step, name, _, _), sums in zip(each, take_sums(units), strict=True):
                step.taken[name] = sums
        except Exception:
            logger.exception("verify_kv: no checksums of layer %s", each[0][1][0])

    try:
        return device.submit(take, computed)
    except DeviceError as error:
        logger.error("verify_kv: no checksums of layer %s: %s", each[0][1][0], error)
        return computed


def report_checksums(ticket: Ticket, steps: Sequence[StepChecksums], destination: Destination) -> bytes | None:
    """Returns what is reported to a decode rank after success; None if nothing was taken.

    The control thread calls it. `steps`: all that was taken of the ticket's KV.
    """
    covers = sorted(destination.covers)
    if not steps or not 0 < len(covers) <= MAX_ROWS:
        return None
    rank, decode = destination.rank, ticket.sharding
    tally = Tally.empty(len(covers), column_tokens(ticket.spans, ticket.num_tokens), ticket.num_tokens)
    named = [(rank.caches.tensors[index].layer, rank.caches.tensors[index].part) for index in covers]
    kinds = [rank.caches.geometry_of(rank.caches.tensors[index]) for index in covers]
    ends: dict[Geometry, int] = {}  # a later step may have sent units again, from here on
    for step in reversed(steps):
        summed = step.summed
        rows = {name: row for row, name in enumerate(named) if kinds[row].group == summed.geometry.group}
        _, readers = held(summed.geometry, decode, decode)
        request = step.ticket_ids.index(ticket.ticket_id)
        own = summed.units.tokens[summed.units.owner == request]
        end = ends.get(summed.geometry, ticket.num_tokens)
        ends[summed.geometry] = min(end, own.min(initial=end))
        chosen = summed.chosen(request, readers.share(rank.tp_rank)) & (summed.units.tokens < end)
        common = common_heads(step.own_heads, decode.heads(rank.tp_rank, summed.geometry.total_heads))
        of_tensors = {name: step.taken[name] for name in rows if name in step.taken}
        if of_tensors:
            sums = to_numpy(torch.stack(tuple(of_tensors.values())))[:, chosen]
            tokens = summed.units.tokens[chosen]
            tally.add([rows[name] for name in of_tensors], sums, step.own_heads, common, tokens)
    return tally.encode()
