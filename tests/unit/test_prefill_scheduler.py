# SPDX-License-Identifier: Apache-2.0
"""Prefill's scheduler: which blocks it sends in which step, how long it holds them, what its answers name, and what
preemption changes."""

import hashlib
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from harness.schedulers import prefill_scheduler
from harness.scheduling import FOR_A_PULLING_CONNECTOR, Scheduled, make_output, make_request, remembered
from harness.tickets import ticket_with
from vllm_ascend_pd.core.caches import StateGroup, TokenGroup
from vllm_ascend_pd.core.step import Send, WorkerReport

BLOCK = 4
PROMPT = 10
BLOCKS = ([7, 1, 5],)


def ticket(request_id="r", num_tokens=PROMPT, cached=0, block_sizes=(BLOCK,), dcp=1):
    return ticket_with(
        request_id=request_id,
        remote_block_ids=[[100 + n for n in range(math.ceil(num_tokens / size / dcp))] for size in block_sizes],
        remote_block_size=list(block_sizes),
        remote_tp_size=dcp,
        remote_dcp_size=dcp,
        remote_cached_tokens=cached,
        ticket_id=hashlib.md5(request_id.encode(), usedforsecurity=False).hexdigest(),
        num_tokens=num_tokens,
    )


def ticketed(request_id="r", num_tokens=PROMPT, **fields):
    """A request as the proxy sends it to prefill."""
    return make_request(request_id, num_tokens, msgspec.to_builtins(ticket(request_id, num_tokens, **fields)))


def starts(scheduler, request, tokens, blocks=BLOCKS):
    """The step in which `request` runs for the first time."""
    scheduler.allocated(request, blocks)
    return scheduler.build_step(make_output(new=[Scheduled(request, blocks, 0, tokens)]))


def goes_on(scheduler, request, computed, tokens, blocks=None):
    return scheduler.build_step(make_output(running=[Scheduled(request, blocks, computed, tokens)]))


@pytest.fixture
def scheduler():
    return prefill_scheduler([TokenGroup(BLOCK)])


def test_long_blocks_of_one_cache_group_hold_up_no_other():
    """As those of DeepSeek V4, where a block has the entries of 16,384 tokens: short ones leave step by step."""
    scheduler = prefill_scheduler([TokenGroup(4), TokenGroup(64, tokens_per_entry=16)])
    request = ticketed(num_tokens=10, block_sizes=(4, 64))
    assert starts(scheduler, request, 5, ([7, 1], [])).sends == [
        Send("r", 0, 4, ([7], []), last=False, parts=((0, 4), (0, 0)))
    ]
    assert goes_on(scheduler, request, 5, 2).sends == []
    assert goes_on(scheduler, request, 7, 3, ([5], [])).sends == [
        Send("r", 4, 10, ([1, 5], []), last=True, parts=((4, 10), (0, 10)))
    ]


def with_states():
    """Attention's blocks, and a group whose blocks hold a state: here one block for the longest prompt."""
    return prefill_scheduler([TokenGroup(BLOCK), StateGroup(4096)])


def wants_a_state():
    """Decode computes the last of the client's tokens itself, so its ticket is for one less."""
    blocks = {"remote_block_ids": [[100, 101, 102], [200]], "remote_block_size": [BLOCK, 1]}
    fields = msgspec.structs.replace(ticket(num_tokens=PROMPT - 1), **blocks)
    return make_request("r", PROMPT, msgspec.to_builtins(fields))


def test_a_state_is_sent_once_the_prompt_is_computed():
    scheduler, request = with_states(), wants_a_state()
    scheduler.add_request(request)
    step = starts(scheduler, request, 6, ([7, 1], [30]))
    assert step.sends == [Send("r", 0, 4, ([7], []), last=False)]
    assert goes_on(scheduler, request, 6, 3, ([5], [])).sends == [Send("r", 4, 9, ([1, 5], [30]), last=True)]


def test_prefill_leaves_the_last_token_to_decode_where_there_are_states(scheduler):
    request = wants_a_state()
    with_states().add_request(request)
    assert (request.num_prompt_tokens, request.num_tokens, len(request.prompt_token_ids)) == (9, 9, 9)
    whole = ticketed()
    scheduler.add_request(whole)
    plain = make_request("c", PROMPT, None)
    with_states().add_request(plain)
    assert whole.num_prompt_tokens == plain.num_prompt_tokens == PROMPT


