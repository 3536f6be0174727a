# SPDX-License-Identifier: Apache-2.0
"""A state of the ticket model (`ticket_model.py`), in which the product's state machines are numbers."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from vllm_ascend_pd.core.decode_ticket import DecodeTicket, TicketState
from vllm_ascend_pd.core.prefill_ticket import Phase, PrefillTicket

LEASE_S, SETTLE_S, GRANT_S, CONTROL_S, QUEUE_S, TRANSFER_S = 2, 1, 2, 1, 3, 3

# In place of a ticket's number: not known here yet; over (failed, received); its process has ended.
NOT_YET, FAILED, RECEIVED, DEAD = -1, -2, -3, -4
ENDED = FAILED
ASKING = (Phase.WRITING, Phase.FINISHED)


class Ask(NamedTuple):
    transfer: int
    reader: int
    age: int


class Answer(NamedTuple):
    transfer: int
    reader: int
    age: int  # of the request
    said: str


class Revoked(NamedTuple):
    transfer: int
    reader: int


class Told(NamedTuple):
    transfer: int
    reader: int
    success: bool
    settle_s: float


class Heard(NamedTuple):
    transfer: int
    reader: int


class Write(NamedTuple):
    """A write in flight. While its process is stopped, bytes in the network still arrive; the others have all of `left`
    afterwards. What is given up while its decode rank is stopped ends up in that rank's socket buffers.
    """

    transfer: int
    reader: int
    left: int  # units of time it may still take; -1 for what lies in socket buffers
    in_network: int  # and what the process has handed over
    awaited: bool  # else it was given up


class Sender(NamedTuple):
    """A prefill rank, which writes to one decode rank after the other. `planned`: it waits for the link."""

    target: int = 0
    planned: bool = False
    retried: bool = False


class World(NamedTuple):
    """One state.

    Decode's tickets are by number of the ticket, then rank; prefill's are by transfer. `awaited`: (decode rank, age) of
    reports without an answer.
    """

    consumers: tuple[int, ...]
    producers: tuple[int, ...]
    senders: tuple[Sender, ...]
    awaited: tuple[tuple[tuple[int, int], ...], ...]
    network: frozenset[Any] = frozenset()
    writes: frozenset[Write] = frozenset()
    landed: frozenset[tuple[int, int]] = frozenset()
    cancelled: frozenset[int] = frozenset()  # tickets that decode's scheduler has given up
    ended: frozenset[str] = frozenset()  # processes
    frozen: frozenset[str] = frozenset()  # those that are stopped, until they go on
    faults: int = 0
    wrong: str | None = None


def put(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


def only(at: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(number if i == at else DEAD for i, number in enumerate(numbers))


def describe(message: Any, who: Callable[[int], str]) -> str:
    pair = f"{who(message.transfer)}, decode {message.reader}"
    match message:
        case Ask():
            return f"{pair}: the request"
        case Answer():
            return f"{pair}: the answer {message.said}"
        case Told():
            return f"{pair}: the report of {'success' if message.success else 'failure'}"
        case Heard():
            return f"{pair}: the report's acknowledgement"
        case Write():
            return f"{pair}: the write"
    return f"{pair}: the revocation"


def copy_of_consumer(ticket: DecodeTicket) -> DecodeTicket:
    other = copy.copy(ticket)
    other._leases = {writer: replace(lease) for writer, lease in ticket._leases.items()}
    other._missing = set(ticket._missing)
    return other


def copy_of_producer(state: PrefillTicket) -> PrefillTicket:
    other = copy.copy(state)
    if state.destinations is not None:
        other.destinations = {key: copy.copy(destination) for key, destination in state.destinations.items()}
    return other


def consumer_key(ticket: DecodeTicket) -> Any:
    """Returns what decides about the future, with the current time as 0."""
    leases = frozenset(
        (
            *(w, 0 if lease.settled else lease.until, lease.reported, lease.settled),
            *(lease.gone and not lease.settled, lease.applied_at),
        )
        for w, lease in ticket._leases.items()
    )
    key = (ticket.state, leases)
    dates = (ticket.queue_deadline, ticket._begun_at)
    return (*key, dates, ticket._engine, frozenset(ticket._missing)) if ticket.state is TicketState.OPEN else key


def producer_key(state: PrefillTicket) -> Any:
    key = (state.phase, state.failure is None, state.settled_at, state.rounds, state.final)
    if state.destinations is None:
        return (*key, state.grant_deadline)
    if state.phase in (Phase.NOTIFYING, Phase.NOTIFIED, Phase.ENDED):
        return (*key, tuple((w.covers, w.acked) for w in state.destinations.values()))
    grants = tuple((d.covers, d.granted, d.until, d.asking, d.asked_at) for d in state.destinations.values())
    return (*key, state.grant_deadline, grants)


def age_consumer(ticket: DecodeTicket) -> None:
    ticket.queue_deadline = max(0, ticket.queue_deadline - 1)
    if ticket._begun_at is not None:
        ticket._begun_at = max(-ticket.transfer_s, ticket._begun_at - 1)
    for lease in ticket._leases.values():
        lease.until = max(0, lease.until - 1)
        lease.applied_at = _earlier(lease.applied_at)


def age_producer(state: PrefillTicket) -> None:
    state.settled_at = _earlier(state.settled_at)
    age_stopped_producer(state)


def age_stopped_producer(state: PrefillTicket) -> None:
    """Ages a stopped prefill rank. Its settling time stands still meanwhile."""
    state.grant_deadline = max(0, state.grant_deadline - 1)
    for destination in (state.destinations or {}).values():
        destination.until = _earlier(destination.until)
        destination.asked_at = max(-LEASE_S, destination.asked_at - 1)


def _earlier(date: float) -> float:
    return date - 1 if date > 1 else -math.inf
