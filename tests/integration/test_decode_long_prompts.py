# SPDX-License-Identifier: Apache-2.0
"""Long prompts on decode, which prefill computes before they get blocks, with vLLM's own scheduler."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from harness.decode_scheduler import BLOCK, LONGEST, EngineScheduler
from harness.scheduling import remembered

MakeScheduler = Callable[..., EngineScheduler]

SHORT, LONG = 2 * BLOCK, 4 * BLOCK

orders = pytest.mark.parametrize("order", ["fcfs", "priority"])
schedulers = pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler], ids=["", "async"])


@pytest.fixture
def make(make_any: MakeScheduler) -> Iterator[MakeScheduler]:
    made = []

    def make_scheduler(*args: Any, **of: Any) -> EngineScheduler:
        made.append(make_any(*args, prefill_first=SHORT, **of))
        return made[-1]

    yield make_scheduler
    for decode in made:
        assert not remembered(decode.connector._role._intents)
        decode.close()


@schedulers
def test_by_default_the_proxy_says_which_prompts_are_long(
    make_any: MakeScheduler, monkeypatch: pytest.MonkeyPatch, scheduler: type[Scheduler]
) -> None:
    """It has learned that of prefill engines. If it says nothing, all prompts get blocks at once."""
    decode = make_any(blocks=5 * LONGEST, scheduler_class=scheduler)
    decode.add("untold", LONG)
    decode.add("short", SHORT, first=1000, first_tokens=SHORT)
    decode.add("long", LONG, first=2000, first_tokens=SHORT)
    decode.step()
    assert decode.intents == ["long"]
    assert sorted(decode.expected) == ["short", "untold"]
    decode.computed_first("long")
    decode.run()
    assert decode.tickets == 3
    assert remembered(decode.connector._role._intents) == {}
    decode.close()


def asked(decode: EngineScheduler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that vLLM asks for, from now on."""
    names: list[str] = []
    role = decode.connector._role
    ask = role.matched_tokens

    def matched_tokens(request: Any, computed: int) -> int | None:
        names.append(request.request_id)
        return ask(request, computed)

    monkeypatch.setattr(role, "matched_tokens", matched_tokens)
    return names


@orders
@schedulers
def test_blocks_are_taken_when_prefill_has_computed(
    make: MakeScheduler, monkeypatch: pytest.MonkeyPatch, order: str, scheduler: type[Scheduler]
) -> None:
    """In the order of arrival among those that are computed. Nobody asks for the others meanwhile."""
    decode = make(blocks=5 * LONGEST, order=order, scheduler_class=scheduler)
    names = [f"long-{number}" for number in range(6)]
    for number, name in enumerate(names):
        decode.add(name, LONG, first=1000 * number)
    decode.step()
    assert decode.intents == names
    assert decode.free == decode.all_free
    while_computing = asked(decode, monkeypatch)
    for _ in range(5):
        decode.step()
    assert while_computing == []
    decode.add("short", SHORT, first=9000)  # overtakes them
    decode.step()
    assert list(decode.expected) == ["short"]
    decode.computed_first("long-4", "long-1")
    for _ in range(3):
        decode.step()
    assert [name for name in decode.expected if name != "short"] == ["long-1", "long-4"]
    decode.computed_first("long-0", "long-2", "long-3", "long-5")
    for _ in range(3):
        decode.step()
    assert [name for name in decode.expected if name.startswith("long")][2:] == ["long-0", "long-2", "long-3", "long-5"]
    decode.run()
    assert decode.tickets == 7


