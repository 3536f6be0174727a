# SPDX-License-Identifier: Apache-2.0
"""Which blocks prefill's scheduler sends in which step."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_steps import *  # noqa: F403
from prefill_steps import BLOCK, PROMPT, goes_on, starts, ticket, ticketed

from harness.schedulers import prefill_scheduler
from harness.scheduling import Scheduled, make_output, make_request, remembered
from vllm_ascend_pd.core.caches import StateGroup, TokenGroup
from vllm_ascend_pd.core.step import Send


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


def wants_a_state(num_tokens=PROMPT):
    """Decode computes the last of the client's tokens itself, so its ticket is for one less."""
    fields = msgspec.structs.replace(
        ticket(num_tokens=num_tokens - 1),
        remote_block_ids=[[100, 101, 102], [200]],
        remote_block_size=[BLOCK, 1],
    )
    return make_request("r", num_tokens, msgspec.to_builtins(fields))


def test_a_state_is_sent_once_the_prompt_is_computed():
    scheduler, request = with_states(), wants_a_state()
    scheduler.arrived(request)
    step = starts(scheduler, request, 6, ([7, 1], [30]))
    assert step.sends == [Send("r", 0, 4, ([7], []), last=False)]
    assert goes_on(scheduler, request, 6, 3, ([5], [])).sends == [Send("r", 4, 9, ([1, 5], [30]), last=True)]


def test_prefill_leaves_the_last_token_to_decode_where_there_are_states(scheduler):
    request = wants_a_state()
    with_states().arrived(request)
    assert (request.num_prompt_tokens, request.num_tokens, len(request.prompt_token_ids)) == (9, 9, 9)
    whole = ticketed()
    scheduler.arrived(whole)
    plain = make_request("c", PROMPT, None)
    with_states().arrived(plain)
    assert whole.num_prompt_tokens == plain.num_prompt_tokens == PROMPT


def test_a_prompt_without_its_last_token_is_sent_with_the_step_that_computes_the_one_before(scheduler):
    """Where decode's window ends before the last token. Prefill computes all of the prompt."""
    fields = msgspec.structs.replace(ticket(), num_tokens=PROMPT - 1)
    request = make_request("r", PROMPT, msgspec.to_builtins(fields))
    scheduler.arrived(request)
    assert starts(scheduler, request, 8, ([7, 1],)).sends == [Send("r", 0, 8, ([7, 1],), last=False)]
    assert goes_on(scheduler, request, 8, 1, ([5],)).sends == [Send("r", 8, 9, ([5],), last=True)]
    assert goes_on(scheduler, request, 9, 1).sends == []
    assert scheduler.finished(request) == (True, None)


@pytest.mark.parametrize(("max_tokens", "complaint"), [(1, None), (2, "max_tokens is 2: states change")])
def test_a_state_stays_as_it_is_while_it_is_sent(max_tokens, complaint):
    scheduler, request = with_states(), wants_a_state()
    request.max_tokens = max_tokens
    scheduler.arrived(request)
    starts(scheduler, request, 9, ([7, 1, 5], [30]))
    sends, params = scheduler.finished(request)
    assert sends == (complaint is None)
    assert complaint is None or params["error"].startswith(complaint)


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
    assert scheduler.finished(request) == (True, None)
    scheduler.update(None, {"r"})
    scheduler.build_step(make_output())
    assert remembered(scheduler) == {}
