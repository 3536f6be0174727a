# SPDX-License-Identifier: Apache-2.0
"""Prompts that a router asks prefill for first: vLLM's scheduler computes them, decode's tickets come afterwards, or
decode says that none will come."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from harness.held_prompts import *  # noqa: F403
from harness.held_prompts import (
    OTHER,
    PREFILL_FIRST,
    PROMPT,
    Prefill,
    refused,
    remembered_of,
    ticket_for,
    until,
)
from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import BLOCK
from vllm_ascend_pd.core.hosts import AnyHost, HostList
from vllm_ascend_pd.core.protocol import Acknowledged, TicketRefused, TicketTaken
from vllm_ascend_pd.core.step import Send, WorkerReport
from vllm_ascend_pd.decode.bootstrap import parse_holder
from vllm_ascend_pd.decode.prefill_admission import PrefillAdmission
from vllm_ascend_pd.decode.ticket_client import NoRecipientError
from vllm_ascend_pd.prefill import held_prompts
from vllm_ascend_pd.prefill.ticket_listener import NO_PROMPT
from vllm_ascend_pd.transport.peers import Peers
from vllm_ascend_pd.transport.secret_files import cluster_secret, new_secret


def test_a_ticket_that_comes_when_the_prompt_is_computed(prefill: Prefill) -> None:
    said = prefill.answered("r")
    transfer_id = said["transfer_id"]
    said.pop("remote_prefill_cached_tokens", None)  # vLLM's own
    assert said == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": prefill.engine_id,
        "transfer_id": transfer_id,
        "ticket_host": "127.0.0.1",
        "ticket_port": prefill.held.listener.port,
        "hold_timeout_s": held_prompts.HOLD_TIMEOUT_S,
    }
    assert prefill.free == prefill.all_free - 3
    step, _ = prefill.run()
    assert (step.tickets, step.awaits_tickets, step.computes) == ({}, True, False)
    assert prefill.vllm.has_requests()

    ticket = ticket_for(PROMPT)
    assert prefill.offer(transfer_id, ticket) == TicketTaken()
    assert prefill.offer(transfer_id, ticket) == TicketTaken(), "it is known already"
    step, _ = prefill.run()
    assert step.tickets == {"r": ticket}
    [send] = step.sends
    assert (send.start, send.stop, send.last, len(send.blocks[0])) == (0, len(PROMPT), True, 3)
    assert (step.late, step.computes, step.awaits_tickets, step.finished) == ({"r"}, False, False, {})
    assert prefill.run()[0].finished == {"r": None}
    assert prefill.fate(transfer_id, ticket) == TicketTaken()
    assert prefill.free == prefill.all_free - 3, "the ranks may still read them"

    prefill.run(sent={"r"})
    assert prefill.free == prefill.all_free
    assert not prefill.vllm.has_requests()
    assert until(lambda: isinstance(prefill.fate(transfer_id, ticket), TicketRefused)), "it has ended"
    assert remembered_of(prefill) == {}


def test_a_step_without_prompts_and_tickets_leaves_the_listener_alone(prefill: Prefill) -> None:
    prefill.held.listener._lock, lock = None, prefill.held.listener._lock
    prefill.run()
    prefill.held.listener._lock = lock


def test_with_a_secret_prefill_signs_where_tickets_go(scheduled_model: Path, tmp_path: Path) -> None:
    """Decode accepts it as a router hands it on, and only for this prompt."""
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_bytes(new_secret())
    prefill = Prefill(scheduled_model, extra={"secret_file": str(file)})
    said = prefill.answered("r")
    admission = PrefillAdmission(Peers(cluster_secret(file), AnyHost(), HostList((), "is not in peers")))
    assert parse_holder(said, admission).endpoint == f"tcp://127.0.0.1:{prefill.held.listener.port}"
    with pytest.raises(NoRecipientError, match="signature is wrong"):
        parse_holder(said | {"transfer_id": "another"}, admission)
    prefill.close()


def test_a_ticket_that_comes_before_the_prompts_first_step(scheduled_model: Path) -> None:
    """All of the prompt is computed when the ranks have the ticket, so it is not late."""
    prefill = Prefill(scheduled_model)
    prefill.add("r", PROMPT, {**PREFILL_FIRST, "transfer_id": "xfer-1"})
    ticket = ticket_for(PROMPT)
    assert prefill.offer("xfer-1", ticket) == TicketTaken()
    step, _ = prefill.run()
    assert (step.tickets, step.late) == ({"r": ticket}, set())
    assert [(send.start, send.stop, send.last) for send in step.sends] == [(0, len(PROMPT), True)]
    prefill.close()


def test_a_ticket_that_comes_while_the_prompt_is_computed(scheduled_model: Path) -> None:
    prefill = Prefill(scheduled_model, step_tokens=32)
    prompt = list(range(100, 180))
    prefill.add("r", prompt, {**PREFILL_FIRST, "transfer_id": "xfer-1"})
    prefill.run()
    ticket = ticket_for(prompt)
    assert prefill.offer("xfer-1", ticket) == TicketTaken()
    step, _ = prefill.run()
    assert (step.tickets, step.late) == ({"r": ticket}, {"r"})
    assert [(send.start, send.stop, send.last) for send in step.sends] == [(0, 64, False)], "of both steps"
    step, [output] = prefill.run()
    assert [(send.start, send.stop, send.last) for send in step.sends] == [(64, 80, True)]
    assert output.finished
    assert prefill.run()[0].finished == {"r": None}
    prefill.run(sent={"r"})
    assert prefill.free == prefill.all_free
    prefill.close()


def test_blocks_are_freed_if_no_ticket_comes(prefill: Prefill) -> None:
    transfer_id = prefill.answered("r")["transfer_id"]
    prefill.clock.now += held_prompts.HOLD_TIMEOUT_S - 0.1
    assert prefill.run()[0].unsent == set()
    prefill.clock.now += 0.1
    step, _ = prefill.run()
    assert (step.unsent, step.awaits_tickets) == ({"r"}, False)
    assert prefill.free == prefill.all_free - 3, "the ranks have not said so"
    prefill.run(sent={"r"})
    assert prefill.free == prefill.all_free
    assert remembered_of(prefill) == {}
    late = ticket_for(PROMPT)
    said = prefill.offer(transfer_id, late)
    assert said.reason == "neither a ticket nor a question about one came for 480 s"
    assert refused(prefill, transfer_id, late) == said.reason


def test_an_intents_prompt_is_not_held_for_long(prefill: Prefill) -> None:
    """Decode asks about its ticket every few seconds. Nobody does if the client left just as prefill answered."""
    said = prefill.answered("r", params={**PREFILL_FIRST, "ticket_follows": True, "transfer_id": "xfer-1"})
    assert said["hold_timeout_s"] == 60
    prefill.clock.now += 59.9
    assert prefill.fate("xfer-1", ticket_for(PROMPT)).retry, "it has not come"
    prefill.clock.now += 59.9
    assert prefill.run()[0].unsent == set()
    prefill.clock.now += 0.1
    assert prefill.run()[0].unsent == {"r"}
    prefill.run(sent={"r"})


def test_blocks_are_held_while_decode_asks_about_the_ticket(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no room for the request yet. When it does not ask any more, or a day has passed, they are freed."""
    transfer_id = prefill.answered("r")["transfer_id"]
    ticket = ticket_for(PROMPT)
    for _ in range(3):
        prefill.clock.now += held_prompts.HOLD_TIMEOUT_S - 0.1
        assert prefill.fate(transfer_id, ticket).retry, "it has not come"
        assert prefill.run()[0].unsent == set()
    prefill.clock.now += held_prompts.HOLD_TIMEOUT_S
    assert prefill.run()[0].unsent == {"r"}
    assert refused(prefill, transfer_id, ticket).startswith("neither a ticket nor a question about one came")

    monkeypatch.setattr(held_prompts, "MAX_TICKET_LIFETIME_S", held_prompts.HOLD_TIMEOUT_S + 10)
    transfer_id = prefill.answered("s")["transfer_id"]
    prefill.clock.now += held_prompts.HOLD_TIMEOUT_S
    assert prefill.fate(transfer_id, ticket).retry
    assert prefill.run()[0].unsent == set()
    prefill.clock.now += 10
    assert prefill.fate(transfer_id, ticket).retry
    assert prefill.run()[0].unsent == {"s"}