def test_a_prompt_without_its_last_token_is_sent_with_the_step_that_computes_the_one_before(scheduler):
    """Where decode's window ends before the last token. Prefill computes all of the prompt."""
    fields = msgspec.structs.replace(ticket(), num_tokens=PROMPT - 1)
    request = make_request("r", PROMPT, msgspec.to_builtins(fields))
    scheduler.add_request(request)
    assert starts(scheduler, request, 8, ([7, 1],)).sends == [Send("r", 0, 8, ([7, 1],), last=False)]
    assert goes_on(scheduler, request, 8, 1, ([5],)).sends == [Send("r", 8, 9, ([5],), last=True, grows=True)]
    assert goes_on(scheduler, request, 9, 1).sends == []
    assert scheduler.end_request(request) == (True, None)


@pytest.mark.parametrize(("max_tokens", "complaint"), [(1, None), (2, "max_tokens is 2: states change")])
def test_a_state_stays_as_it_is_while_it_is_sent(max_tokens, complaint):
    scheduler, request = with_states(), wants_a_state()
    request.max_tokens = max_tokens
    scheduler.add_request(request)
    starts(scheduler, request, 9, ([7, 1, 5], [30]))
    sends, params = scheduler.end_request(request)
    assert sends == (complaint is None)
    assert complaint is None or params["error"].startswith(complaint)


