# SPDX-License-Identifier: Apache-2.0
"""A prompt with a ticket never waits for one that is held without: vLLM's scheduler computes both in small pools."""

import logging
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.v1.request import RequestStatus

from harness.held_prompts import *  # noqa: F403
from harness.held_prompts import PREFILL_FIRST, Prefill, refused, remembered_of, ticket_for
from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import BLOCK
from vllm_ascend_pd.core.caches import BlockNeeds, StateGroup, TokenGroup
from vllm_ascend_pd.core.protocol import OfferTicket, TicketRefused, TicketTaken
from vllm_ascend_pd.prefill.holding_room import HoldingRoom

LONGEST = 4 * BLOCK


def prompt_of(number: int, tokens: int = 40) -> list[int]:
    """A prompt of three blocks unless `tokens` says otherwise. Prompts of two numbers have no prefix in common."""
    return list(range(1000 * number, 1000 * number + tokens))


@pytest.fixture
def small(scheduled_model: Path) -> Iterator[Prefill]:
    """Its pool has room for the longest prompt, of four blocks, and for two prompts of three."""
    prefill = Prefill(scheduled_model, blocks=1 + 4 + 6, max_model_len=LONGEST)
    yield prefill
    prefill.close()


@pytest.fixture
def tiny(scheduled_model: Path) -> Iterator[Prefill]:
    """Its pool has room for the longest prompt, of four blocks, and for one of two blocks."""
    prefill = Prefill(scheduled_model, blocks=1 + 4 + 2, max_model_len=LONGEST)
    yield prefill
    prefill.close()


def ran(prefill: Prefill) -> set[str]:
    """The requests that run in a step of vLLM."""
    output, _ = prefill.step()
    return set(output.num_scheduled_tokens)


# --- the line --------------------------------------------------------------------------------------------------------


NEEDS = BlockNeeds(((TokenGroup(BLOCK), 4),), pool=10)


def admitted(room: HoldingRoom, *names: str) -> str:
    return "".join(name for name in names if room.may_start(name))


def test_prompts_start_in_their_order_of_arrival() -> None:
    room = HoldingRoom(NEEDS)
    for name, blocks in (("a", 4), ("b", 3), ("c", 1), ("d", 2)):
        room.add(name, blocks)
    assert admitted(room, *"abcd") == "a", "c would fit, and would pass b"
    room.remove("b")
    assert admitted(room, *"acd") == "ac"
    room.remove("a")
    assert admitted(room, *"cd") == "cd"
    assert not room.beyond


def test_a_prompt_that_never_fits_beside_the_longest_is_held_alone() -> None:
    room = HoldingRoom(NEEDS)
    for name, blocks in (("a", 1), ("b", 7), ("c", 1)):
        room.add(name, blocks)
    assert admitted(room, *"abc") == "a"
    room.remove("a")
    assert (admitted(room, *"bc"), room.beyond) == ("b", {"b"})
    room.remove("b")
    assert (admitted(room, "c"), room.beyond) == ("c", frozenset())


def test_a_prompt_that_vllm_starts_without_asking_takes_the_room_of_others() -> None:
    """vLLM 0.33 does so for requests that do not read the prefix cache."""
    room = HoldingRoom(NEEDS)
    for name, blocks in (("a", 5), ("b", 2), ("c", 1)):
        room.add(name, blocks)
    room.started("b")
    assert (admitted(room, *"abc"), room.beyond) == ("ab", {"b"})
    room.remove("a")
    assert admitted(room, *"bc") == "bc"


def test_needs_are_of_all_cache_groups() -> None:
    needs = BlockNeeds(((TokenGroup(16), 8), (TokenGroup(8, windowed=True), 3), (StateGroup(16), 2)), 20, lookahead=2)
    assert needs.of(14) == 1 + 2 + 2
    assert needs.of(15) == 2 + 3 + 2, "with drafted tokens"
    assert needs.of(1000) == needs.longest == 13
    assert needs.beside_longest == 7