def test_a_ticket_waits_while_its_prompt_is_freed(prefill: Prefill) -> None:
    """It fits none of the prompts that are there, and the last one is freed. No step of the engine follows."""
    transfer_id = prefill.answered("r")["transfer_id"]
    other = ticket_for(OTHER)
    prefill.offer(transfer_id, other)
    prefill.run()
    assert prefill.fate(transfer_id, other) == TicketTaken()
    prefill.clock.now += held_prompts.EARLY_S - 0.1
    assert prefill.fate(transfer_id, other) == TicketTaken()
    prefill.held.give_up("for a test")
    prefill.run()
    assert refused(prefill, transfer_id, other) == "for a test"


def test_a_prompt_that_comes_again_takes_tickets_again(prefill: Prefill) -> None:
    params = {**PREFILL_FIRST, "transfer_id": "xfer-1"}
    prefill.answered("r", params=params)
    prefill.clock.now += held_prompts.HOLD_TIMEOUT_S
    prefill.run()
    prefill.answered("again", params=params)
    ticket = ticket_for(PROMPT)
    assert prefill.offer("xfer-1", ticket) == TicketTaken()
    assert prefill.run()[0].tickets == {"again": ticket}


def test_a_ticket_for_another_prompt_is_refused(prefill: Prefill) -> None:
    transfer_id = prefill.answered("r")["transfer_id"]
    wrong, right = ticket_for(OTHER), ticket_for(PROMPT)
    prefill.offer(transfer_id, wrong)
    assert prefill.run()[0].tickets == {}
    prefill.wait_for_prompts()
    assert "the prompt's tokens differ" in refused(prefill, transfer_id, wrong)
    prefill.offer(transfer_id, right)
    assert prefill.run()[0].tickets == {"r": right}