@pytest.mark.parametrize(
    ("max_tokens", "left_out", "grows"),
    [(1, 0, False), (2, 0, True), (1, 1, False)],
    ids=["1", "2", "1 after the last"],
)
def test_ranks_are_told_whether_later_steps_write_into_the_last_block(scheduler, max_tokens, left_out, grows):
    """`left_out`: tokens of the prompt that are computed in the same step and not sent."""
    fields = msgspec.structs.replace(ticket(), num_tokens=PROMPT - left_out)
    request = make_request("r", PROMPT, msgspec.to_builtins(fields))
    request.max_tokens = max_tokens
    scheduler.add_request(request)
    [send] = starts(scheduler, request, PROMPT, ([7, 1, 5],)).sends
    assert send.last
    assert send.grows == grows


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_schedule_sends_every_token_once(data):
    """Chunks, prefix hits on both sides, preemptions: parts follow each other from decode's cached prefix to the end,
    each from the blocks that hold it at the time."""
    sizes = data.draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=2), label="prefill's block sizes")
    d_blocks = [data.draw(st.sampled_from([2, 4, 8]), label="decode's block size") for _ in sizes]
    # Context parallelism: a block id stands for a block on each of several ranks.
    ranks, dcp = (data.draw(st.sampled_from([1, 2, 3]), label=f"{who}'s ranks") for who in ("prefill", "decode"))
    scheduler = prefill_scheduler([TokenGroup(size, ranks) for size in sizes])
    sizes, d_sizes = [size * ranks for size in sizes], [size * dcp for size in d_blocks]
    total = data.draw(st.integers(1, 80), label="prompt tokens")
    cached = math.lcm(*d_sizes) * data.draw(st.integers(0, total // math.lcm(*d_sizes)), label="cached on decode")
    fresh = iter(range(10**6))
    request = ticketed(num_tokens=total, cached=cached, block_sizes=tuple(d_blocks), dcp=dcp)

    def hit() -> int:
        """Tokens in prefill's prefix cache: whole blocks, never the whole prompt."""
        unit = math.lcm(*sizes)
        return unit * data.draw(st.integers(0, (total - 1) // unit), label="cached on prefill")

    def grown(blocks: tuple[list[int], ...], tokens: int) -> tuple[list[int], ...]:
        """The blocks missing in `blocks` to hold `tokens`."""
        return tuple(
            [next(fresh) for _ in range(math.ceil(tokens / size) - len(ids))]
            for ids, size in zip(blocks, sizes, strict=True)
        )

    nothing: tuple[list[int], ...] = tuple([] for _ in sizes)
    table, computed, how, sends = nothing, hit(), "new", []
    announced = preemptions = 0
    sent, most = [cached] * len(sizes), [cached] * len(sizes)  # by cache group
    while computed <= total:  # one step of decoding, too
        left = max(1, total - computed)
        tokens = left - data.draw(st.integers(0, left - 1), label="left for later")
        more = grown(table, computed + tokens)
        table = tuple(ids + new for ids, new in zip(table, more, strict=True))
        if how != "running":
            scheduler.allocated(request, table)
        part = Scheduled(request, table if how != "running" else (more if any(more) else None), computed, tokens)
        step = scheduler.build_step(make_output(**{how: [part]}))
        announced += len(step.tickets)
        computed += tokens
        for send in step.sends:
            assert send.stop <= computed
            for group, (ids, blocks, size) in enumerate(zip(send.blocks, table, sizes, strict=True)):
                start, stop = send.tokens(group)
                assert start == sent[group]
                assert ids == blocks[start // size : math.ceil(stop / size)]
                sent[group] = stop
            sends.append(send)
        whole = [computed - computed % math.lcm(size, d_size) for size, d_size in zip(sizes, d_sizes, strict=True)]
        for group, tokens in enumerate(whole):  # no step leaves behind what it could send, or sends a part of a block
            assert sent[group] == (total if computed >= total else max(most[group], tokens))
            most[group] = sent[group]
        if preemptions < 3 and data.draw(st.booleans(), label="preempted"):
            preemptions += 1
            assert scheduler.build_step(make_output(preempted=[request])).preempted == {"r"}
            table, computed, how = nothing, hit(), data.draw(st.sampled_from(["new", "resumed"]), label="resumes in")
        else:
            how = "running"
    assert announced == 1
    edges = [cached, *(send.stop for send in sends)]
    assert [send.start for send in sends] == edges[:-1]
    assert edges[-1] == total
    assert [send.last for send in sends] == [False] * (len(sends) - 1) + [True]
    assert all(send.start < send.stop for send in sends) or cached == total
    assert scheduler.end_request(request) == (True, None)
    scheduler.update(None, {"r"})
    scheduler.build_step(make_output())
    assert remembered(scheduler) == {}


# --- the end of a request, and the errors that its answer names --------------------------------------------------


def test_blocks_are_held_until_sent(scheduler):
    request = ticketed()
    starts(scheduler, request, PROMPT)
    assert not scheduler.has_pending_pushes
    assert scheduler.end_request(request) == (True, None)
    assert scheduler.has_pending_pushes
    assert scheduler.build_step(make_output()).finished == {"r": None}
    assert scheduler.build_step(make_output()).finished == {}
    assert scheduler.has_pending_pushes
    scheduler.update(None, {"r"})
    assert not scheduler.has_pending_pushes
    assert remembered(scheduler) == {}


def test_aborted_before_it_was_scheduled(scheduler):
    never_allocated, allocated = ticketed("a"), ticketed("b")
    never_allocated.status = allocated.status = RequestStatus.FINISHED_ABORTED
    scheduler.allocated(allocated, BLOCKS)
    assert scheduler.end_request(never_allocated) == (False, None)
    assert scheduler.end_request(allocated) == (False, None)
    step = scheduler.build_step(make_output())
    assert (step.finished, step.tickets) == ({}, {})
    assert remembered(scheduler) == {}


def test_an_error_that_ranks_report_is_in_the_answer(scheduler):
    request = ticketed()
    starts(scheduler, request, PROMPT)
    scheduler.update(WorkerReport(failed={"r": "decode went away"}), set())
    scheduler.update(WorkerReport(failed={"r": "a later reason", "unknown": "x"}), set())
    assert scheduler.end_request(request) == (True, {"error": "decode went away"})
    scheduler.update(WorkerReport(failed={"r": "too late for the answer"}), {"r"})
    assert remembered(scheduler) == {}


def test_a_malformed_ticket_ends_in_an_error(scheduler):
    params = {**msgspec.to_builtins(ticket()), "remote_block_ids": [[1]]}
    request = make_request("r", PROMPT, params)
    step = starts(scheduler, request, PROMPT)
    assert (step.tickets, step.sends) == ({}, [])
    scheduler.allocated(request, BLOCKS)  # preempted and resumed
    delay, answer = scheduler.end_request(request)
    assert not delay
    assert answer is not None
    assert "remote_block_ids" in answer["error"]
    assert scheduler.build_step(make_output()).finished == {}
    assert remembered(scheduler) == {}


def test_a_ticket_is_served_once(scheduler):
    first, second = ticketed(), make_request("again", PROMPT, msgspec.to_builtins(ticket()))
    starts(scheduler, first, 6)
    step = starts(scheduler, second, PROMPT)
    assert (step.tickets, step.sends) == ({}, [])
    refused = {"error": "this ticket is being served already", "refused": True}
    assert scheduler.end_request(second) == (False, refused)
    assert goes_on(scheduler, first, 6, 4).sends == [Send("r", 4, 10, ([1, 5],), last=True)]
    assert scheduler.end_request(first) == (True, None)
    third = make_request("once more", PROMPT, msgspec.to_builtins(ticket()))
    assert starts(scheduler, third, PROMPT).tickets == {}, "the ranks have not told decode"
    assert scheduler.end_request(third) == (False, refused)
    scheduler.update(None, {"r"})
    assert remembered(scheduler) == {}


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_decode": False}, {"do_remote_prefill": True}, FOR_A_PULLING_CONNECTOR["prefill"]],
    ids=["none", "empty", "no", "decode", "pull"],
)
def test_requests_without_a_ticket(scheduler, params):
    request = make_request("r", PROMPT, params)
    step = starts(scheduler, request, PROMPT)
    assert (step.tickets, step.sends, scheduler.end_request(request)) == ({}, [], (False, None))
    assert remembered(scheduler) == {}


def test_what_vllm_computes_again_without_a_word_is_sent_again(scheduler):
    request = ticketed()
    assert starts(scheduler, request, PROMPT).sends == [Send("r", 0, 10, BLOCKS, last=True)]
    assert goes_on(scheduler, request, 5, 3).sends == [Send("r", 4, 8, ([1],), last=False, again=True)]
    assert goes_on(scheduler, request, 8, 2).sends == [Send("r", 8, 10, ([5],), last=True, again=True)]


def test_ranks_hear_again_of_an_end_that_they_may_have_missed(scheduler):
    request = ticketed()
    starts(scheduler, request, 6)
    request.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.end_request(request) == (True, None)
    lost = scheduler.build_step(make_output())
    scheduler.steps_lost()
    step = scheduler.build_step(make_output())
    assert step.finished == lost.finished != {}
    assert step.report_again == {"r"}
    scheduler.update(None, {"r"})
    assert remembered(scheduler) == {}


# --- preemption --------------------------------------------------------------------------------------------------


def test_preemptions_that_the_scheduler_does_not_name_are_seen_once():
    scheduler = prefill_scheduler([TokenGroup(BLOCK)], names_all_preempted=False)
    request, other = ticketed(), make_request("other", PROMPT, None)

    def preempted_when_another_goes_on(named=()):
        return scheduler.build_step(make_output(running=[Scheduled(other, None, 0, 1)], preempted=named)).preempted

    assert starts(scheduler, request, 4, ([7],)).preempted == set()
    request.status = RequestStatus.PREEMPTED  # as vllm-ascend's SchedulerDynamicBatch does
    assert scheduler.build_step(make_output()).preempted == set()  # nobody gets its blocks yet
    assert preempted_when_another_goes_on() == {"r"}
    assert preempted_when_another_goes_on() == set()
    request.status = RequestStatus.RUNNING
    assert goes_on(scheduler, request, 4, 2, ([1],)).preempted == set()
    request.num_preemptions += 1  # and runs again in the same step: vLLM 0.23 after a reset of its prefix cache
    assert goes_on(scheduler, request, 6, 1).preempted == {"r"}
    request.status, request.num_preemptions = RequestStatus.PREEMPTED, 2
    assert preempted_when_another_goes_on([request]) == {"r"}
    assert preempted_when_another_goes_on() == set()


def test_preemption_of_others_is_not_reported(scheduler):
    plain = make_request("plain", PROMPT, None)
    assert scheduler.build_step(make_output(preempted=[plain])).preempted == set()


def test_preempted_and_aborted_before_the_next_step(scheduler):
    """Its blocks were freed at once, so ranks must stop reading them."""
    request = ticketed()
    starts(scheduler, request, PROMPT)
    scheduler.end_request(request)
    step = scheduler.build_step(make_output(preempted=[request]))
    assert (step.preempted, step.finished) == ({"r"}, {"r": None})


def test_preempted_and_aborted_before_the_next_step_where_vllm_names_nobody():
    """vLLM 0.23: a reset of its prefix cache frees the blocks, and no step's output says so."""
    scheduler = prefill_scheduler([TokenGroup(BLOCK)], names_all_preempted=False)
    request, other = ticketed(), make_request("other", PROMPT, None)
    starts(scheduler, request, PROMPT)
    request.num_preemptions += 1
    scheduler.end_request(request)
    step = scheduler.build_step(make_output(new=[Scheduled(other, BLOCKS, 0, PROMPT)]))
    assert (step.preempted, step.finished) == ({"r"}, {"r": None})


def test_preempted_in_a_step_without_tokens_and_aborted_before_the_next():
    """vllm-ascend's SchedulerDynamicBatch, which does not count it either."""
    scheduler = prefill_scheduler([TokenGroup(BLOCK)], names_all_preempted=False)
    request, other = ticketed(), make_request("other", PROMPT, None)
    starts(scheduler, request, PROMPT)
    request.status = RequestStatus.PREEMPTED
    assert scheduler.build_step(make_output()).preempted == set()
    request.status = RequestStatus.FINISHED_ABORTED
    scheduler.end_request(request)
    step = scheduler.build_step(make_output(new=[Scheduled(other, BLOCKS, 0, PROMPT)]))
    assert (step.preempted, step.finished) == ({"r"}, {"r": None})
    scheduler.update(None, {"r"})
    assert scheduler.build_step(make_output(new=[])).preempted == set()
