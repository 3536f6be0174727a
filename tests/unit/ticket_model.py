# SPDX-License-Identifier: Apache-2.0
"""A model of the ticket protocol in which everything can go wrong.

The product's own state machines (`ticket_ranks.py`) run in it. The model delivers, loses, repeats and delays messages,
and stops and ends processes. All ranks of prefill write to all ranks of decode. Two tickets name the same blocks, one
after the other. Two prefill engines may get the same ticket.
"""

from typing import Any

from ticket_ranks import Bounds, Moves, Ranks
from ticket_world import (
    ASKING,
    CONTROL_S,
    DEAD,
    ENDED,
    FAILED,
    LEASE_S,
    NOT_YET,
    RECEIVED,
    SETTLE_S,
    Answer,
    Ask,
    Heard,
    Sender,
    Told,
    World,
    Write,
    age_consumer,
    age_producer,
    age_stopped_producer,
    describe,
    only,
    put,
)

from vllm_ascend_pd.core.decode_ticket import DecodeTicket, TicketState
from vllm_ascend_pd.core.prefill_ticket import Phase, PrefillTicket
from vllm_ascend_pd.core.protocol import Granted, GrantRefused
from vllm_ascend_pd.core.reasons import PushFailure


class TicketModel(Ranks):
    def __init__(self, bounds: Bounds, producer: type[PrefillTicket], consumer: type[DecodeTicket]) -> None:
        super().__init__(bounds, producer, consumer)
        self._end_alone: set[Any] = set()

    def initial(self) -> World:
        transfers = len(self.bounds.transfers)
        world = World(
            (NOT_YET,) * self.bounds.at_reader(self.bounds.tickets, 0),
            (NOT_YET,) * transfers,
            (Sender(),) * transfers,
            ((),) * transfers,
            faults=self.bounds.faults,
        )
        return self._issued(world, 0)

    def wrong(self, world: World) -> str | None:
        return world.wrong or self._never_ends(world)

    def moves(self, world: World) -> Moves:
        moved = False
        for label, after in self._moves(world):
            after = self._without_idle_messages(after)
            moved = moved or after != world
            yield label, after
        waiting = any(number >= 0 for number in world.consumers)
        if waiting and not moved:
            yield (
                "nothing happens any more",
                world._replace(wrong="R4: decode waits for ever"),
            )

    def _moves(self, world: World) -> Moves:
        due = [*self._on_decode(world), *self._on_prefill(world), *self._deliveries(world)]
        slow = [*self._arrivals(world), *self._begins(world)]
        if not self.bounds.fine:
            due += slow
            slow = []
        yield from due
        yield from slow
        yield from self._strays(world)
        for process in world.frozen:
            gone_on = self._gone_on if process in self.bounds.processes else self._decode_gone_on
            yield f"{process} goes on", gone_on(world, process)
        reused = any(number not in (NOT_YET, DEAD) for number in world.consumers[self.bounds.readers :])
        if world.faults > 0 and not reused:
            poorer = world._replace(faults=world.faults - 1)
            yield from self._faults(poorer)
            if due:
                yield from self._time(poorer)
        if not due:
            yield from self._time(world)

    # The network.

    def _sent(self, world: World, message: Any) -> World:
        if not self.bounds.fine and isinstance(message, Answer | Heard) and self._runs(world, message.transfer):
            return self._delivered(world, message) if self._matters(world, message) else world
        return world._replace(network=world.network | {message})

    def _without_idle_messages(self, world: World) -> World:
        """Returns the world without messages that nobody will read, since they change nothing."""
        idle = [message for message in world.network if not self._matters(world, message)]
        return world._replace(network=world.network.difference(idle)) if idle else world

    def _matters(self, world: World, message: Any) -> bool:
        producer = world.producers[message.transfer]
        consumer = world.consumers[self._reader_of(message)]
        if isinstance(message, Ask | Told):
            return consumer >= 0 or (consumer != DEAD and producer >= 0)
        if isinstance(message, Answer | Heard):
            return producer >= 0
        if producer == ENDED:
            return consumer >= 0
        return producer >= 0 and self._producers[producer].phase is Phase.WRITING

    def _reader_of(self, message: Any) -> int:
        return self.bounds.at_reader(self.bounds.of(message.transfer).ticket, message.reader)

    def _deliveries(self, world: World) -> Moves:
        for message in world.network:
            if self._is_read(world, message):
                rest = world._replace(network=world.network - {message})
                yield f"{describe(message, self._who)} arrives", self._delivered(rest, message)

    def _is_read(self, world: World, message: Any) -> bool:
        """Whether the process that the message is for runs."""
        if isinstance(message, Ask | Told):
            return not self._is_frozen(world, message.reader)
        return self._runs(world, message.transfer)

    def _delivered(self, world: World, message: Any) -> World:
        transfer, reader = message[:2]
        at = self._reader_of(message)
        consumer, producer = world.consumers[at], world.producers[transfer]
        if isinstance(message, Ask):
            answer = GrantRefused("no", retry=False)
            if consumer >= 0:
                after, answer = self._decided(consumer, transfer)
                world = self._consumed(world, at, after)
            said = "later" if isinstance(answer, GrantRefused) and answer.retry else type(answer).__name__
            return self._sent(world, Answer(transfer, reader, message.age, said))
        if isinstance(message, Told):
            if consumer >= 0:
                world = self._consumed(world, at, self._heard(consumer, message))
            return self._sent(world, Heard(transfer, reader))
        if isinstance(message, Answer):
            state = self._producers[producer]
            destination = (state.destinations or {})[0, reader]
            if state.phase not in ASKING or not destination.asking or -destination.asked_at != message.age:
                return world  # no longer waited for
            later = GrantRefused("not yet", retry=True)
            answers = {"Granted": Granted(LEASE_S), "later": later}
            answered = answers.get(message.said, GrantRefused("no", retry=False))
            after, _ = self._answer(producer, (0, reader), message.age, answered)
            return self._produced(world, transfer, after)
        if isinstance(message, Heard):
            if reader not in dict(world.awaited[transfer]):
                return world
            after, _ = self._producers.after(producer, ("told", reader), lambda p: p.acked((0, reader)))
            world = world._replace(producers=put(world.producers, transfer, after))
            return self._unawaited(world, transfer, reader)
        if producer == ENDED:  # who does not know the transfer any more has stopped
            return self._sent(world, Told(transfer, reader, False, 0))
        after, _ = self._producers.after(
            producer, "revoked", lambda p: p.fail("decode took the ticket back", PushFailure.REVOKED)
        )
        return self._produced(world, transfer, after)

    # Writes on their way.

    def _arrivals(self, world: World) -> Moves:
        for write in world.writes:
            if write.awaited and self._runs(world, write.transfer):
                if f"decode {write.reader}" in world.ended | world.frozen:
                    yield from self._failures_of(world, write)
                    continue
                sender = world.senders[write.transfer]
                moved = self._with_sender(self._landed(world, write), write.transfer, Sender(sender.target + 1))
                yield f"{describe(write, self._who)} is written", moved

    def _strays(self, world: World) -> Moves:
        for write in world.writes:
            if not (write.awaited or self._is_stopped(world, write) or self._is_frozen(world, write.reader)):
                yield f"{describe(write, self._who)}, given up, arrives all the same", self._landed(world, write)

    def _is_stopped(self, world: World, write: Write) -> bool:
        return self.bounds.of(write.transfer).process in world.frozen

    def _landed(self, world: World, write: Write) -> World:
        world = world._replace(writes=world.writes - {write}, landed=world.landed | {(write.transfer, write.reader)})
        serving = self.bounds.of(write.transfer)
        owner = world.consumers[self._reader_of(write)]
        if owner in (FAILED, RECEIVED):
            follows = self.bounds.at_reader(serving.ticket + 1, 0)
            taken = follows < len(world.consumers) and world.consumers[follows] != NOT_YET
            by = f"belong to ticket {serving.ticket + 2}" if taken else "decode has already given back or decodes in"
        elif owner >= 0 and self._owner_of(self._consumers[owner]) not in (None, serving.engine_id):
            return world._replace(wrong=f"R10: {self._who(write.transfer)} writes for another engine's ticket")
        else:
            return world
        return world._replace(wrong=f"R2: a write of {self._who(write.transfer)} lands in blocks that {by}")

    def _failures_of(self, world: World, write: Write) -> Moves:
        """Yields worlds in which a write fails. The first failure may be followed by a second try."""
        transfer = write.transfer
        stray = (
            set()
            if f"decode {write.reader}" in world.ended
            else {_with_left(write._replace(awaited=False), min(write.left, SETTLE_S - 1))}
        )
        world = world._replace(writes=world.writes - {write} | stray)
        sender = world.senders[transfer]
        after, _ = self._producers.after(world.producers[transfer], "unsettle", lambda p: p.delay_settling(SETTLE_S))
        if not sender.retried:
            again = self._with_sender(world, transfer, Sender(sender.target, retried=True))
            yield f"{describe(write, self._who)} fails, and is tried again", self._produced(again, transfer, after)
        after, _ = self._producers.after(after, "fail", lambda p: p.fail("a write failed", PushFailure.WRITE))
        yield f"{describe(write, self._who)} fails", self._produced(world, transfer, after)

    # What goes wrong, and time.

    def _faults(self, world: World) -> Moves:
        for message in world.network:
            what = describe(message, self._who)
            yield f"{what} is lost", world._replace(network=world.network - {message})
            if self._is_read(world, message):
                yield f"{what} arrives, and will once more", self._delivered(world, message)
        for write in world.writes:
            if write.awaited and self._runs(world, write.transfer):
                yield from self._failures_of(world, write)
        for ticket in range(self.bounds.tickets):
            first = self.bounds.at_reader(ticket, 0)
            readers = world.consumers[first : first + self.bounds.readers]
            if ticket not in world.cancelled and any(number >= 0 for number in readers):
                yield f"the client leaves (ticket {ticket + 1})", world._replace(cancelled=world.cancelled | {ticket})
        for process, transfers in self.bounds.processes.items():
            if process not in world.ended:
                yield f"{process} is killed", self._prefill_killed(world, process, transfers)
                if process not in world.frozen and any(world.producers[transfer] >= 0 for transfer in transfers):
                    yield f"{process} is stopped", world._replace(frozen=world.frozen | {process})
        for reader in range(self.bounds.readers):
            if (process := f"decode {reader}") not in world.ended:
                yield f"{process} is killed", self._decode_killed(world, reader)
                if self.bounds.stops and process not in world.frozen:
                    yield f"{process} is stopped", world._replace(frozen=world.frozen | {process})

    def _decode_gone_on(self, world: World, process: str) -> World:
        """What lies in its socket buffers is applied before `SETTLE_S` is over."""
        for at, number in enumerate(world.consumers):
            if number >= 0 and process == f"decode {at % self.bounds.readers}":
                after, _ = self._consumers.after(number, "resumed", lambda c: c.resumed(0, SETTLE_S))
                world = world._replace(consumers=put(world.consumers, at, after))
        return world._replace(frozen=world.frozen - {process})

    def _gone_on(self, world: World, process: str) -> World:
        own = {write for write in world.writes if self.bounds.of(write.transfer).process == process}
        # As with a write that is given up, what it sends from now on arrives before `SETTLE_S` is over.
        writes = world.writes - own | {write._replace(in_network=min(write.left, SETTLE_S - 1)) for write in own}
        return world._replace(writes=writes, frozen=world.frozen - {process})

    def _prefill_killed(self, world: World, process: str, transfers: list[int]) -> World:
        """Returns the world after a prefill process was killed. What it handed to the network goes on."""
        for transfer in transfers:
            world = world._replace(producers=put(world.producers, transfer, DEAD))
        own = {write for write in world.writes if write.transfer in transfers}
        left = {_with_left(write._replace(awaited=False), write.in_network) for write in own if write.in_network >= 0}
        return world._replace(
            writes=world.writes - own | left, ended=world.ended | {process}, frozen=world.frozen - {process}
        )

    def _decode_killed(self, world: World, reader: int) -> World:
        for ticket in range(self.bounds.tickets):
            at = self.bounds.at_reader(ticket, reader)
            if world.consumers[at] != NOT_YET:
                world = world._replace(consumers=put(world.consumers, at, DEAD))
        gone = {write for write in world.writes if write.reader == reader and not write.awaited}
        process = {f"decode {reader}"}
        return world._replace(writes=world.writes - gone, ended=world.ended | process, frozen=world.frozen - process)

    def _time(self, world: World) -> Moves:
        """Yields the world a unit of time later, unless the transfer engine would break its promise about a write."""
        if any(write.awaited and write.left == 0 and not self._is_stopped(world, write) for write in world.writes):
            return
        stopped = {write for write in world.writes if write.left >= 0 and self._is_stopped(world, write)}
        old = {write for write in world.writes - stopped if write.left <= 0}
        aged = {_with_left(write, write.left - 1) for write in world.writes - old - stopped}
        aged |= {write._replace(left=-1, in_network=0) for write in old if self._is_frozen(world, write.reader)}
        aged |= {write._replace(in_network=max(-1, write.in_network - 1)) for write in stopped}
        world = world._replace(
            consumers=tuple(n if n < 0 else self._consumers.after(n, "time", age_consumer)[0] for n in world.consumers),
            producers=tuple(
                n if n < 0 else self._aged(world, transfer, n) for transfer, n in enumerate(world.producers)
            ),
            awaited=tuple(tuple((r, min(age + 1, CONTROL_S)) for r, age in waits) for waits in world.awaited),
            network=frozenset(
                message._replace(age=min(message.age + 1, LEASE_S)) if isinstance(message, Ask | Answer) else message
                for message in world.network
            ),
            writes=frozenset(aged),
        )
        for transfer in self.bounds.transfers:
            number = world.producers[transfer]
            if number >= 0 and self._runs(world, transfer):
                world = self._produced(world, transfer, number)
                if not self.bounds.fine:
                    world = self._on_time(world, transfer)
        for at, number in enumerate(world.consumers):
            if number < 0 or self._is_frozen(world, at % self.bounds.readers):
                continue
            if not self.bounds.fine:
                world = self._consumed(world, at, self._ticked(world, number)[0])
            if (number := world.consumers[at]) >= 0 and self._consumers[number].state is not TicketState.OPEN:
                world = self._revoked(world, at % self.bounds.readers, self._consumers[number])
        yield "time passes", world

    def _aged(self, world: World, transfer: int, number: int) -> int:
        if self.bounds.of(transfer).process in world.frozen:
            return self._producers.after(number, "stopped", age_stopped_producer)[0]
        return self._producers.after(number, "time", age_producer)[0]

    def _on_time(self, world: World, transfer: int) -> World:
        """Does what a prefill rank does by the clock."""
        for key in self._unanswered(world.producers[transfer]):
            after, _ = self._answer(world.producers[transfer], key, 0, TimeoutError())
            world = world._replace(producers=put(world.producers, transfer, after))
        for reader, age in world.awaited[transfer]:
            if age >= CONTROL_S and world.producers[transfer] >= 0:
                world = self._unawaited(world, transfer, reader)
        return self._asking(world, transfer) if world.producers[transfer] >= 0 else world

    # R4.

    def _never_ends(self, world: World) -> str | None:
        """Returns who would wait for ever if no message and no byte arrived from now on. Stopped processes are resumed
        or killed.
        """
        everyone = frozenset(self.bounds.processes)
        for at, number in enumerate(world.consumers):
            if number >= 0 and number not in self._end_alone:
                alone = world._replace(consumers=only(at, world.consumers), producers=(DEAD,) * len(world.producers))
                if not self._ends(alone._replace(writes=frozenset(), ended=everyone, frozen=frozenset())):
                    return f"R4: if nothing arrives any more, decode {at % self.bounds.readers} waits for ever"
                self._end_alone.add(number)
        for transfer, number in enumerate(world.producers):
            if number < 0:
                continue
            writes = frozenset(write for write in world.writes if write.awaited and write.transfer == transfer)
            key = (number, world.senders[transfer], world.awaited[transfer], bool(writes))
            if key not in self._end_alone:
                alone = world._replace(
                    consumers=(DEAD,) * len(world.consumers), producers=only(transfer, world.producers)
                )
                if not self._ends(alone._replace(writes=writes, frozen=frozenset())):
                    return f"R4: if nothing arrives any more, {self.bounds.of(transfer).process} waits for ever"
                self._end_alone.add(key)
        return None

    def _ends(self, world: World) -> bool:
        world = world._replace(faults=self.bounds.faults)
        for _ in range(100):
            if all(number < 0 for number in world.consumers + world.producers):
                return True
            failures = (move for write in world.writes if write.awaited for move in self._failures_of(world, write))
            moves = [*self._on_decode(world), *self._on_prefill(world), *self._begins(world), *failures]
            world = (moves or list(self._time(world)))[-1][1]._replace(network=frozenset())
        return False


def _with_left(write: Write, left: int) -> Write:
    return write._replace(left=left, in_network=left)
