# SPDX-License-Identifier: Apache-2.0
"""When the simulator's decode engines admit requests."""

import sys
from functools import partial
from typing import Any

from harness.documented import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))

from simulation.clock import Clock
from simulation.engines import DecodeEngine, DecodeSpeed, Request
from simulation.traffic import Arrival


def decode_engine(seen: list[tuple[str, float]], **speed: Any) -> tuple[Clock, DecodeEngine]:
    """`seen`: what the engine tells, with the time. A step with `n` requests takes `1 + n / 4` seconds."""
    clock = Clock()

    def tell(what: str, request: Request) -> None:
        seen.append((f"{request.arrival.salt} {what}", clock.now))

    told = (partial(tell, what) for what in ("admitted", "token", "ended"))
    return clock, DecodeEngine("d0", clock, DecodeSpeed(**{**STEP, **speed}), *told)


STEP = {"step_s": 1.0, "request_s": 0.25, "slots": 10, "tokens": 1000}


def test_an_idle_engine_admits_at_once() -> None:
    seen: list[tuple[str, float]] = []
    clock, engine = decode_engine(seen)
    clock.at(0.3, engine.add, Request(Arrival(0.3, 5, 5, 0)))
    clock.at(0.7, engine.add, Request(Arrival(0.7, 5, 5, 1)))  # the first one waits for its KV: no step is under way
    clock.run()
    assert seen == [("0 admitted", 0.3), ("1 admitted", 0.7)]


def test_a_busy_engine_admits_between_two_steps() -> None:
    """As vLLM does: its scheduler runs before each step. One that comes in the second of three steps has its ticket
    when that is over; two that come in one step have it together, and one that comes at a step's end at once."""
    seen: list[tuple[str, float]] = []
    clock, engine = decode_engine(seen)
    first = Request(Arrival(0.0, 5, 3, 0))
    engine.add(first)
    clock.at(1.0, engine.run, first)  # its steps end at 2.25, 3.5 and 4.75
    for number, at in enumerate((2.5, 3.0, 3.5, 5.0), 1):
        clock.at(at, engine.add, Request(Arrival(at, 5, 5, number)))
    clock.run()
    assert [(what, at) for what, at in seen if "admitted" in what] == [
        ("0 admitted", 0.0),
        ("1 admitted", 3.5),
        ("2 admitted", 3.5),
        ("3 admitted", 3.5),
        ("4 admitted", 5.0),
    ]
    assert [each for each in seen if each[0][0] == "0"][1:] == [("0 token", 2.25), ("0 ended", 4.75)]


def test_a_step_that_gets_longer_admits_later() -> None:
    """KV of another request arrives in the middle of a step."""
    seen: list[tuple[str, float]] = []
    clock, engine = decode_engine(seen)
    one, other, late = (Request(Arrival(0.0, 5, 4, number)) for number in range(3))
    engine.add(one)
    engine.add(other)
    clock.at(0.0, engine.run, one)  # a step takes 1.25 s
    clock.at(0.5, engine.add, late)
    clock.at(0.625, engine.run, other)  # and from now on 1.5: half of it is left
    clock.run()
    assert ("2 admitted", 0.625 + 0.75) in seen


def test_room_is_given_to_the_next_between_two_steps() -> None:
    """When one has its last token, in whose step another one goes on; and when a transfer has failed in the middle."""
    seen: list[tuple[str, float]] = []
    clock, engine = decode_engine(seen, slots=2)
    short, long, third, fourth = (Request(Arrival(0.0, 5, output, i)) for i, output in enumerate((1, 9, 9, 9)))
    for request in (short, long, third, fourth):
        engine.add(request)
    clock.at(0.0, engine.run, short)
    clock.at(0.0, engine.run, long)  # a step of both ends at 1.5; those after it take 1.25
    clock.at(2.0, engine.leave, third)
    clock.run()
    admitted = [each for each in seen if "admitted" in each[0]]
    assert admitted == [("0 admitted", 0.0), ("1 admitted", 0.0), ("2 admitted", 1.5), ("3 admitted", 2.75)]