def test_a_client_that_wants_several_answers(prefill: Prefill) -> None:
    """Prefill's answer names one transfer id for all of them, since a router sees only one of their answers."""
    ids = [prefill.answered(f"{i}_cmpl-x-0-0123456{i}")["transfer_id"] for i in range(2)]
    assert ids[0] == ids[1]
    tickets = [ticket_for(PROMPT) for _ in range(3)]
    for ticket in tickets:
        prefill.offer(ids[0], ticket)
    served = prefill.run()[0].tickets
    assert len(served) == 2
    assert {ticket.ticket_id for ticket in served.values()} == {ticket.ticket_id for ticket in tickets[:2]}
    prefill.wait_for_prompts()
    assert refused(prefill, ids[0], tickets[2]) == NO_PROMPT


def test_a_ticket_takes_its_own_prompt_and_not_one_with_a_token_more(prefill: Prefill) -> None:
    transfer_id = prefill.answered("cmpl-x-0-01234567", [*PROMPT, 7])["transfer_id"]
    prefill.answered("cmpl-x-1-01234568", PROMPT)
    tickets = [ticket_for(PROMPT), ticket_for([*PROMPT, 7])]
    for ticket in tickets:
        prefill.offer(transfer_id, ticket)
    assert prefill.run()[0].tickets == dict(zip(["cmpl-x-1-01234568", "cmpl-x-0-01234567"], tickets, strict=True))


def test_a_ticket_for_one_token_less_than_states_have_seen(scheduled_model: Path) -> None:
    prefill = Prefill(scheduled_model, states=1)
    prefill.add("r", [*PROMPT, 7], PREFILL_FIRST)
    outputs: list[Any] = []
    while not outputs:
        outputs = prefill.run()[1]
    transfer_id = outputs[0].kv_transfer_params["transfer_id"]
    ticket = ticket_for(PROMPT, num_tokens=len(PROMPT) - 1)
    blocks, sizes = [*ticket.remote_block_ids, [55]], [BLOCK, 1]
    ticket = msgspec.structs.replace(ticket, remote_block_ids=blocks, remote_block_size=sizes)
    prefill.offer(transfer_id, ticket)
    assert not prefill.run()[0].tickets
    prefill.wait_for_prompts()
    assert "states are those behind 40" in refused(prefill, transfer_id, ticket)
    prefill.close()


def test_the_router_aborts_the_request(scheduled_model: Path) -> None:
    prefill = Prefill(scheduled_model, step_tokens=16)
    prefill.add("r", PROMPT, {**PREFILL_FIRST, "transfer_id": "xfer-1"})
    prefill.run()
    prefill.vllm.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert prefill.free == prefill.all_free
    assert remembered_of(prefill) == {}
    ticket = ticket_for(PROMPT)
    prefill.offer("xfer-1", ticket)
    assert refused(prefill, "xfer-1", ticket) == "the prefill request was aborted"
    prefill.close()


