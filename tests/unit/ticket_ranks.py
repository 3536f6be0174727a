# SPDX-License-Identifier: Apache-2.0
"""Drives the product's state machines: decode's and prefill's ranks in the ticket model (`ticket_model.py`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from explore import Numbered
from ticket_world import (
    ASKING,
    CONTROL_S,
    ENDED,
    FAILED,
    GRANT_S,
    LEASE_S,
    NOT_YET,
    QUEUE_S,
    RECEIVED,
    SETTLE_S,
    TRANSFER_S,
    Ask,
    Revoked,
    Sender,
    Told,
    World,
    Write,
    consumer_key,
    copy_of_consumer,
    copy_of_producer,
    producer_key,
    put,
)

from vllm_ascend_pd.core.decode_ticket import DecodeTicket, TicketState
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.prefill_ticket import Destination, Phase, PrefillTicket, RankKey
from vllm_ascend_pd.core.protocol import (
    Granted,
    GrantRefused,
    GrantRequest,
    RankDescription,
    WriteReport,
    WriterId,
)
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.topology import sharding

Moves = Iterator[tuple[str, World]]

TICKET_ID, DIGEST, P_TP = "0" * 32, "d" * 32, sharding(2)


class Serving(NamedTuple):
    """The ticket and engine that a transfer's number stands for."""

    ticket: int
    engine: int
    writer: int

    @property
    def engine_id(self) -> str:
        return "prefill" + "'" * self.engine

    @property
    def process(self) -> str:
        return f"{self.engine_id} {self.writer}"


@dataclass(frozen=True)
class Bounds:
    """The size of the model. `fine`: every answer and every wait is a step of its own. `stops`: decode ranks may be
    stopped, too."""

    writers: int
    readers: int
    tickets: int
    faults: int
    engines: int = 1
    fine: bool = False
    stops: bool = False

    @property
    def transfers(self) -> range:
        return range(self.tickets * self.engines * self.writers)

    def of(self, transfer: int) -> Serving:
        serving, writer = divmod(transfer, self.writers)
        return Serving(*divmod(serving, self.engines), writer)

    @property
    def processes(self) -> dict[str, list[int]]:
        """The prefill processes with their transfers."""
        found: dict[str, list[int]] = {}
        for transfer in self.transfers:
            found.setdefault(self.of(transfer).process, []).append(transfer)
        return found

    def at_reader(self, ticket: int, reader: int) -> int:
        return ticket * self.readers + reader


