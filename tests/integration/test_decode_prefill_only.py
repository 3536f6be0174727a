# SPDX-License-Identifier: Apache-2.0
"""A decode engine that computes no prompts (`who_computes: never`), with vLLM's own scheduler.

It asks prefill for all KV that it lacks, repeatedly if needed.
"""

from typing import Any

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from harness.decode_scheduler import BLOCK, LONGEST, EngineScheduler, MakeScheduler, closed_schedulers
from vllm_ascend_pd.core.prompt_digest import digest_of_names
from vllm_ascend_pd.core.step import WorkerReport
from vllm_ascend_pd.decode.scheduler import MAX_LOST

orders = pytest.mark.parametrize("order", ["fcfs", "priority"])
schedulers = pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler], ids=["", "async"])
failures = pytest.mark.parametrize("failures", ["fail", "recompute"])


make = closed_schedulers(who_computes="never")


def ticket_of(decode: EngineScheduler, name: str) -> Any:
    return decode.connector._role._transfers[name].ticket


def preempted(decode: EngineScheduler, name: str = "grows") -> None:
    """Runs until a request that was preempted waits for KV again."""
    request = decode.vllm.requests[name]
    for _ in range(200):
        if request.num_preemptions and name in decode.expected:
            return
        if not request.num_preemptions:
            decode.arrives(*decode.expected)
        decode.step()
    raise AssertionError(decode.state())


def crowded(make: MakeScheduler, **of: Any) -> EngineScheduler:
    """Two requests that grow until the second one is preempted."""
    decode = make(blocks=LONGEST, **of)
    decode.add("first", 3 * BLOCK, generates=4 * BLOCK)
    decode.add("grows", 3 * BLOCK, generates=4 * BLOCK, first=1000)
    return decode


@orders
@schedulers
@pytest.mark.parametrize("drafts", [False, True], ids=["no drafts", "drafts"])
def test_a_preempted_request_goes_back_to_prefill_with_its_tokens(
    make: MakeScheduler, order: str, scheduler: type[Scheduler], drafts: bool
) -> None:
    decode = crowded(make, order=order, scheduler_class=scheduler, drafts=drafts)
    decode.step()
    first = ticket_of(decode, "grows")
    assert (first.num_tokens, first.replaces) == (3 * BLOCK, "")
    preempted(decode)
    request, ticket = decode.vllm.requests["grows"], ticket_of(decode, "grows")
    assert ticket.num_tokens == request.num_tokens > 3 * BLOCK
    assert (ticket.replaces, ticket.request_id) == (first.ticket_id, first.request_id)
    assert ticket.prompt != first.prompt
    decode.run(400)
    assert request.num_output_tokens == 4 * BLOCK
    assert decode.given_up == []


def test_what_decode_still_has_cached_is_not_asked_for(make: MakeScheduler) -> None:
    decode = crowded(make, caching=True)
    preempted(decode)
    ticket = ticket_of(decode, "grows")
    assert ticket.remote_cached_tokens % BLOCK == 0
    assert ticket.remote_cached_tokens > 0
    decode.run(400)


@pytest.mark.parametrize("salt", [None, "of the client"])
def test_after_a_weight_update_a_preempted_request_asks_for_all_of_its_tokens(
    make: MakeScheduler, salt: str | None
) -> None:
    """What decode has cached is of the old weights. Prefill compares the client's salt, which it gets too."""
    decode = crowded(make, caching=True)
    decode.vllm.requests["grows"].cache_salt = salt
    while not decode.vllm.requests["grows"].num_output_tokens:
        decode.arrives(*decode.expected)
        decode.step()
    for count in (1, 2):
        decode.connector._role.update(WorkerReport(weight_updates={"rank": count}), set())
    preempted(decode)
    ticket = ticket_of(decode, "grows")
    assert ticket.remote_cached_tokens == 0
    assert ticket.prompt.salt == (digest_of_names(ticket.ticket_id, [salt]) if salt else "")
    decode.run(400)
    assert decode.given_up == []


def test_a_cached_prompt_of_whole_blocks_asks_for_prefill_too(make: MakeScheduler) -> None:
    """Otherwise vLLM would compute its last block again, for the last token's logits."""
    decode = make(blocks=2 * LONGEST, caching=True)
    decode.add("before", 2 * BLOCK)
    decode.run()
    decode.add("same", 2 * BLOCK)
    decode.step()
    assert ticket_of(decode, "same").remote_cached_tokens == BLOCK
    decode.run()


def test_a_cached_prompt_with_one_more_token_needs_no_ticket(make: MakeScheduler) -> None:
    decode = make(blocks=2 * LONGEST, caching=True)
    decode.add("before", 2 * BLOCK + 1)
    decode.run()
    decode.add("same", 2 * BLOCK + 1)
    assert decode.step() == {"same"}
    decode.run()
    assert decode.tickets == 1


@orders
@failures
def test_an_abort_while_prefill_computes_again(make: MakeScheduler, order: str, failures: str) -> None:
    decode = crowded(make, order=order, failures=failures)
    preempted(decode)
    decode.abort("grows")
    assert decode.vllm.requests["grows"].is_finished()
    decode.fails("grows")  # the ranks' report, once nobody can write any more
    decode.step()
    assert "grows" not in decode.vllm.requests
    decode.run(400)


@orders
def test_kv_that_is_lost_again_ends_the_request_under_fail(make: MakeScheduler, order: str) -> None:
    decode = crowded(make, order=order, failures="fail")
    preempted(decode)
    request = decode.vllm.requests["grows"]
    decode.fails("grows")
    decode.run(400)
    assert request.status == RequestStatus.FINISHED_ERROR
    assert decode.given_up == ["grows"]


