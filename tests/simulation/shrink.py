# SPDX-License-Identifier: Apache-2.0
"""Looks for the shortest scenario that still fails: without faults, with smaller engines, with fewer events.

Less of one thing moves what happens to the others, so each candidate runs in several orders of threads.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from simulation.scenario import Event, Faults, Scenario, Shape
from simulation.world import World

# Runs of one candidate, each in another order.
_ORDERS = 4


def kind(world: World) -> str | None:
    """Returns what makes two violations the same: the text without numbers. None if there is no violation."""
    return re.sub(r"\d+", "#", world.violations[0])[:60] if world.violations else None


@dataclass
class Shortest:
    """The shortest scenario so far, and the order of threads in which it fails."""

    scenario: Scenario
    order: int
    world: World
    # Runs so far.
    runs: int = 1


def shrink(scenario: Scenario, most_runs: int = 400) -> Shortest:
    """Returns the shortest scenario with the same violation. Raises ValueError if there is none."""
    world = World(scenario).run()
    wanted = kind(world)
    if wanted is None:
        raise ValueError("nothing is violated")
    best = Shortest(scenario, 0, world)

    def fails(candidate: Scenario) -> bool:
        for order in dict.fromkeys([best.order, *range(_ORDERS)]):
            if best.runs >= most_runs:
                return False
            best.runs += 1
            world = World(candidate, order).run()
            if kind(world) == wanted:
                best.scenario, best.order, best.world = candidate, order, world
                return True
        return False

    _without_events(best, fails)
    for candidate in _simpler(best):
        fails(candidate)
    _without_events(best, fails)
    return best


def _simpler(best: Shortest) -> Iterator[Scenario]:
    """Yields scenarios with one fault less, and with smaller engines."""
    for field in fields(Faults):
        if getattr(best.scenario.faults, field.name) != field.default:
            yield replace(best.scenario, faults=replace(best.scenario.faults, **{field.name: field.default}))
    for field in fields(Shape):
        if field.name not in ("pool", "prefill_blocks", "decode_blocks") and (
            getattr(best.scenario.shape, field.name) != field.default
        ):
            yield replace(best.scenario, shape=replace(best.scenario.shape, **{field.name: field.default}))


def _without_events(best: Shortest, fails: Callable[[Scenario], bool]) -> None:
    """Leaves out as many events as possible (delta debugging)."""
    parts = 2
    while len(best.scenario.events) > 1:
        events = best.scenario.events
        size = max(1, len(events) // parts)
        for first in range(0, len(events), size):
            fewer = _consistent(events[:first] + events[first + size :])
            if fewer and fails(replace(best.scenario, events=fewer)):
                parts = max(2, parts - 1)
                break
        else:
            if size == 1:
                return
            parts = min(len(events), 2 * parts)


def _consistent(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Leaves out departures of clients that never came."""
    names = {each.args[0] for each in events if each.what == "request"}
    return tuple(each for each in events if each.what != "leave" or each.args[0] in names)