@pytest.mark.parametrize("groups", [{}, {"windows": [17]}, {"windows": [40, 24], "states": 2}])
def test_no_prompt_takes_more_blocks_than_it_needs(scheduled_model: Path, groups: dict[str, Any]) -> None:
    prefill = Prefill(scheduled_model, step_tokens=64, **groups)
    for number, tokens in enumerate((1, BLOCK, 65, 200, 510)):
        request = prefill.add(f"r{number}", prompt_of(number, tokens + 1), PREFILL_FIRST)
        needs, taken = prefill.held._blocks_of(request), 0
        for _ in range(12):
            prefill.run()
            taken = max(taken, prefill.all_free - prefill.free)
        assert request.is_finished()
        assert 0 < taken <= needs <= prefill.held._needs.longest
        prefill.clock.now += 481
        step, _ = prefill.run()
        prefill.run(sent=step.unsent)
    prefill.close()


# --- with vLLM -------------------------------------------------------------------------------------------------------


def test_a_prompt_with_a_ticket_is_computed_although_others_are_held(small: Prefill) -> None:
    for number in range(3):
        small.add(f"held{number}", prompt_of(number), PREFILL_FIRST)
    assert ran(small) == {"held0", "held1"}
    prompt = prompt_of(9, 63)
    small.add("early", prompt, msgspec.to_builtins(ticket_for(prompt)))
    assert ran(small) == {"early"}
    small.run()
    small.run(sent={"early"})
    assert ran(small) == set()
    small.clock.now += 481
    step, _ = small.run()
    assert step.unsent == {"held0", "held1"}
    assert ran(small) == {"held2"}


def test_a_prompt_does_not_wait_for_room_once_its_ticket_has_come(small: Prefill) -> None:
    """Routers for Mooncake ask both sides at once."""
    for number in range(3):
        small.add(f"r{number}", prompt_of(number), {**PREFILL_FIRST, "transfer_id": f"xfer-{number}"})
    assert ran(small) == {"r0", "r1"}
    ticket = ticket_for(prompt_of(2))
    assert small.offer("xfer-2", ticket) == TicketTaken()
    small.run()
    step, _ = small.run()
    assert step.tickets == {"r2": ticket}
    assert [(send.start, send.stop, send.last) for send in step.sends] == [(0, 40, True)]
    small.run()
    small.run(sent={"r2"})
    assert small.free == small.all_free - 6


def test_a_client_that_leaves_the_line_leaves_nothing(small: Prefill) -> None:
    for number in range(4):
        small.add(f"r{number}", prompt_of(number), PREFILL_FIRST)
    assert ran(small) == {"r0", "r1"}
    small.vllm.finish_requests("r2", RequestStatus.FINISHED_ABORTED)
    small.clock.now += 481
    step, _ = small.run()
    _, [output] = small.run(sent=step.unsent)
    assert output.request_id == "r3"
    small.clock.now += 481
    step, _ = small.run()
    small.run(sent=step.unsent)
    assert remembered_of(small) == {}
    assert not small.held.room._admitted
    assert not small.held.room._waiting


def test_a_long_prompt_in_a_small_pool_is_held_alone(tiny: Prefill) -> None:
    said = [tiny.answered("long", prompt_of(0), {**PREFILL_FIRST, "transfer_id": "xfer-1"})]
    tiny.add("short", prompt_of(1, 8), PREFILL_FIRST)
    assert ran(tiny) == set()
    ticket = ticket_for(prompt_of(0))
    tiny.offer(said[0]["transfer_id"], ticket)
    assert tiny.run()[0].tickets == {"long": ticket}
    assert ran(tiny) == {"short"}


def test_a_long_prompt_in_a_small_pool_makes_way_for_a_ticket(tiny: Prefill) -> None:
    tiny.answered("long", prompt_of(0), {**PREFILL_FIRST, "transfer_id": "xfer-1"})
    few = prompt_of(8, 20)
    tiny.add("few", few, msgspec.to_builtins(ticket_for(few)))
    step, _ = tiny.run()
    assert (set(step.tickets), step.unsent) == ({"few"}, set()), "there are blocks for both"
    many = prompt_of(9, 63)
    tiny.add("many", many, msgspec.to_builtins(ticket_for(many)))
    step, _ = tiny.run()
    assert step.unsent == {"long"}
    tiny.run(sent={"few", "long"})
    assert ran(tiny) == {"many"}
    late = ticket_for(prompt_of(0))
    tiny.offer("xfer-1", late)
    tiny.run()
    assert "too few blocks" in refused(tiny, "xfer-1", late)