class Ranks:
    """`producer` and `consumer`: the classes of the state machines, which a test may replace."""

    def __init__(self, bounds: Bounds, producer: type[PrefillTicket], consumer: type[DecodeTicket]) -> None:
        self.bounds = bounds
        self._make_producer, self._make_consumer = producer, consumer
        self._consumers = Numbered[DecodeTicket](copy_of_consumer, consumer_key)
        self._producers = Numbered[PrefillTicket](copy_of_producer, producer_key)

    def _sent(self, world: World, message: Any) -> World:
        raise NotImplementedError

    def _runs(self, world: World, transfer: int) -> bool:
        return self.bounds.of(transfer).process not in world.frozen | world.ended

    @staticmethod
    def _is_frozen(world: World, reader: int) -> bool:
        return f"decode {reader}" in world.frozen

    def _who(self, transfer: int) -> str:
        serving = self.bounds.of(transfer)
        return f"{serving.process}, ticket {serving.ticket + 1}"

    # Decode.

    def _issued(self, world: World, ticket: int) -> World:
        number = self._consumers.add(self._make_consumer(TICKET_ID, DIGEST, QUEUE_S, TRANSFER_S, LEASE_S))
        for reader in range(self.bounds.readers):
            world = world._replace(consumers=put(world.consumers, self.bounds.at_reader(ticket, reader), number))
        return world

    def _on_decode(self, world: World) -> Moves:
        for ticket in range(self.bounds.tickets):
            first = self.bounds.at_reader(ticket, 0)
            numbers = world.consumers[first : first + self.bounds.readers]
            for reader, number in enumerate(numbers):
                if number < 0 or self._is_frozen(world, reader):
                    continue
                who = f"decode {reader}, ticket {ticket + 1}"
                after, quiet = self._ticked(world, number)
                if after != number or quiet:
                    yield f"{who}: looks at the clock", self._consumed(world, first + reader, after)
                if ticket in world.cancelled and self._consumers[number].state is TicketState.OPEN:
                    after, _ = self._consumers.after(number, "cancel", lambda c: c.fail("cancelled"))
                    yield f"{who}: is cancelled", self._consumed(world, first + reader, after)
            following = self.bounds.at_reader(ticket + 1, 0)
            over = all(number in (FAILED, RECEIVED) for number in numbers)
            if over and ticket + 1 < self.bounds.tickets and world.consumers[following] == NOT_YET:
                yield f"decode: gives the blocks to ticket {ticket + 2}", self._issued(world, ticket + 1)

    def _ticked(self, world: World, number: int) -> tuple[int, bool]:
        """A decode rank lets time pass, and looks at the connections of writers that it has revoked."""
        dead = frozenset(
            transfer
            for process in world.ended & self.bounds.processes.keys()
            for transfer in self.bounds.processes[process]
        )

        def tick(ticket: DecodeTicket) -> bool:
            ticket.tick(0)
            if ticket.state is not TicketState.OPEN:
                for transfer in dead:
                    ticket.gone(self._writer(transfer), 0)
            return ticket.is_quiesced(0)

        return self._consumers.after(number, ("tick", dead), tick)

    def _consumed(self, world: World, at: int, after: int) -> World:
        """Follows up on a change of a decode rank's ticket: revokes failed grants, closes a quiesced ticket."""
        ticket, reader = divmod(at, self.bounds.readers)
        before = self._consumers[world.consumers[at]]
        now = self._consumers[after]
        if now.state is not before.state and now.state is TicketState.FAILED:
            world = self._revoked(world, reader, now)
        if now.state is TicketState.FAILED and before.state is not TicketState.FAILED:
            world = world._replace(cancelled=world.cancelled | {ticket})
        if len({writer.engine_id for writer in now._leases}) > 1:
            return world._replace(wrong=f"R10: decode {reader} has granted writes to two engines")
        if now.state is TicketState.RECEIVED and before.state is TicketState.OPEN:
            for transfer in self.bounds.transfers:
                serving = self.bounds.of(transfer)
                served = (serving.ticket, serving.engine_id) == (ticket, self._owner_of(now))
                if served and (transfer, reader) not in world.landed:
                    return world._replace(wrong=f"R1: decode {reader} counts as received what {serving.process} lacks")
        if self._consumers.ask(after, "quiet", lambda c: c.is_quiesced(0)):
            after = FAILED if now.state is TicketState.FAILED else RECEIVED
        return world._replace(consumers=put(world.consumers, at, after))

    def _revoked(self, world: World, reader: int, ticket: DecodeTicket) -> World:
        live = [] if ticket.state is TicketState.RECEIVED else ticket.live_writers()
        return world._replace(
            network=world.network | {Revoked(writer.transfer, reader) for writer in {*live, *ticket.overdue(0)}}
        )

    @staticmethod
    def _owner_of(ticket: DecodeTicket) -> str | None:
        """The engine that was granted a write."""
        return next((writer.engine_id for writer in ticket._leases), None)

    def _writer(self, transfer: int) -> WriterId:
        serving = self.bounds.of(transfer)
        return WriterId(serving.engine_id, 0, serving.writer, transfer)

    def _decided(self, number: int, transfer: int) -> tuple[int, Any]:
        """Handles a grant request at a decode rank."""
        serving = self.bounds.of(transfer)
        request = GrantRequest(TICKET_ID, DIGEST, self._writer(transfer), P_TP, (serving.writer,), SETTLE_S)

        def decide(ticket: DecodeTicket) -> Granted | GrantRefused:
            refused = ticket.admit(request, 0)
            if refused is not None:
                return refused
            if not ticket.is_owned:
                ticket.expect(serving.engine_id, P_TP, frozenset((w, w) for w in range(self.bounds.writers)))
            return ticket.grant(request, 0)

        return self._consumers.after(number, ("grant", transfer), decide)

    def _heard(self, number: int, message: Told) -> int:
        """Handles a report at a decode rank."""
        reason = None if message.success else "it broke"
        report = WriteReport(TICKET_ID, self._writer(message.transfer), reason, settle_s=message.settle_s)
        return self._consumers.after(number, ("report", *message), lambda c: c.report(report, 0))[0]

    # Prefill.

    def _on_prefill(self, world: World) -> Moves:
        for transfer in self.bounds.transfers:
            serving = self.bounds.of(transfer)
            if world.consumers[self.bounds.at_reader(serving.ticket, 0)] == NOT_YET:
                break
            if not self._runs(world, transfer):
                continue
            number = world.producers[transfer]
            who = self._who(transfer)
            if number == NOT_YET and self._may_arrive(world, serving):
                started = self._producers.add(self._make_producer(GRANT_S))
                arrived = self._produced(world, transfer, started)
                if not self.bounds.fine:
                    arrived = next(self._contact(arrived, transfer, started))[1]
                    arrived = self._asking(arrived, transfer)
                yield f"{who}: arrives", arrived
            if number >= 0:
                for label, moved in self._by_producer(world, transfer, number):
                    yield f"{who}: {label}", moved

    def _may_arrive(self, world: World, serving: Serving) -> bool:
        """Whether a ticket may reach prefill: the next ticket after the one before."""
        of_ticket = self.bounds.engines * self.bounds.writers
        return not any(number >= 0 for number in world.producers[: serving.ticket * of_ticket])

    def _by_producer(self, world: World, transfer: int, number: int) -> Moves:
        state = self._producers[number]
        if state.destinations is None:
            yield from self._contact(world, transfer, number)
        if self._producers.ask(number, "due", lambda p: p.due(0)):
            yield "asks", self._asking(world, transfer)
        for key in self._unanswered(number):
            after, _ = self._answer(number, key, 0, TimeoutError())
            yield f"decode {key[1]} does not answer", self._produced(world, transfer, after)
        for reader, age in world.awaited[transfer]:
            if age >= CONTROL_S:
                yield f"decode {reader} does not answer the report", self._unawaited(world, transfer, reader)
        yield from self._sending(world, transfer, number)

    def _unanswered(self, number: int) -> list[tuple[int, int]]:
        state = self._producers[number]
        if state.phase not in ASKING:
            return []
        return [key for key, d in (state.destinations or {}).items() if d.asking and -d.asked_at >= CONTROL_S]

    def _asking(self, world: World, transfer: int) -> World:
        for key in self._producers.ask(world.producers[transfer], "due", lambda p: p.due(0)):
            number = world.producers[transfer]
            after, _ = self._producers.after(number, ("asked", key), lambda p, key=key: p.asked(key, 0))
            world = world._replace(producers=put(world.producers, transfer, after))
            world = self._sent(world, Ask(transfer, key[1], 0))
        return world

    def _contact(self, world: World, transfer: int, number: int) -> Moves:
        writer = self.bounds.of(transfer).writer

        def contacted(state: PrefillTicket) -> None:
            ranks = (RankDescription(0, r, "", "", RankCaches((), ())) for r in range(self.bounds.readers))
            state.contacted({(0, rank.tp_rank): Destination(rank, (writer,)) for rank in ranks})

        def given_up(state: PrefillTicket) -> None:
            state.fail("nobody answers", PushFailure.UNREACHABLE)
            state.contacted({})

        after, _ = self._producers.after(number, ("contacted", writer), contacted)
        yield "learns where to write", self._produced(world, transfer, after)
        if self._producers[number].grant_deadline <= 0:
            after, _ = self._producers.after(number, "given up", given_up)
            yield "gives up finding out where to write", self._produced(world, transfer, after)

    def _sending(self, world: World, transfer: int, number: int) -> Moves:
        """Takes a step of the sender's thread."""
        sender = world.senders[transfer]
        writing = self._producers[number].phase is Phase.WRITING and not sender.planned
        if not writing or self._is_writing(world, transfer):
            return
        key = (0, sender.target)
        if sender.target == self.bounds.readers or self._producers[number].failure is not None:
            after, done = self._producers.after(number, "finish", lambda p: p.finish(0))
            if done is not None:
                yield "writes no more", self._produced(world, transfer, after)
            return
        after, may_write = self._may_write(number, key)
        if may_write is None:
            return
        told = self._produced(world, transfer, after)
        if may_write and not self.bounds.fine:
            yield f"begins to write to decode {key[1]}", self._begun(told, transfer)
        elif may_write:
            planned = sender._replace(planned=True)
            yield f"plans to write to decode {key[1]}", self._with_sender(told, transfer, planned)
        elif self._producers[after].failure is None:
            yield f"has nothing to write to decode {key[1]}", self._with_sender(told, transfer, Sender(key[1] + 1))
        else:
            yield f"may not write to decode {key[1]}", told

    def _may_write(self, number: int, key: RankKey) -> tuple[int, bool | None]:
        return self._producers.after(number, ("may write", key), lambda p: p.may_write(key, 0))

    def _begins(self, world: World) -> Moves:
        """Begins planned writes, because the link is free."""
        for transfer, sender in enumerate(world.senders):
            number = world.producers[transfer]
            runs = number >= 0 and self._runs(world, transfer)
            if not runs or not sender.planned or self._is_writing(world, transfer):
                continue
            key = (0, sender.target)
            who = self._who(transfer)
            if self._producers[number].lease_until(key) > 0:
                yield f"{who}: begins to write to decode {key[1]}", self._begun(world, transfer)
            else:
                after, _ = self._producers.after(
                    number, "fail", lambda p: p.fail("the leave to write ended", PushFailure.LEASE)
                )
                ended = self._with_sender(world, transfer, Sender(self.bounds.readers))
                yield f"{who}: begins no write to decode {key[1]}", self._produced(ended, transfer, after)

    def _is_writing(self, world: World, transfer: int) -> bool:
        return any(write.awaited and write.transfer == transfer for write in world.writes)

    def _begun(self, world: World, transfer: int) -> World:
        sender = world.senders[transfer]
        world = self._with_sender(world, transfer, sender._replace(planned=False))
        return world._replace(writes=world.writes | {Write(transfer, sender.target, SETTLE_S, SETTLE_S, True)})

    def _produced(self, world: World, transfer: int, after: int) -> World:
        """Follows up on a change of a prefill rank's ticket: notifies decode, and frees blocks as soon as allowed."""
        nobody = not world.awaited[transfer]
        after, (untold, success, settle_s, end) = self._producers.after(after, ("follow", nobody), _follow(nobody))
        world = world._replace(producers=put(world.producers, transfer, ENDED if end else after))
        if end and any(write.transfer == transfer and write.left >= 0 for write in world.writes):
            process = self.bounds.of(transfer).process
            return world._replace(wrong=f"R3: {process} frees blocks that a write still reads")
        if untold:
            world = world._replace(awaited=put(world.awaited, transfer, tuple((reader, 0) for reader in untold)))
        for reader in untold:
            world = self._sent(world, Told(transfer, reader, success, settle_s))
        return world

    def _unawaited(self, world: World, transfer: int, reader: int) -> World:
        left = tuple((r, age) for r, age in world.awaited[transfer] if r != reader)
        world = world._replace(awaited=put(world.awaited, transfer, left))
        return self._produced(world, transfer, world.producers[transfer])

    def _answer(self, number: int, key: tuple[int, int], age: int, answer: Any) -> tuple[int, Any]:
        event = ("answered", key, age, type(answer), getattr(answer, "retry", None))
        return self._producers.after(number, event, lambda p: p.answered(key, -age, answer))

    def _with_sender(self, world: World, transfer: int, sender: Sender) -> World:
        return world._replace(senders=put(world.senders, transfer, sender))


def _follow(nobody_awaited: bool) -> Any:
    def follow(state: PrefillTicket) -> tuple[list[int], bool, float, bool]:
        telling = state.phase is Phase.NOTIFYING and nobody_awaited
        untold: list[tuple[int, int]] = []
        while telling or state.begin_notifying(0):
            telling = False
            untold = list(state.next_round())
            if untold:
                break
        end = state.end()
        return [key[1] for key in untold], state.failure is None, state.settle_s(0), end

    return follow