def test_one_that_does_not_fit_keeps_its_place(make: MakeScheduler) -> None:
    """Those that come after it are posted: prefill has something to compute meanwhile."""
    decode = make(blocks=LONG // BLOCK + 2)
    decode.add("first", LONG)
    decode.step()
    decode.computed_first("first")
    for _ in range(3):
        decode.step()
    assert list(decode.expected) == ["first"]
    decode.add("second", LONG, first=1000)
    decode.step()
    decode.computed_first("second")
    for _ in range(3):
        decode.step()
    assert list(decode.expected) == ["first"]
    decode.add("third", LONG, first=2000)
    for _ in range(3):
        decode.step()
    assert decode.intents == ["first", "second", "third"]
    decode.computed_first("third")
    decode.run()


def test_intents_leave_while_all_seats_are_taken(make: MakeScheduler) -> None:
    """vLLM asks for nobody then."""
    decode = make(blocks=4 * LONGEST, max_num_seqs=1)
    decode.add("runs", BLOCK, generates=20, remote=False)
    decode.step()
    decode.add("long", LONG, first=1000)
    decode.step()
    assert decode.intents == ["long"]
    decode.computed_first("long")
    decode.run(100)


def test_a_prefix_that_decode_has(make: MakeScheduler) -> None:
    """What is left of the prompt is short, also where vLLM does not ask."""
    decode = make(blocks=4 * LONGEST, max_num_seqs=1, caching=True)
    decode.add("before", LONG - BLOCK, remote=False)
    decode.run()
    decode.add("runs", BLOCK, generates=20, remote=False, first=5000)
    decode.step()
    decode.add("known", LONG)
    decode.step()
    assert decode.intents == []
    decode.run(100)


@pytest.mark.parametrize("kind", ["windowed", "states"])
@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
def test_caches_of_several_kinds(make: MakeScheduler, kind: str, caching: bool) -> None:
    """Decode computes the last token itself, so the ticket is for one less. What decode has in its cache is not asked
    for."""
    decode = make(blocks=6 * LONGEST, caching=caching, max_num_seqs=2, **{kind: True})
    decode.add("before", LONG - BLOCK, first=5000)
    decode.step()
    decode.computed_first("before")
    decode.run()
    decode.metaserver.posted.clear()
    names = [f"long-{number}" for number in range(4)]
    for number, name in enumerate(names):
        decode.add(name, LONG, first=1000 * number)
    decode.add("known", LONG, first=5000)  # most of it is cached, if anything is
    for _ in range(3):
        decode.step()
    assert [name for name in decode.intents if name != "known"] == names
    assert {body["num_tokens"] for body in decode.metaserver.posted} == {LONG - 1}
    assert decode.free == decode.all_free or decode.expected.keys() == {"known"}
    decode.computed_first(*names, "known")
    decode.run(100)
    assert decode.given_up == []


@orders
@schedulers
@pytest.mark.parametrize("failures", ["fail", "recompute"])
def test_an_engine_that_computes_no_prompts(
    make: MakeScheduler, order: str, scheduler: type[Scheduler], failures: str
) -> None:
    """Long prompts are computed first. A request that is preempted has a ticket, and gets the next one at once."""
    decode = make(blocks=LONGEST, order=order, scheduler_class=scheduler, failures=failures, who_computes="never")
    names = ["first", "grows"]
    for number, name in enumerate(names):
        decode.add(name, 3 * BLOCK, generates=4 * BLOCK, first=1000 * number)
    decode.step()
    assert decode.intents == names
    assert decode.free == decode.all_free
    decode.computed_first(*names)
    request = decode.vllm.requests["grows"]
    tickets = decode.connector._role._transfers
    while not (request.num_preemptions and "grows" in decode.expected):
        if not request.num_preemptions:
            decode.arrives(*decode.expected)
        decode.step()
    [intent] = [body for body in decode.metaserver.posted if body["request_id"] == "grows" and "transfer_id" in body]
    assert tickets["grows"].ticket.replaces == intent["ticket_id"]
    decode.run(400)
    assert decode.intents == names
    assert decode.given_up == []


def test_prefill_that_fails_for_an_engine_that_computes_no_prompts(make: MakeScheduler) -> None:
    decode = make(blocks=4 * LONGEST, failures="recompute", who_computes="never")
    decode.add("long", LONG)
    decode.step()
    decode.computed_first("long", failure="prefill failed, for a test")
    decode.run()
    assert decode.given_up == ["long"]


def test_a_client_that_leaves(make: MakeScheduler) -> None:
    decode = make(blocks=4 * LONGEST)
    for number in range(3):
        decode.add(f"long-{number}", LONG, first=1000 * number)
    decode.step()
    posted = {body["request_id"]: body["ticket_id"] for body in decode.metaserver.posted}
    decode.abort("long-1")
    decode.step()
    assert decode.metaserver.cancelled == [posted["long-1"]]
    decode.computed_first("long-0", "long-1", "long-2")
    decode.run()
    assert decode.tickets == 2


@pytest.mark.parametrize("failures", ["fail", "recompute"])
def test_prefill_that_fails(make: MakeScheduler, failures: str) -> None:
    decode = make(blocks=4 * LONGEST, failures=failures)
    decode.add("long", LONG)
    decode.step()
    decode.computed_first("long", failure="prefill failed, for a test")
    decode.run()
    assert decode.tickets == 0
    assert decode.given_up == (["long"] if failures == "fail" else [])


def test_a_request_that_is_preempted_while_others_wait(make: MakeScheduler) -> None:
    """Decode computes it again, and the queue keeps its order."""
    decode = make(blocks=LONGEST + 1)
    grow = [decode.add(f"grows {n}", BLOCK, generates=6 * BLOCK, remote=False, first=500 * n) for n in range(2)]
    decode.step()
    decode.add("long", LONG, first=1000)
    decode.add("longer", LONG, first=2000)
    for _ in range(8 * BLOCK):
        decode.step()
    assert any(request.num_preemptions for request in grow)
    assert decode.intents == ["long", "longer"]
    decode.computed_first("long", "longer")
    decode.run(40 * BLOCK)