def test_a_long_prompt_in_a_small_pool_stays_while_other_prompts_with_tickets_end(tiny: Prefill) -> None:
    tiny.answered("long", prompt_of(0), {**PREFILL_FIRST, "transfer_id": "xfer-1"})
    for number in (7, 8):  # there are blocks for one of them at a time
        few = prompt_of(number, 20)
        tiny.add(f"few{number}", few, msgspec.to_builtins(ticket_for(few)))
    step, _ = tiny.run()
    assert (set(step.tickets), step.unsent) == ({"few7"}, set())
    tiny.run()
    assert ran(tiny) == set()
    tiny.run(sent={"few7"})
    step, _ = tiny.run()
    assert "few8" in step.tickets or "few8" in step.finished
    assert not step.unsent


def test_a_long_prompt_is_not_held_if_a_ticket_waits_at_its_end(tiny: Prefill) -> None:
    many = prompt_of(9, 63)
    tiny.add("long", prompt_of(0), PREFILL_FIRST)
    tiny.add("many", many, msgspec.to_builtins(ticket_for(many)))
    _, [output] = tiny.run()
    assert output.request_id == "long"
    assert "too few blocks" in output.kv_transfer_params["error"]
    assert ran(tiny) == {"many"}


@pytest.mark.parametrize(("blocks", "warns"), [(8, True), (9, False)])
def test_a_pool_too_small_for_two_of_the_longest_is_warned_of(
    scheduled_model: Path, caplog: pytest.LogCaptureFixture, blocks: int, warns: bool
) -> None:
    logger = logging.getLogger("vllm.vllm_ascend_pd.connector.build")
    logger.addHandler(caplog.handler)
    try:
        Prefill(scheduled_model, blocks=blocks, max_model_len=LONGEST).close()
    finally:
        logger.removeHandler(caplog.handler)
    assert ("prompts that wait for decode share 3 blocks" in caplog.text) == warns


# --- both orders mixed -----------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A client's request. `decode`: the number of its decode engine, `prefill`: of its prefill engine."""

    name: str
    prompt: list[int]
    prefill_first: bool
    decode: int
    prefill: int
    transfer_id: str | None = None
    ticket: Any = None
    steps_left: int = 3
    failure: str | None = None

    @property
    def blocks(self) -> int:
        return -(-len(self.prompt) // BLOCK) + 1


@dataclass
class Decode:
    """A decode engine's blocks: requests take theirs in their order of arrival, and keep them until they have ended."""

    free: int
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)


