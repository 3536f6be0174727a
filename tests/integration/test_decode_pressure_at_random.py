# SPDX-License-Identifier: Apache-2.0
"""Many requests on decode's scheduler with few blocks, in any order and with any outcome.

In each step something runs or is in flight, and all requests end.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from harness.decode_scheduler import BLOCK, DRAFTS, LONGEST, MAX_MODEL_LEN, EngineScheduler

# The simulation has many more, but no grammars, adapters or priorities.
EXAMPLES = 10
STEPS = 3000
MOST_EMPTY_STEPS = 4
"""A preemption ends a step, and so may a request that has failed; with two steps under way each counts twice."""
STEPS_FOR_A_RESET = 6
"""How many steps there are for each reset of the prefix cache, where there are any."""


@dataclass(frozen=True)
class Wanted:
    """A request.

    at: the step in which it comes.
    grammar, transfer: how many steps each takes. None: there is no grammar.
    ends: how the transfer ends, or "local" if there is none.
    """

    at: int
    tokens: int
    generates: int
    grammar: int | None
    transfer: int
    ends: str
    priority: int
    lora: int
    first: int


def wanted(drawn: random.Random, policy: str) -> Wanted:
    # The sizes at which one block more is needed come up often.
    tokens = drawn.choice([BLOCK * drawn.randint(1, 7), BLOCK * drawn.randint(1, 7) + 1, drawn.randint(1, 120)])
    ends = drawn.choice(["arrives"] * 6 + ["fails", "aborted", "local"])
    return Wanted(
        at=drawn.randint(0, 30),
        tokens=tokens,
        generates=drawn.randint(1, min(40, MAX_MODEL_LEN - tokens)),
        grammar=drawn.choice([None, None, drawn.randint(0, 8)]),
        transfer=drawn.randint(0, 12),
        ends=ends,
        priority=drawn.randint(0, 2) if policy == "priority" else 0,
        lora=drawn.randint(0, 2),
        first=drawn.choice([0, 0, drawn.randint(1, 10**6)]),
    )


def play(decode: EngineScheduler, requests: list[Wanted], resets: random.Random | None) -> None:
    """Runs until all requests have ended. `resets`: says when the prefix cache is reset, if it is."""
    asked: dict[str, tuple[object, Wanted]] = {}
    due: dict[str, int] = {}
    empty = 0
    for step in range(STEPS):
        for number, want in enumerate(requests):
            if want.at == step:
                name = f"request-{number}"
                of = {"priority": want.priority, "lora": want.lora, "first": want.first}
                request = decode.add(
                    name,
                    want.tokens,
                    want.generates,
                    grammar=want.grammar is not None,
                    remote=want.ends != "local",
                    **of,
                )
                asked[name] = (request, want)
        for request, want in asked.values():
            if want.grammar is not None and step == want.at + want.grammar:
                decode.ready(request)
        for name in list(decode.expected):
            want = asked[name][1]
            if step >= due.setdefault(name, step + want.transfer):
                if want.ends == "aborted":
                    decode.abort(name)
                if want.ends == "fails":
                    decode.fails(name)
                decode.arrives(name)
        to_come = any(want.at >= step for want in requests)
        compiling = any(want.grammar is not None and step < want.at + want.grammar for want in requests)
        under_way = to_come or compiling or bool(decode.expected)
        if resets is not None and not resets.randrange(STEPS_FOR_A_RESET):
            decode.vllm.reset_prefix_cache(reset_running_requests=True)
        ran = decode.step()
        empty = 0 if ran or under_way else empty + 1
        if not decode.unfinished and not under_way:
            break
        assert empty <= MOST_EMPTY_STEPS, decode.state()
    decode.settle()
    assert not decode.unfinished, decode.state()


@pytest.mark.parametrize("drafts", [False, True], ids=["no drafts", "drafts"])
@pytest.mark.parametrize("who_computes", ["prefill", "never"])
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    order=st.sampled_from(["fcfs", "priority"]),
    scheduler=st.sampled_from([Scheduler, AsyncScheduler]),
    beside=st.sampled_from(["", "windows", "states"]),
    blocks=st.integers(0, 14),
    seqs=st.sampled_from([2, 4, 16]),
)
def test_all_requests_end(
    make_any: Callable[..., EngineScheduler],
    drafts: bool,
    order: str,
    scheduler: type[Scheduler],
    who_computes: str,
    seed: int,
    beside: str,
    blocks: int,
    seqs: int,
) -> None:
    drawn = random.Random(seed)
    windowed, states = beside == "windows", beside == "states"
    of_states = 2 + (DRAFTS + 1 if drafts else 0)  # with one less, vLLM preempts the longest request for ever
    decode = make_any(
        blocks=(2 * LONGEST + 2 if windowed else LONGEST + states * of_states) + blocks,
        drafts=drafts,
        caching=drawn.random() < 0.5 or states,
        failures="fail" if windowed else drawn.choice(["fail", "recompute"]),
        order=order,
        max_num_seqs=seqs,
        windowed=windowed,
        states=states,
        # Beside cached states, vLLM admits more adapters than fit while a running request skips a step.
        max_loras=None if states else drawn.choice([None, 1, 2]),
        scheduler_class=scheduler,
        seed=seed,
        who_computes=who_computes,
        pipelined=not drafts and drawn.random() < 0.5,
    )
    resets = random.Random(seed) if drawn.random() < 0.5 else None
    play(decode, [wanted(drawn, order) for _ in range(drawn.randint(2, 14))], resets)
    decode.close()