def test_the_router_aborts_the_request_when_its_ticket_has_come(scheduled_model: Path) -> None:
    """Ranks tell decode of what they were told to send. They have not heard of this ticket yet."""
    prefill = Prefill(scheduled_model, step_tokens=16)
    prefill.add("first", OTHER, None)
    prefill.run()
    prefill.add("r", PROMPT, {**PREFILL_FIRST, "transfer_id": "xfer-1"})
    ticket = ticket_for(PROMPT)
    prefill.offer("xfer-1", ticket)
    assert not prefill.run()[0].tickets
    assert isinstance(prefill.fate("xfer-1", ticket), TicketTaken)
    prefill.vllm.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert "aborted" in refused(prefill, "xfer-1", ticket)
    prefill.close()


def test_new_weights(prefill: Prefill) -> None:
    """Decode might have the new ones, and the prompt was computed with the old ones (R8)."""
    transfer_id = prefill.answered("r")["transfer_id"]
    prefill.run(WorkerReport(weight_updates={"0/0": 1}))
    assert prefill.run()[0].unsent == {"r"}
    ticket = ticket_for(PROMPT)
    prefill.offer(transfer_id, ticket)
    assert "weights were updated" in refused(prefill, transfer_id, ticket)


def test_a_number_of_weight_updates_that_is_repeated(prefill: Prefill) -> None:
    """Ranks report all of it again after a step was lost."""
    prefill.run(WorkerReport(weight_updates={"0/0": 1}))
    prefill.answered("r")
    prefill.run(WorkerReport(weight_updates={"0/0": 1}))
    assert prefill.run()[0].unsent == set()


def test_preempted_before_its_ticket_came(scheduled_model: Path) -> None:
    """What it had computed is gone: only what it computes again is sent."""
    prefill = Prefill(scheduled_model, step_tokens=32)
    request = prefill.add("r", PROMPT, {**PREFILL_FIRST, "transfer_id": "xfer-1"})
    prefill.run()
    prefill.preempt(request)
    prefill.pool.reset_prefix_cache()
    ticket = ticket_for(PROMPT)
    prefill.offer("xfer-1", ticket)
    step, _ = prefill.run()
    assert step.tickets == {"r": ticket}
    assert [(send.start, send.stop, send.last) for send in step.sends] == [(0, 32, False)]
    assert [(send.start, send.stop, send.last) for send in prefill.run()[0].sends] == [(32, 40, True)]
    prefill.close()


def test_a_ticket_that_comes_while_its_prompt_is_preempted(scheduled_model: Path) -> None:
    """Its blocks are others' by then."""
    prefill = Prefill(scheduled_model, step_tokens=32)
    request = prefill.add("r", PROMPT, {**PREFILL_FIRST, "transfer_id": "xfer-1"})
    prefill.run()
    prefill.preempt(request)
    prefill.offer("xfer-1", ticket_for(PROMPT))
    output = SchedulerOutput.make_empty()  # a step in which it does not run
    output.preempted_req_ids = {"r"}
    step = prefill.connector._role.build_step(output)
    assert (step.sends, step.late) == ([], set())
    prefill.close()


@pytest.mark.parametrize("transfer_id", ["", "x" * 129, "two\nlines", 7, ["xfer"]])
def test_a_transfer_id_that_cannot_be_used(prefill: Prefill, transfer_id: Any) -> None:
    said = prefill.answered("r", params={**PREFILL_FIRST, "transfer_id": transfer_id})
    assert "transfer_id" in said["error"]
    assert prefill.free == prefill.all_free


def test_a_window(scheduled_model: Path) -> None:
    """Decode asks for all but the last token, of which a window needs a block more than prefill's next token sees."""
    prefill = Prefill(scheduled_model, windows=[17])
    prompt = list(range(100, 100 + 3 * BLOCK + 1))
    transfer_id = prefill.answered("r", prompt)["transfer_id"]
    [full, windowed] = prefill.connector._role._prompts["r"].blocks
    free = {block.block_id for block in prefill.pool.free_block_queue.get_all_free_blocks()}
    wanted = [0, 0, 102]  # tokens 32 to 47: token 48 sees those from 32 on
    ticket = ticket_for(prompt, groups=2, num_tokens=len(prompt) - 1)
    ticket = msgspec.structs.replace(ticket, remote_block_ids=[ticket.remote_block_ids[0], wanted])
    assert windowed[2] not in free
    prefill.offer(transfer_id, ticket)
    step, _ = prefill.run()
    assert step.tickets == {"r": ticket}
    assert step.sends == [Send("r", 0, 48, (full[:3], windowed[:3]), last=True, was_computed=True)]
    prefill.run()
    prefill.run(sent={"r"})
    assert prefill.free == prefill.all_free
    prefill.close()