class Cluster:
    """Prefill engines with vLLM's scheduler, and decode engines that count blocks."""

    def __init__(self, prefills: list[Prefill], seed: str) -> None:
        self.random = random.Random(seed)
        self.prefills = self.random.sample(prefills, self.random.randint(1, len(prefills)))
        self.decodes = [Decode(self.random.randint(6, 10)) for _ in range(self.random.randint(1, 4))]
        self.jobs = [self.job(f"{seed}-{number}") for number in range(24)]
        self.to_come = deque(self.jobs)
        self.on_prefill = {job.name: job for job in self.jobs}
        self.sent: list[set[str]] = [set() for _ in self.prefills]
        self.left = len(self.jobs)

    def job(self, name: str) -> Job:
        prompt = [self.random.randrange(1 << 14) for _ in range(self.random.randint(1, LONGEST - 1))]
        first, engines = self.random.random() < 0.5, (len(self.decodes), len(self.prefills))
        return Job(name, prompt, first, *map(self.random.randrange, engines))

    def run(self) -> list[str]:
        """Runs until all requests have ended, or nothing happens any more. Returns the names of those that have not."""
        idle = 0
        while self.left and idle < 10:
            events = self.arrive() + sum(map(self.serve, self.decodes))
            events += sum(self.step(number) for number in range(len(self.prefills)))
            idle = 0 if events else idle + 1
        return [job.name for job in self.jobs if job.steps_left and job.failure is None]

    def arrive(self) -> int:
        """Clients come faster than they are served."""
        number = min(len(self.to_come), self.random.randint(0, 6))
        for _ in range(number):
            job = self.to_come.popleft()
            if job.prefill_first:
                self.prefills[job.prefill].add(job.name, job.prompt, PREFILL_FIRST)
            else:
                self.decodes[job.decode].waiting.append(job)
        return number

    def serve(self, decode: Decode) -> int:
        events = 0
        while decode.waiting and decode.waiting[0].blocks <= decode.free:
            job, events = decode.waiting.popleft(), events + 1
            decode.free -= job.blocks
            job.ticket, prefill = ticket_for(job.prompt), self.prefills[job.prefill]
            if job.prefill_first:
                offer = OfferTicket(prefill.engine_id, job.transfer_id, job.ticket)
                answer = prefill.held.listener._handle(offer, SimpleNamespace(host="127.0.0.1"))
                assert isinstance(answer, TicketTaken | TicketRefused), answer
            else:
                prefill.add(job.name, job.prompt, msgspec.to_builtins(job.ticket))
        for job in decode.running[:]:
            job.steps_left, events = job.steps_left - 1, events + 1
            if not job.steps_left:
                decode.running.remove(job)
                self.end(job)
        return events

    def step(self, number: int) -> int:
        """A step of a prefill engine, whose ranks send a prompt until the next one."""
        prefill = self.prefills[number]
        for name in (sent := self.sent[number]):
            if (job := self.on_prefill[name]).ticket is not None:
                self.decodes[job.decode].running.append(job)
        step, outputs = prefill.run(sent=sent)
        self.sent[number] = set(step.finished) | step.unsent
        for output in outputs:
            job, said = self.on_prefill[output.request_id], output.kv_transfer_params or {}
            if "error" in said:
                job.failure = said["error"]
                self.end(job)
            elif output.finished and job.prefill_first and job.ticket is None:
                job.transfer_id = said["transfer_id"]
                self.decodes[job.decode].waiting.append(job)
        return step.computes + len(sent) + len(self.sent[number]) + self.refuse(number)

    def refuse(self, number: int) -> int:
        """Ends requests whose tickets a prefill engine refuses."""
        prefill, events = self.prefills[number], 0
        for job in self.jobs:
            if job.prefill == number and job.transfer_id and job.ticket and job.failure is None and job.steps_left:
                known = prefill.held.listener._tickets.get(job.ticket.ticket_id)
                if known is not None and isinstance(answer := prefill.held.listener._answer(known), TicketRefused):
                    job.failure, events = answer.reason, events + 1
                    self.end(job)
        return events

    def end(self, job: Job) -> None:
        self.left -= 1
        if job.ticket is not None:
            self.decodes[job.decode].free += job.blocks


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Prefill]]:
    """Three prefill engines whose pools have these numbers of blocks."""
    model = request.getfixturevalue("scheduled_model")
    prefills = [Prefill(model, blocks=1 + blocks, max_model_len=LONGEST, step_tokens=32) for blocks in request.param]
    yield prefills
    for prefill in prefills:
        prefill.close()


AMPLE, SMALL = (8, 9, 12), (4, 5, 7)


@pytest.mark.parametrize("engines", [AMPLE], indirect=True)
@pytest.mark.parametrize("seed", range(10))
def test_mixed_orders_do_not_stall(engines: list[Prefill], seed: int) -> None:
    cluster = Cluster(engines, f"{seed}")
    assert cluster.run() == []
    assert [job.failure for job in cluster.jobs if job.failure] == []
    assert all(prefill.free == prefill.all_free for prefill in engines)


@pytest.mark.parametrize("engines", [SMALL], indirect=True)
@pytest.mark.parametrize("seed", range(10))
def test_mixed_orders_in_a_pool_too_small_for_both(engines: list[Prefill], seed: int) -> None:
    """Held prompts may fail there. Those with a ticket from the start do not."""
    cluster = Cluster(engines, f"{seed}")
    assert cluster.run() == []
    assert [job.failure for job in cluster.jobs if job.failure and not job.prefill_first] == []
    assert all("too few blocks" in job.failure for job in cluster.jobs if job.failure)


@pytest.mark.parametrize("engines", [AMPLE, SMALL], indirect=True)
def test_mixed_orders_stall_without_the_rule(engines: list[Prefill], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HoldingRoom, "may_start", lambda self, request_id: True)
    monkeypatch.setattr(HoldingRoom, "beyond", frozenset())
    assert any(Cluster(engines, f"{seed}").run() for seed in range(20))
