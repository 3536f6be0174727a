# SPDX-License-Identifier: Apache-2.0
"""Plans a step on a prefill rank: what is sent to which decode engine, decided before the first layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_ascend_pd.core.checksum import SummedUnits, is_selected
from vllm_ascend_pd.core.plan import RankMapping
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.step import Send
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.device.event import DeviceError
from vllm_ascend_pd.prefill.checksums import StepChecksums
from vllm_ascend_pd.prefill.decode_layout import RankMappings
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.regroup import Regrouper
from vllm_ascend_pd.prefill.step_send import StepSend, plan_sends, tokens_of
from vllm_ascend_pd.prefill.transfer import Transfer


@dataclass
class StepPlan:
    """What this rank does in one step. The model's thread owns it.

    `unpushed` and `confirmed` shrink while the step runs. Nothing else changes.
    """

    # The number of the step, which is the same on all ranks. 0 if no step is open.
    number: int = 0
    # What is sent, by the index of the geometry that is read.
    sends: dict[int, list[StepSend]] = field(default_factory=dict)
    # Layers that were not pushed yet, in order.
    unpushed: dict[str, None] = field(default_factory=dict)
    # What takes checksums, by the index of the geometry. Empty without `verify_kv`.
    checksums: dict[int, list[StepChecksums]] = field(default_factory=dict)
    # Transfers whose prompt ends in this step.
    last: list[Transfer] = field(default_factory=list)
    # Those of them of which vLLM takes nothing back any more, and whose end was not queued yet.
    confirmed: list[Transfer] = field(default_factory=list)
    # As `sends`, of what earlier steps have computed and is sent when this one begins; and the transfers that end with
    # it.
    at_once: dict[int, list[StepSend]] = field(default_factory=dict)
    sent_at_once: list[Transfer] = field(default_factory=list)

    @property
    def layer_sends(self) -> list[StepSend]:
        """What is sent layer by layer, as the step computes them."""
        return [step_send for of in self.sends.values() for step_send in of]


class Planner:
    """Plans steps. The model's thread owns it."""

    def __init__(self, rank: PrefillRank, mappings: RankMappings, regrouper: Regrouper | None) -> None:
        """`regrouper`: None if this engine's layout never needs regrouping."""
        self._rank = rank
        self._mappings = mappings
        self._regrouper = regrouper
        self._geometries = rank.caches.description.geometries
        layers = rank.caches.layers_by_geometry.values()
        # By geometry: the most tensors of it that a layer has.
        self._tensors_of_a_layer = [
            max((len(of[g].described) for of in layers if g in of), default=0) for g in range(len(self._geometries))
        ]
        # By geometry: layer and part of its tensors.
        self._tensors = [
            frozenset((d.layer, d.part) for of in layers if g in of for d in of[g].described)
            for g in range(len(self._geometries))
        ]
        # The number of steps so far. It is the same on all ranks.
        self.steps = 0

    @owned
    def plan(self, sends: list[Send], transfers: Mapping[str, Transfer]) -> StepPlan:
        """Returns the plan of a step that completes `sends`, and notes in `transfers`, by request id, what it says of
        each. Transfers that cannot be planned fail."""
        self.steps += 1
        plan = StepPlan(self.steps)
        if not sends:
            return plan
        plan.unpushed.update(dict.fromkeys(self._rank.caches.layers))
        # By decode engine, as tickets describe it: all ranks must make the same plan (R5), and a rank may not have the
        # engine's description yet.
        slices: dict[object, list[tuple[Transfer, Send]]] = {}
        for send in sends:
            transfer = transfers[send.request_id]
            transfer.again = send.again
            if send.last:
                plan.last.append(transfer)
                transfer.grows = send.grows
                if send.confirmed:
                    plan.confirmed.append(transfer)
            if send.start < send.stop:
                ticket = transfer.ticket
                there = (ticket.issuer, ticket.sharding, tuple(ticket.remote_block_size), ticket.remote_draft)
                shape = (*there, send.was_computed)
                slices.setdefault(shape, []).append((transfer, send))
        for group in slices.values():
            ticket = group[0][0].ticket
            planned: dict[int, list[StepSend]] = {}
            for index, geometry in enumerate(self._geometries):
                is_known = geometry.is_known_to(ticket.remote_draft)
                if is_known and (step_sends := self._plan_geometry(plan, index, ticket, group)):
                    planned[index] = step_sends
            # All sends of a group have been computed before, or none.
            is_at_once = group[0][1].was_computed and self._is_sent_at_once(group, planned)
            for index, step_sends in planned.items():
                (plan.at_once if is_at_once else plan.sends).setdefault(index, []).extend(step_sends)
            if is_at_once:
                plan.sent_at_once.extend(transfer for transfer, _ in group)
        if plan.sent_at_once:
            for ending in (plan.last, plan.confirmed):
                ending[:] = [transfer for transfer in ending if transfer not in plan.sent_at_once]
        return plan

    def _is_sent_at_once(self, slices: list[tuple[Transfer, Send]], planned: Mapping[int, list[StepSend]]) -> bool:
        """Whether all of what earlier steps have computed may be sent when the step begins: it is read from the cache.

        What is regrouped takes turns with the step's layers: there are few staging slots. Checksums are taken layer by
        layer, too, and layers that share a buffer have overwritten it.
        """
        if self._rank.config.verified_share or self._rank.caches.sharing_buffers:
            return False
        is_whole = all(send.last and send.confirmed for _, send in slices)
        return is_whole and not any(each.mapping.is_staged for of in planned.values() for each in of)

    def _plan_geometry(
        self, plan: StepPlan, index: int, ticket: Ticket, slices: list[tuple[Transfer, Send]]
    ) -> list[StepSend]:
        """`ticket`: one of the decode engine that gets the slices."""
        try:
            mapping = self._mappings.mapping(index, ticket.sharding, tuple(ticket.remote_block_size))
        except ValueError as error:  # the two sides cannot fit
            for transfer, _ in slices:
                transfer.state.fail(str(error), PushFailure.UNFIT)
            return []
        served = [each for each in slices if mapping.serves(each[0].ticket.replica_hash)]
        if not served:
            return []
        slot_units = 0
        if mapping.is_staged:
            assert self._regrouper is not None
            slot_units = mapping.slot_units(self._regrouper.ring.slot_bytes, self._tensors_of_a_layer[index])
            assert slot_units > 0
        geometry = self._geometries[index]
        try:
            if self._rank.config.verified_share:
                self._plan_checksums(plan, index, mapping, served)
            return plan_sends(mapping, geometry, served, self._rank.device, slot_units)
        except DeviceError as error:  # the side stream is broken
            if self._regrouper is not None:
                self._regrouper.missed(mapping.ranks, str(error))
            for transfer, _ in served:
                transfer.state.fail(str(error), PushFailure.DEVICE)
            return []

    def _plan_checksums(
        self, plan: StepPlan, index: int, mapping: RankMapping, slices: list[tuple[Transfer, Send]]
    ) -> None:
        share = self._rank.config.verified_share
        verified = [each for each in slices if is_selected(share, each[0].ticket.ticket_id)]
        if not verified:
            return
        geometry, tickets = self._geometries[index], [transfer.ticket for transfer, _ in verified]
        group = geometry.group
        summed = SummedUnits.of(
            geometry,
            mapping.unit,
            [tokens_of(send, geometry) for _, send in verified],
            [send.blocks[group] for _, send in verified],
            [(ticket.remote_block_ids[group], ticket.span(group)) for ticket in tickets],
            mapping.token_share,
        )
        if len(summed.units) == 0:  # other ranks have them
            return
        heads = self._rank.info.sharding.heads(self._rank.info.rank, geometry.total_heads)
        ticket_ids = [ticket.ticket_id for ticket in tickets]
        form = self._rank.form_for(tickets[0])  # all are of one decode engine
        checksums = StepChecksums(self._rank.device, heads, summed, ticket_ids, self._tensors[index], form)
        plan.checksums.setdefault(index, []).append(checksums)
        for transfer, _ in verified:
            transfer.checksums.append(checksums)