def test_a_window_of_which_decode_wants_more(scheduled_model: Path) -> None:
    prefill = Prefill(scheduled_model, windows=[17])
    prompt = list(range(100, 100 + 6 * BLOCK + 1))
    transfer_id = prefill.answered("r", prompt)["transfer_id"]
    ticket = ticket_for(prompt, groups=2, num_tokens=len(prompt) - 1)
    ticket = msgspec.structs.replace(ticket, remote_block_ids=[ticket.remote_block_ids[0], [0, 0, 102, 103, 104, 105]])
    prefill.offer(transfer_id, ticket)
    prefill.run()
    prefill.wait_for_prompts()
    assert "decode wants tokens from 32 on of a window" in refused(prefill, transfer_id, ticket)
    prefill.close()


# --- no ticket comes -------------------------------------------------------------------------------------------------


def test_decode_computes_the_prompt_itself(prefill: Prefill) -> None:
    transfer_id = prefill.answered("r")["transfer_id"]
    released = ticket_for(PROMPT)
    assert prefill.ask(prefill.release_of(transfer_id, released)) == Acknowledged()
    assert prefill.run()[0].unsent == {"r"}
    prefill.run(sent={"r"})
    assert prefill.free == prefill.all_free
    prefill.offer(transfer_id, released)
    assert prefill.run()[0].tickets == {}
    assert prefill.fate(transfer_id, released).retry, "it is over"
    another = ticket_for(PROMPT)
    prefill.offer(transfer_id, another)
    prefill.run()
    assert prefill.fate(transfer_id, another) == TicketTaken(), "one request may have several prompts"
    prefill.wait_for_prompts()
    assert refused(prefill, transfer_id, another) == NO_PROMPT


def test_decode_computes_one_of_several_prompts(prefill: Prefill) -> None:
    """Its message may come twice, or before that prompt: no other prompt of the same request is freed."""
    transfer_id = prefill.answered("cmpl-x-0-01234567")["transfer_id"]
    release = prefill.release_of(transfer_id, ticket_for(OTHER))
    assert prefill.ask(release) == Acknowledged()
    assert prefill.run()[0].unsent == set(), "the prompt that is there is another one"
    assert prefill.answered("cmpl-x-1-01234568", OTHER)["error"] == "decode computes it"
    prefill.answered("cmpl-x-2-01234569", OTHER)
    assert prefill.ask(release) == Acknowledged()
    assert prefill.run()[0].unsent == set(), "the message was for an earlier prompt"
    tickets = [ticket_for(PROMPT), ticket_for(OTHER)]
    for ticket in tickets:
        prefill.offer(transfer_id, ticket)
    assert prefill.run()[0].tickets == dict(zip(["cmpl-x-0-01234567", "cmpl-x-2-01234569"], tickets, strict=True))


def test_decode_computes_one_of_several_equal_prompts(prefill: Prefill) -> None:
    """Whichever of them is freed, the ticket for the other is served when that comes."""
    transfer_id = prefill.answered("0_cmpl-x-0-01234567")["transfer_id"]
    prefill.ask(prefill.release_of(transfer_id, ticket_for(PROMPT)))
    ticket = ticket_for(PROMPT)
    prefill.offer(transfer_id, ticket)
    assert prefill.run()[0].unsent == {"0_cmpl-x-0-01234567"}
    assert prefill.fate(transfer_id, ticket) == TicketTaken()
    prefill.add("1_cmpl-x-0-01234568", PROMPT, PREFILL_FIRST)
    assert prefill.run()[0].tickets == {"1_cmpl-x-0-01234568": ticket}


