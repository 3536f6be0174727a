# SPDX-License-Identifier: Apache-2.0
"""Takes checksums of KV as prefill computed it, for `verify_kv` (docs/garbled.md).

The model's thread plans them with the step, and submits each layer's. The side stream takes them before the layer is
regrouped or written. So when a transfer's writes are over, all its checksums are on the host, and the control thread
adds up those that it reports to a decode rank.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch

from vllm_ascend_pd.core.caches import LayerTensors, Quantize
from vllm_ascend_pd.core.checksum import MAX_ROWS, Form, HeadSums, SummedUnits, Tallies, column_tokens, common_heads
from vllm_ascend_pd.core.layout import BlockKind, Geometry, Order, TokenShare
from vllm_ascend_pd.core.prefill_ticket import Destination
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import held
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.checksums import UnitSummer, take_sums, to_numpy
from vllm_ascend_pd.device.event import DeviceError, Event

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")
# By step, all tensors of a report (layer and part) and tokens. Ranks that want other heads of the same share these.
_Folded: TypeAlias = dict[tuple["StepChecksums", tuple[tuple[str, int], ...], TokenShare], list[HeadSums]]

UNKNOWN = b""
"""As a report's checksums: they could not be taken, so that decode calls the KV neither right nor wrong."""


class StepChecksums:
    """Checksums of what one step completes of some requests, in caches of one geometry."""

    def __init__(
        self,
        device: Device,
        own_heads: range,
        summed: SummedUnits,
        ticket_ids: Sequence[str],
        tensors: Collection[tuple[str, int]],
        form: Form = Form.SUM_64,
    ) -> None:
        """`own_heads`: this rank's, of the whole model. `ticket_ids`: of the requests that units belong to.
        `tensors`: layer and part of those that the step computes in this geometry.

        Raises `DeviceError`.
        """
        self.tensors = tensors
        self.own_heads = own_heads
        self.summed = summed
        self.ticket_ids = tuple(ticket_ids)
        self.form = form
        self.summer = UnitSummer(device, summed, form)
        # By layer and part: what `take_sums` returns. The side stream adds to it, the control thread reads it when all
        # writes are over.
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
            for form in {step.form for step, _, _, _ in each}:
                of_form = [one for one in each if one[0].form is form]
                units = [step.summer.of(tensor, base, quantize.get(name)) for step, name, base, tensor in of_form]
                for (step, name, _, _), sums in zip(of_form, take_sums(units), strict=True):
                    step.taken[name] = sums
        except Exception:
            logger.exception("verify_kv: no checksums of layer %s", each[0][1][0])

    try:
        return device.submit(take, computed)
    except DeviceError as error:
        logger.error("verify_kv: no checksums of layer %s: %s", each[0][1][0], error)
        return computed


def report_checksums(
    ticket: Ticket,
    steps: Sequence[StepChecksums],
    destinations: Mapping[_Key, Destination],
    form: Form = Form.SUM_64,
    grows: bool = False,
) -> dict[_Key, bytes]:
    """Returns what is reported to each decode rank after success: `UNKNOWN` if a checksum is missing or is not exact.

    The control thread calls it. An error here never keeps a report back.

    `steps`: all that was taken of the ticket's KV. None if this rank has no token of it.
    `form`: that of the ticket's steps.
    `grows`: as in `Send`. A head-major block is opaque, and may have been sent with KV of further tokens or without.
    """
    if grows and any(_ends_within_opaque_block(ticket, step.summed.geometry.sent) for step in steps):
        return dict.fromkeys(destinations, UNKNOWN)
    folded: _Folded = {}
    try:
        untils = _untils(ticket, steps)
        return {key: _checksums(ticket, steps, untils, each, form, folded) for key, each in destinations.items()}
    except Exception:
        logger.exception("verify_kv: no checksums of ticket %s", ticket.ticket_id)
        return dict.fromkeys(destinations, UNKNOWN)


def _untils(ticket: Ticket, steps: Sequence[StepChecksums]) -> list[int]:
    """Returns up to which token the sums of each step count: a later step may have sent units from there on again."""
    begun: dict[Geometry, int] = {}  # the first token that a later step has sent
    untils = []
    for step in reversed(steps):
        geometry, units = step.summed.geometry, step.summed.units
        until = begun.get(geometry, ticket.num_tokens)
        untils.append(until)
        own = units.tokens[units.owner == step.ticket_ids.index(ticket.ticket_id)]
        begun[geometry] = int(own.min(initial=until))
    return untils[::-1]


def _ends_within_opaque_block(ticket: Ticket, form: Geometry) -> bool:
    is_opaque = form.order is Order.HEAD_MAJOR and form.kind is BlockKind.TOKENS and not form.draft
    return is_opaque and ticket.num_tokens % form.block_size > 0


def _checksums(
    ticket: Ticket,
    steps: Sequence[StepChecksums],
    untils: Sequence[int],
    destination: Destination,
    form: Form,
    folded: _Folded,
) -> bytes:
    covers = sorted(destination.covers)
    if len(covers) > MAX_ROWS:
        return UNKNOWN
    rank, decode = destination.rank, ticket.sharding
    tallies = Tallies.empty(form, len(covers), column_tokens(ticket.spans, ticket.num_tokens), ticket.num_tokens)
    names = tuple((rank.caches.tensors[index].layer, rank.caches.tensors[index].part) for index in covers)
    for step, until in zip(steps, untils, strict=True):
        summed = step.summed
        rows = [row for row, name in enumerate(names) if name in step.tensors]
        if not all(names[row] in step.taken for row in rows):
            return UNKNOWN
        if not rows:
            continue
        _, readers = held(summed.geometry, decode, decode)
        key = step, names, readers.share(rank.tp_rank)
        if key not in folded:
            chosen = summed.chosen(step.ticket_ids.index(ticket.ticket_id), key[2]) & (summed.units.tokens < until)
            sums = [to_numpy(step.taken[names[row]]) for row in rows]
            folded[key] = tallies.fold(rows, sums, summed, chosen)
        common = common_heads(step.own_heads, decode.heads(rank.tp_rank, summed.geometry.total_heads))
        tallies.add(folded[key], step.own_heads, common)
    return tallies.encode()