@orders
@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
def test_lost_kv_is_asked_for_again_under_recompute(make: MakeScheduler, order: str, caching: bool) -> None:
    decode = make(blocks=LONGEST, order=order, caching=caching, failures="recompute")
    if caching:  # vLLM itself would go on behind this
        decode.add("before", BLOCK + 1)
        decode.run()
    request = decode.add("loses", 5 * BLOCK)
    decode.step()
    seen = [ticket_of(decode, "loses")]
    for _ in range(MAX_LOST - 1):
        decode.fails("loses")
        for _ in range(3):
            decode.step()
        seen.append(ticket_of(decode, "loses"))
    decode._failed.clear()
    assert [ticket.replaces for ticket in seen[1:]] == [ticket.ticket_id for ticket in seen[:-1]]
    assert {ticket.num_tokens for ticket in seen} == {5 * BLOCK}
    decode.run()
    assert request.num_output_tokens == 4
    assert decode.given_up == []


@orders
def test_kv_that_is_lost_too_often_ends_the_request(make: MakeScheduler, order: str) -> None:
    decode = make(blocks=LONGEST, order=order, failures="recompute")
    request = decode.add("loses", 5 * BLOCK)
    decode.fails("loses")
    for _ in range(4 * MAX_LOST):
        decode.fails("loses")
        decode.step()
    assert request.status == RequestStatus.FINISHED_ERROR
    assert decode.given_up == ["loses"]
    assert decode.tickets == MAX_LOST


@orders
@pytest.mark.parametrize("may_follow", [True, False])
def test_prefill_that_fails_is_asked_for_again_where_another_engine_may_do_it(
    make: MakeScheduler, order: str, may_follow: bool
) -> None:
    decode = make(blocks=LONGEST, order=order, failures="recompute")
    request = decode.add("asks", 5 * BLOCK)
    decode.step()
    first = ticket_of(decode, "asks")
    decode.prefill_fails("asks", may_follow)
    decode.step()
    decode._failed.clear()
    for _ in range(3):
        decode.step()
    if may_follow:
        assert ticket_of(decode, "asks").replaces == first.ticket_id
        decode.run()
        assert request.num_output_tokens == 4
    assert decode.given_up == ([] if may_follow else ["asks"])


@orders
@pytest.mark.parametrize("drafts", [False, True], ids=["no drafts", "drafts"])
def test_a_request_that_asks_again_and_one_that_has_arrived(make: MakeScheduler, drafts: bool, order: str) -> None:
    """The first request wants its blocks back before the second may have run."""
    decode = make(blocks=LONGEST + 2, drafts=drafts, caching=True, failures="recompute", order=order)
    decode.add("fails", 6 * BLOCK)
    decode.add("arrives", 2 * BLOCK, first=1000)
    decode.step()
    assert set(decode.expected) == {"fails", "arrives"}
    decode.add("behind", 7 * BLOCK, first=2000)
    decode.fails("fails")
    decode.arrives("arrives")
    decode.step()
    decode._failed.clear()
    decode.run(200)
    assert decode.given_up == []


def test_a_request_that_names_no_metaserver_ends_with_an_error(make: MakeScheduler) -> None:
    decode = make(blocks=LONGEST)
    request = decode.add("local", 2 * BLOCK, remote=False)
    one = decode.add("one token", 1, remote=False)
    decode.run()
    assert request.status == RequestStatus.FINISHED_ERROR
    assert one.num_output_tokens == 4


def test_log_probabilities_of_a_prompt_are_refused(make: MakeScheduler) -> None:
    decode = make(blocks=LONGEST)
    request = decode.add("logprobs", 2 * BLOCK, prompt_logprobs=1)
    decode.run()
    assert request.status == RequestStatus.FINISHED_ERROR
    assert decode.most_tokens == 0


def test_a_prompt_of_more_than_text_cannot_go_on_after_a_preemption(make: MakeScheduler) -> None:
    decode = crowded(make)
    request = decode.vllm.requests["grows"]
    while not request.num_preemptions:
        decode.arrives(*decode.expected)
        decode.step()
    request.prompt_embeds = torch.zeros(request.num_prompt_tokens, 8)
    decode.run(400)
    assert request.status == RequestStatus.FINISHED_ERROR
    assert 0 < request.num_output_tokens < 4 * BLOCK


@schedulers
@failures
@pytest.mark.parametrize("generates", [1, 8], ids=["ends in its first step", "goes on"])
def test_a_request_whose_kv_is_overwritten_ends_without_a_token(
    make: MakeScheduler, scheduler: type[Scheduler], failures: str, generates: int
) -> None:
    """Ranks are told of its first step, once, and nobody finds its blocks in the prefix cache afterwards."""
    decode = make(blocks=3 * LONGEST, caching=True, scheduler_class=scheduler, failures=failures)
    decode.connector._role._issuer._verified_share = 1.0
    decode.add("right", 2 * BLOCK + 1, generates=8, first=1000)
    decode.add("wrong", 2 * BLOCK + 1, generates=generates)
    decode.step()
    tickets = {name: expect.ticket_id for name, expect in decode.expected.items()}
    decode.overwritten.add("wrong")
    decode.run()
    assert sorted(decode.begun) == sorted(tickets.values())
    assert decode.given_up == ["wrong"]
    assert set(decode.tokens_of) == {"right"}
    decode.add("same", 2 * BLOCK + 1)
    decode.step()
    assert ticket_of(decode, "same").remote_cached_tokens == 0
    decode.run()