def test_a_release_before_its_prompt_is_forgotten_in_time(prefill: Prefill) -> None:
    prefill.ask(prefill.release_of("xfer-1", ticket_for(PROMPT)))
    prefill.run()
    prefill.clock.now += held_prompts.EARLY_S
    params = {**PREFILL_FIRST, "transfer_id": "xfer-1"}
    assert prefill.answered("r", params=params)["transfer_id"] == "xfer-1"


def test_a_prompt_that_decode_has_with_other_tokens_is_freed(prefill: Prefill) -> None:
    """No ticket fits, so decode releases it, by its own tokens."""
    transfer_id = prefill.answered("r")["transfer_id"]
    misfit = ticket_for(OTHER)
    prefill.offer(transfer_id, misfit)
    prefill.run()
    prefill.wait_for_prompts()
    assert "tokens differ" in refused(prefill, transfer_id, misfit)
    prefill.ask(prefill.release_of(transfer_id, misfit))
    assert prefill.run()[0].unsent == {"r"}
    prefill.run(sent={"r"})
    assert remembered_of(prefill) == {}


def test_a_prompt_that_decode_computes_with_other_tokens_is_freed(prefill: Prefill) -> None:
    """Another prompt of the same request might be meant, which is still to come."""
    transfer_id = prefill.answered("r")["transfer_id"]
    prefill.ask(prefill.release_of(transfer_id, ticket_for(OTHER)))
    assert prefill.run()[0].unsent == set()
    prefill.clock.now += held_prompts.EARLY_S
    assert prefill.run()[0].unsent == {"r"}
    prefill.run(sent={"r"})
    assert remembered_of(prefill) == {}


def test_a_request_with_the_transfer_id_of_one_that_is_over(prefill: Prefill) -> None:
    """The ticket that came for the first one's sibling was refused: its release is not for what comes later."""
    params = {**PREFILL_FIRST, "transfer_id": "xfer-1"}
    prefill.answered("r", params=params)
    tickets = [ticket_for(PROMPT), ticket_for(PROMPT)]
    for ticket in tickets:
        prefill.offer("xfer-1", ticket)
    prefill.run()
    prefill.run(sent={"r"})
    prefill.wait_for_prompts()
    assert refused(prefill, "xfer-1", tickets[1]) == NO_PROMPT
    prefill.ask(prefill.release_of("xfer-1", tickets[1]))
    prefill.run()
    assert prefill.answered("again", params=params)["transfer_id"] == "xfer-1"


def test_a_ticket_that_waits_when_the_engine_has_no_more_work_is_refused(prefill: Prefill) -> None:
    """vLLM makes no steps without requests: the listener looks at the clock when decode asks."""
    transfer_id = prefill.answered("r")["transfer_id"]
    ticket = ticket_for(OTHER)
    prefill.offer(transfer_id, ticket)
    prefill.run()
    prefill.ask(prefill.release_of(transfer_id, ticket_for(PROMPT)))
    prefill.run()
    prefill.run(sent={"r"})
    assert not prefill.vllm.has_requests()
    prefill.clock.now += held_prompts.EARLY_S
    assert "tokens differ" in refused(prefill, transfer_id, ticket)


def test_the_release_of_a_served_ticket_frees_no_other_prompt(prefill: Prefill) -> None:
    transfer_id = prefill.answered("cmpl-x-0-01234567")["transfer_id"]
    prefill.answered("cmpl-x-1-01234568")
    served, other = ticket_for(PROMPT), ticket_for(PROMPT)
    prefill.offer(transfer_id, served)
    prefill.run()
    prefill.ask(prefill.release_of(transfer_id, served))
    assert prefill.run()[0].unsent == set()
    prefill.offer(transfer_id, other)
    assert prefill.run()[0].tickets == {"cmpl-x-1-01234568": other}


def test_decode_gives_up_before_prefill_knows_the_prompt(prefill: Prefill) -> None:
    ticket = ticket_for(PROMPT)
    prefill.offer("xfer-1", ticket)
    prefill.ask(prefill.release_of("xfer-1", ticket, "the client left"))
    prefill.run()
    assert prefill.fate("xfer-1", ticket).retry, "it is over"
    assert prefill.answered("r", params={**PREFILL_FIRST, "transfer_id": "xfer-1"})["error"] == "the client left"
    assert prefill.free == prefill.all_free
    assert prefill.answered("again", params={**PREFILL_FIRST, "transfer_id": "xfer-1"})["transfer_id"] == "xfer-1"
