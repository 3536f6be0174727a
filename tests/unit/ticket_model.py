# SPDX-License-Identifier: Apache-2.0
"""The ticket protocol in a world where everything goes wrong: the product's own state machines, and around them what
delivers, loses, repeats, delays and ends. All ranks of prefill write to all ranks of decode; two tickets name the
same blocks, one after the other.

Time is whole units, relative: "now" is always 0, and a unit that passes moves everything that has a date. Only what
the product computes from its constants orders events. What the transfer engine promises is taken for true: bytes of a
write arrive within `SETTLE_S` of its beginning or never, and a write that was given up no later than that.

Within its bounds a model has all interleavings. `faults` bounds how often something goes wrong in a run: a message is
lost or arrives twice, a write fails, a rank ends, the client leaves, or a unit of time passes although something else
is about to happen (whatever that is, it is late then).

Three things keep it small and lose nothing. What an event makes of a ticket is worked out once (`Numbered`). Tickets
share nothing but blocks: the second is served when prefill has done with the first, and nothing goes wrong with it.
And unless it is `fine`, what only its receiver sees is not held up: answers arrive with what they answer, planned
writes begin, clocks are looked at when a unit has passed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from explore import Numbered
from ticket_world import (
    ASKING,
    CONTROL_S,
    DEAD,
    ENDED,
    FAILED,
    GRANT_S,
    LEASE_S,
    NOT_YET,
    RECEIVED,
    SETTLE_S,
    TRANSFER_S,
    Answer,
    Ask,
    Heard,
    Revoked,
    Sender,
    Told,
    World,
    Write,
    age_consumer,
    age_producer,
    consumer_key,
    copy_of_consumer,
    copy_of_producer,
    describe,
    only,
    producer_key,
    put,
)
from tickets import DIGEST, P_TP, TICKET_ID

from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.producer_ticket import Destination, Phase, ProducerTicket
from vllm_ascend_pd.core.protocol import Granted, GrantRequest, RankDescription, Refused, Report, Writer
from vllm_ascend_pd.core.ticket import ConsumerTicket, State

Moves = Iterator[tuple[str, World]]


@dataclass(frozen=True)
class Bounds:
    writers: int
    readers: int
    tickets: int
    faults: int
    fine: bool = False


class TicketModel:
    """`producer` and `consumer`: the state machines, or what is to be tried in their place."""

    def __init__(
        self,
        bounds: Bounds,
        producer: type[ProducerTicket] = ProducerTicket,
        consumer: type[ConsumerTicket] = ConsumerTicket,
    ) -> None:
        self.bounds = bounds
        self._make_producer, self._make_consumer = producer, consumer
        self._consumers = Numbered[ConsumerTicket](copy_of_consumer, consumer_key)
        self._producers = Numbered[ProducerTicket](copy_of_producer, producer_key)
        self._end_alone: set[Any] = set()

    def initial(self) -> World:
        by_reader, by_writer = self._at_reader(self.bounds.tickets, 0), self._at_writer(self.bounds.tickets, 0)
        world = World(
            (NOT_YET,) * by_reader,
            (NOT_YET,) * by_writer,
            (Sender(),) * by_writer,
            ((),) * by_writer,
            faults=self.bounds.faults,
        )
        return self._issued(world, 0)

    def wrong(self, world: World) -> str | None:
        return world.wrong or self._never_ends(world)

    def moves(self, world: World) -> Moves:
        return ((label, self._without_idle_messages(after)) for label, after in self._moves(world))

    def _moves(self, world: World) -> Moves:
        due = [*self._on_decode(world), *self._on_prefill(world), *self._deliveries(world)]
        slow = [*self._arrivals(world), *self._begins(world)]
        if not self.bounds.fine:
            due += slow
            slow = []
        yield from due
        yield from slow
        yield from self._strays(world)
        reused = any(number not in (NOT_YET, DEAD) for number in world.consumers[self.bounds.readers :])
        if world.faults > 0 and not reused:
            poorer = world._replace(faults=world.faults - 1)
            yield from self._faults(poorer)
            if due:
                yield from self._time(poorer)
        if not due:
            yield from self._time(world)

    # Decode.

    def _issued(self, world: World, ticket: int) -> World:
        made = self._make_consumer(TICKET_ID, 0, DIGEST, TRANSFER_S, LEASE_S)
        made.expect("prefill", P_TP, frozenset((writer, writer) for writer in range(self.bounds.writers)))
        number = self._consumers.add(made)
        for reader in range(self.bounds.readers):
            world = world._replace(consumers=put(world.consumers, self._at_reader(ticket, reader), number))
        return world

    def _on_decode(self, world: World) -> Moves:
        for ticket in range(self.bounds.tickets):
            numbers = [world.consumers[self._at_reader(ticket, reader)] for reader in range(self.bounds.readers)]
            for reader, number in enumerate(numbers):
                if number < 0:
                    continue
                who = f"decode {reader}, ticket {ticket + 1}"
                after, quiet = self._consumers.after(number, "tick", _tick)
                if after != number or quiet:
                    yield f"{who}: looks at the clock", self._consumed(world, ticket, reader, after)
                if ticket in world.cancelled and self._consumers[number].state is State.OPEN:
                    after, _ = self._consumers.after(number, "cancel", lambda c: c.fail("cancelled"))
                    yield f"{who}: is cancelled", self._consumed(world, ticket, reader, after)
            following = self._at_reader(ticket + 1, 0)
            over = all(number in (FAILED, RECEIVED) for number in numbers)
            if over and ticket + 1 < self.bounds.tickets and world.consumers[following] == NOT_YET:
                yield f"decode: gives the blocks to ticket {ticket + 2}", self._issued(world, ticket + 1)

    def _consumed(self, world: World, ticket: int, reader: int, after: int) -> World:
        """A decode rank's ticket has changed: what failed is revoked, what is quiet is over."""
        at = self._at_reader(ticket, reader)
        before = self._consumers[world.consumers[at]]
        now = self._consumers[after]
        if now.state is State.FAILED and before.state is State.OPEN:
            revoked = {Revoked(ticket, writer.rank, reader) for writer in now.live_writers()}
            world = world._replace(network=world.network | revoked, cancelled=world.cancelled | {ticket})
        if now.state is State.RECEIVED and before.state is State.OPEN:
            for writer in range(self.bounds.writers):
                if (ticket, writer, reader) not in world.landed:
                    return world._replace(wrong=f"R1: decode {reader} counts as received what prefill {writer} lacks")
        if self._consumers.ask(after, "quiet", lambda c: c.quiet(0)):
            after = FAILED if now.state is State.FAILED else RECEIVED
        return world._replace(consumers=put(world.consumers, at, after))

    # Prefill.

    def _on_prefill(self, world: World) -> Moves:
        for ticket in range(self.bounds.tickets):
            if world.consumers[self._at_reader(ticket, 0)] == NOT_YET:
                break
            busy = any(number >= 0 for number in world.producers[: self._at_writer(ticket, 0)])
            for writer in range(self.bounds.writers):
                number = world.producers[self._at_writer(ticket, writer)]
                who = f"prefill {writer}, ticket {ticket + 1}"
                if number == NOT_YET and f"prefill {writer}" not in world.ended and not busy:
                    started = self._producers.add(self._make_producer(GRANT_S))
                    arrived = self._produced(world, ticket, writer, started)
                    if not self.bounds.fine:
                        arrived = next(self._contact(arrived, ticket, writer, started))[1]
                        arrived = self._asking(arrived, ticket, writer)
                    yield f"{who}: arrives", arrived
                if number >= 0:
                    for label, moved in self._by_producer(world, ticket, writer, number):
                        yield f"{who}: {label}", moved

    def _by_producer(self, world: World, ticket: int, writer: int, number: int) -> Moves:
        state = self._producers[number]
        if state.destinations is None:
            yield from self._contact(world, ticket, writer, number)
        if self._producers.ask(number, "due", lambda p: p.due(0)):
            yield "asks", self._asking(world, ticket, writer)
        for key in self._unanswered(number):
            after, _ = self._answer(number, key, 0, TimeoutError())
            yield f"decode {key[1]} does not answer", self._produced(world, ticket, writer, after)
        for reader, age in world.awaited[self._at_writer(ticket, writer)]:
            if age >= CONTROL_S:
                yield f"decode {reader} does not answer the report", self._unawaited(world, ticket, writer, reader)
        yield from self._sending(world, ticket, writer, number)

    def _unanswered(self, number: int) -> list[tuple[int, int]]:
        state = self._producers[number]
        if state.phase not in ASKING:
            return []
        return [key for key, d in (state.destinations or {}).items() if d.asking and -d.asked_at >= CONTROL_S]

    def _asking(self, world: World, ticket: int, writer: int) -> World:
        at = self._at_writer(ticket, writer)
        for key in self._producers.ask(world.producers[at], "due", lambda p: p.due(0)):
            after, _ = self._producers.after(world.producers[at], ("asked", key), lambda p, key=key: p.asked(key, 0))
            world = self._sent(
                world._replace(producers=put(world.producers, at, after)), Ask(ticket, writer, key[1], 0)
            )
        return world

    def _contact(self, world: World, ticket: int, writer: int, number: int) -> Moves:
        def contacted(state: ProducerTicket) -> None:
            ranks = (RankDescription(0, r, "", "", RankCaches((), ())) for r in range(self.bounds.readers))
            state.contacted({(0, rank.tp_rank): Destination(rank, (writer,)) for rank in ranks})

        def given_up(state: ProducerTicket) -> None:
            state.fail("nobody answers")
            state.contacted({})

        after, _ = self._producers.after(number, ("contacted", writer), contacted)
        yield "learns where to write", self._produced(world, ticket, writer, after)
        if self._producers[number].grant_deadline <= 0:
            after, _ = self._producers.after(number, "given up", given_up)
            yield "gives up finding out where to write", self._produced(world, ticket, writer, after)

    def _sending(self, world: World, ticket: int, writer: int, number: int) -> Moves:
        """The thread that writes."""
        sender = world.senders[self._at_writer(ticket, writer)]
        writing = self._producers[number].phase is Phase.WRITING and not sender.planned
        if not writing or self._is_writing(world, ticket, writer):
            return
        key = (0, sender.target)
        if sender.target == self.bounds.readers or self._producers[number].failure is not None:
            after, done = self._producers.after(number, "finish", lambda p: p.finish(0))
            if done is not None:
                yield "writes no more", self._produced(world, ticket, writer, after)
        else:
            after, may_write = self._producers.after(number, "known", lambda p: p.known(0))
            if may_write:
                after, may_write = self._producers.after(after, ("may write", key), lambda p: p.may_write(key, 0))
            if may_write and not self.bounds.fine:
                begun = self._begun(self._produced(world, ticket, writer, after), ticket, writer, key[1])
                yield f"begins to write to decode {key[1]}", begun
            elif may_write:
                planned = self._with_sender(world, ticket, writer, sender._replace(planned=True))
                yield f"plans to write to decode {key[1]}", self._produced(planned, ticket, writer, after)
            elif may_write is False:
                yield f"may not write to decode {key[1]}", self._produced(world, ticket, writer, after)

    def _begins(self, world: World) -> Moves:
        """Writes that were planned find the link free."""
        for at, sender in enumerate(world.senders):
            ticket, writer = divmod(at, self.bounds.writers)
            number = world.producers[at]
            if number < 0 or not sender.planned or self._is_writing(world, ticket, writer):
                continue
            key = (0, sender.target)
            who = f"prefill {writer}, ticket {ticket + 1}"
            if self._producers.ask(number, ("holds", key), lambda p, key=key: p.holds(key, 0)):
                yield f"{who}: begins to write to decode {key[1]}", self._begun(world, ticket, writer, key[1])
            else:
                after, _ = self._producers.after(number, "fail", lambda p: p.fail("the leave to write ended"))
                ended = self._with_sender(world, ticket, writer, Sender(self.bounds.readers))
                yield f"{who}: begins no write to decode {key[1]}", self._produced(ended, ticket, writer, after)

    def _is_writing(self, world: World, ticket: int, writer: int) -> bool:
        return any(write.awaited and write[:2] == (ticket, writer) for write in world.writes)

    def _begun(self, world: World, ticket: int, writer: int, reader: int) -> World:
        sender = world.senders[self._at_writer(ticket, writer)]
        world = self._with_sender(world, ticket, writer, sender._replace(planned=False))
        return world._replace(writes=world.writes | {Write(ticket, writer, reader, SETTLE_S, True)})

    def _produced(self, world: World, ticket: int, writer: int, after: int) -> World:
        """A prefill rank's ticket has changed: decode is told, and the blocks are free, as soon as may be."""
        at = self._at_writer(ticket, writer)
        nobody = not world.awaited[at]
        after, (untold, success, settle_s, end) = self._producers.after(after, ("follow", nobody), _follow(nobody))
        world = world._replace(producers=put(world.producers, at, ENDED if end else after))
        if end and any((write.ticket, write.writer) == (ticket, writer) for write in world.writes):
            return world._replace(wrong=f"R3: prefill {writer} frees blocks that a write still reads")
        if untold:
            world = world._replace(awaited=put(world.awaited, at, tuple((reader, 0) for reader in untold)))
        for reader in untold:
            world = self._sent(world, Told(ticket, writer, reader, success, settle_s))
        return world

    def _unawaited(self, world: World, ticket: int, writer: int, reader: int) -> World:
        at = self._at_writer(ticket, writer)
        left = tuple((r, age) for r, age in world.awaited[at] if r != reader)
        return self._produced(world._replace(awaited=put(world.awaited, at, left)), ticket, writer, world.producers[at])

    def _answer(self, number: int, key: tuple[int, int], age: int, answer: Any) -> tuple[int, Any]:
        event = ("answered", key, age, type(answer))
        return self._producers.after(number, event, lambda p: p.answered(key, -age, answer))

    # The network.

    def _sent(self, world: World, message: Any) -> World:
        if not self.bounds.fine and isinstance(message, Answer | Heard):
            return self._delivered(world, message) if self._matters(world, message) else world
        return world._replace(network=world.network | {message})

    def _without_idle_messages(self, world: World) -> World:
        """What nobody will take changes nothing."""
        idle = [message for message in world.network if not self._matters(world, message)]
        return world._replace(network=world.network.difference(idle)) if idle else world

    def _matters(self, world: World, message: Any) -> bool:
        producer = world.producers[self._at_writer(message.ticket, message.writer)]
        consumer = world.consumers[self._at_reader(message.ticket, message.reader)]
        if isinstance(message, Ask | Told):
            return consumer >= 0 or (consumer != DEAD and producer >= 0)
        return producer >= 0

    def _deliveries(self, world: World) -> Moves:
        for message in world.network:
            rest = world._replace(network=world.network - {message})
            yield f"{describe(message)} arrives", self._delivered(rest, message)

    def _delivered(self, world: World, message: Any) -> World:
        ticket, writer, reader = message[:3]
        consumer = world.consumers[self._at_reader(ticket, reader)]
        producer = world.producers[self._at_writer(ticket, writer)]
        if isinstance(message, Ask):
            granted = False
            if consumer >= 0:
                rank = Writer("prefill", 0, writer)
                request = GrantRequest(TICKET_ID, 0, DIGEST, rank, P_TP, (writer,), SETTLE_S)
                event = ("grant", writer)
                after, answer = self._consumers.after(consumer, event, lambda c: c.grant(request, 0))
                world = self._consumed(world, ticket, reader, after)
                granted = isinstance(answer, Granted)
            return self._sent(world, Answer(ticket, writer, reader, message.age, granted))
        if isinstance(message, Told):
            if consumer >= 0:
                reason = None if message.success else "it broke"
                report = Report(TICKET_ID, 0, Writer("prefill", 0, writer), reason, settle_s=message.settle_s)
                event = ("report", writer, message.success, message.settle_s)
                after, _ = self._consumers.after(consumer, event, lambda c: c.report(report, 0))
                world = self._consumed(world, ticket, reader, after)
            return self._sent(world, Heard(ticket, writer, reader))
        if isinstance(message, Answer):
            state = self._producers[producer]
            destination = (state.destinations or {})[0, reader]
            if state.phase not in ASKING or not destination.asking or -destination.asked_at != message.age:
                return world  # no longer waited for
            answer = Granted(LEASE_S) if message.granted else Refused("no", retry=False)
            after, _ = self._answer(producer, (0, reader), message.age, answer)
            return self._produced(world, ticket, writer, after)
        if isinstance(message, Heard):
            if reader not in dict(world.awaited[self._at_writer(ticket, writer)]):
                return world
            after, _ = self._producers.after(producer, ("told", reader), lambda p: p.told((0, reader)))
            at = self._at_writer(ticket, writer)
            return self._unawaited(world._replace(producers=put(world.producers, at, after)), ticket, writer, reader)
        after, _ = self._producers.after(producer, "revoked", lambda p: p.fail("decode took the ticket back"))
        return self._produced(world, ticket, writer, after)

    # Writes on their way.

    def _arrivals(self, world: World) -> Moves:
        for write in world.writes:
            if write.awaited:
                ticket, writer, reader = write[:3]
                if f"decode {reader}" in world.ended:
                    yield from self._failures_of(world, write)
                    continue
                sender = world.senders[self._at_writer(ticket, writer)]
                moved = self._with_sender(self._landed(world, write), ticket, writer, Sender(sender.target + 1))
                yield f"{describe(write)} is written", moved

    def _strays(self, world: World) -> Moves:
        for write in world.writes:
            if not write.awaited:
                yield f"{describe(write)}, given up, arrives all the same", self._landed(world, write)

    def _landed(self, world: World, write: Write) -> World:
        world = world._replace(writes=world.writes - {write}, landed=world.landed | {write[:3]})
        owner = world.consumers[self._at_reader(write.ticket, write.reader)]
        if owner in (FAILED, RECEIVED):
            follows = (write.ticket + 1) * self.bounds.readers
            taken = follows < len(world.consumers) and world.consumers[follows] != NOT_YET
            by = f"belong to ticket {write.ticket + 2}" if taken else "decode has already given back or decodes in"
            return world._replace(
                wrong=f"R2: a write of prefill {write.writer} for ticket {write.ticket + 1} lands in blocks that {by}"
            )
        return world

    def _failures_of(self, world: World, write: Write) -> Moves:
        """The call that wrote comes back with an error. The first is followed by another try, or not."""
        ticket, writer, reader = write[:3]
        at = self._at_writer(ticket, writer)
        stray = (
            set()
            if f"decode {reader}" in world.ended
            else {write._replace(awaited=False, left=min(write.left, SETTLE_S - 1))}
        )
        world = world._replace(writes=world.writes - {write} | stray)
        sender = world.senders[at]
        after, _ = self._producers.after(world.producers[at], "unsettle", lambda p: p.unsettle(SETTLE_S))
        if not sender.retried:
            again = self._with_sender(world, ticket, writer, Sender(sender.target, retried=True))
            yield f"{describe(write)} fails, and is tried again", self._produced(again, ticket, writer, after)
        after, _ = self._producers.after(after, "fail", lambda p: p.fail("a write failed"))
        yield f"{describe(write)} fails", self._produced(world, ticket, writer, after)

    def _with_sender(self, world: World, ticket: int, writer: int, sender: Sender) -> World:
        return world._replace(senders=put(world.senders, self._at_writer(ticket, writer), sender))

    # What goes wrong, and time.

    def _faults(self, world: World) -> Moves:
        for message in world.network:
            yield f"{describe(message)} is lost", world._replace(network=world.network - {message})
            yield f"{describe(message)} arrives, and will once more", self._delivered(world, message)
        for write in world.writes:
            if write.awaited:
                yield from self._failures_of(world, write)
        for ticket in range(self.bounds.tickets):
            readers = [world.consumers[self._at_reader(ticket, reader)] for reader in range(self.bounds.readers)]
            if ticket not in world.cancelled and any(number >= 0 for number in readers):
                yield f"the client leaves (ticket {ticket + 1})", world._replace(cancelled=world.cancelled | {ticket})
        for writer in range(self.bounds.writers):
            if f"prefill {writer}" not in world.ended:
                yield f"prefill {writer} is killed", self._prefill_killed(world, writer)
        for reader in range(self.bounds.readers):
            if f"decode {reader}" not in world.ended:
                yield f"decode {reader} is killed", self._decode_killed(world, reader)

    def _prefill_killed(self, world: World, writer: int) -> World:
        """What it handed to the network goes on by itself."""
        for ticket in range(self.bounds.tickets):
            world = world._replace(producers=put(world.producers, self._at_writer(ticket, writer), DEAD))
        writes = frozenset(write._replace(awaited=write.awaited and write.writer != writer) for write in world.writes)
        return world._replace(writes=writes, ended=world.ended | {f"prefill {writer}"})

    def _decode_killed(self, world: World, reader: int) -> World:
        for ticket in range(self.bounds.tickets):
            at = self._at_reader(ticket, reader)
            if world.consumers[at] != NOT_YET:
                world = world._replace(consumers=put(world.consumers, at, DEAD))
        gone = {write for write in world.writes if write.reader == reader and not write.awaited}
        return world._replace(writes=world.writes - gone, ended=world.ended | {f"decode {reader}"})

    def _time(self, world: World) -> Moves:
        """A unit passes; not while the engine would have to break its promise about a write."""
        if any(write.awaited and write.left == 0 for write in world.writes):
            return
        old = {write for write in world.writes if write.left == 0}
        world = world._replace(
            consumers=tuple(n if n < 0 else self._consumers.after(n, "time", age_consumer)[0] for n in world.consumers),
            producers=tuple(n if n < 0 else self._producers.after(n, "time", age_producer)[0] for n in world.producers),
            awaited=tuple(tuple((r, min(age + 1, CONTROL_S)) for r, age in waits) for waits in world.awaited),
            network=frozenset(
                message._replace(age=min(message.age + 1, LEASE_S)) if isinstance(message, Ask | Answer) else message
                for message in world.network
            ),
            writes=frozenset(write._replace(left=write.left - 1) for write in world.writes - old),
        )
        for ticket in range(self.bounds.tickets):
            for writer in range(self.bounds.writers):
                number = world.producers[self._at_writer(ticket, writer)]
                if number >= 0:
                    world = self._produced(world, ticket, writer, number)
                    if not self.bounds.fine:
                        world = self._on_time(world, ticket, writer)
        if not self.bounds.fine:
            for ticket in range(self.bounds.tickets):
                for reader in range(self.bounds.readers):
                    number = world.consumers[self._at_reader(ticket, reader)]
                    if number >= 0:
                        after, _ = self._consumers.after(number, "tick", _tick)
                        world = self._consumed(world, ticket, reader, after)
        yield "time passes", world

    def _on_time(self, world: World, ticket: int, writer: int) -> World:
        """What a prefill rank does by the clock."""
        at = self._at_writer(ticket, writer)
        for key in self._unanswered(world.producers[at]):
            world = world._replace(
                producers=put(world.producers, at, self._answer(world.producers[at], key, 0, TimeoutError())[0])
            )
        for reader, age in world.awaited[at]:
            if age >= CONTROL_S and world.producers[at] >= 0:
                world = self._unawaited(world, ticket, writer, reader)
        return self._asking(world, ticket, writer) if world.producers[at] >= 0 else world

    # R4.

    def _never_ends(self, world: World) -> str | None:
        """Who would wait for ever if from now on nothing arrived any more: no message, no byte. Then each is alone."""
        for at, number in enumerate(world.consumers):
            if number >= 0 and number not in self._end_alone:
                alone = world._replace(consumers=only(at, world.consumers), producers=(DEAD,) * len(world.producers))
                if not self._ends(alone._replace(writes=frozenset())):
                    return f"R4: if nothing arrives any more, decode {at % self.bounds.readers} waits for ever"
                self._end_alone.add(number)
        for at, number in enumerate(world.producers):
            if number < 0:
                continue
            ticket, writer = divmod(at, self.bounds.writers)
            writes = frozenset(write for write in world.writes if write.awaited and write[:2] == (ticket, writer))
            key = (number, world.senders[at], world.awaited[at], bool(writes))
            if key not in self._end_alone:
                alone = world._replace(consumers=(DEAD,) * len(world.consumers), producers=only(at, world.producers))
                if not self._ends(alone._replace(writes=writes)):
                    return f"R4: if nothing arrives any more, prefill {writer} waits for ever"
                self._end_alone.add(key)
        return None

    def _ends(self, world: World) -> bool:
        for _ in range(100):
            if all(number < 0 for number in world.consumers + world.producers):
                return True
            failures = (move for write in world.writes if write.awaited for move in self._failures_of(world, write))
            moves = [*self._on_decode(world), *self._on_prefill(world), *self._begins(world), *failures]
            world = (moves or list(self._time(world)))[-1][1]._replace(network=frozenset())
        return False

    # Small change.

    def _at_writer(self, ticket: int, writer: int) -> int:
        return ticket * self.bounds.writers + writer

    def _at_reader(self, ticket: int, reader: int) -> int:
        return ticket * self.bounds.readers + reader


def _tick(ticket: ConsumerTicket) -> bool:
    ticket.tick(0)
    return ticket.quiet(0)


def _follow(nobody_awaited: bool) -> Any:
    def follow(state: ProducerTicket) -> tuple[list[int], bool, float, bool]:
        telling = state.phase is Phase.TELLING and nobody_awaited
        untold = list(state.next_round()) if state.tell(0) or telling else []
        end = state.end(0)
        return [key[1] for key in untold], state.failure is None, state.settle_s(0), end

    return follow
