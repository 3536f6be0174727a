# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of states, with vLLM's own schedulers on both sides and workers that keep what blocks hold.

A block of a state holds the tokens that the state has seen, and a slot of attention's those up to its own. Each step
checks that what it reads is of the request's own tokens, and copies states between blocks as vLLM's workers do in
`mamba_cache_mode` align.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.engines import Role
from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import BLOCK, RealScheduler
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS
from vllm_ascend_pd.core.step import Send, WorkerReport
from vllm_ascend_pd.core.ticket import Ticket

STATES = (1, 2)
"""The cache groups of states. Group 0 is attention's."""


class Engine:
    """A scheduler and what its worker's blocks hold."""

    def __init__(self, role: Role, model: Path, blocks: int, drafts: int = 0, dcp: int = 1) -> None:
        self.scheduler = RealScheduler(role, model, blocks, step_tokens=64, states=len(STATES), drafts=drafts, dcp=dcp)
        self.span = BLOCK * dcp  # tokens that a block of attention stands for
        self.drafts = drafts
        self.slots: dict[tuple[int, int], int] = {}  # by attention's block and slot: the hash of all tokens up to it
        self.states: dict[tuple[int, int], int] = {}  # by group and block: the hash of the tokens that it has seen
        self.tables: dict[str, list[list[int]]] = {}
        self.state_index: dict[str, int] = {}
        self.hits = 0  # tokens that requests began behind

    def step(self, report: WorkerReport | None = None, **said: set[str]) -> tuple[Any, list[Any]]:
        output = self.scheduler.schedule()
        self._run(output)
        return output, self.scheduler.end(output, report, **said)

    def _run(self, output: Any) -> None:
        computed: dict[str, int] = {}
        cached = output.scheduled_cached_reqs
        for ended in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids):
            self.state_index.pop(ended, None)
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
            self.hits += new.num_computed_tokens
        for request_id, blocks, tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = [list(ids) for ids in blocks]
            else:
                for table, ids in zip(self.tables[request_id], blocks or (), strict=False):
                    table.extend(ids)
            computed[request_id] = tokens
        for request_id, number in output.num_scheduled_tokens.items():
            tokens = list(self.scheduler.vllm.requests[request_id].all_token_ids)
            self._compute(request_id, tokens, computed[request_id], computed[request_id] + number)

    def _compute(self, request_id: str, tokens: list[int], start: int, stop: int) -> None:
        attention = self.tables[request_id][0]
        for token in range(start):
            assert self.slots.get((attention[token // self.span], token % self.span)) == seen(tokens, token + 1)
        for token in range(start, stop):
            assert attention[token // self.span] != 0
            self.slots[attention[token // self.span], token % self.span] = seen(tokens, token + 1)
        before = self.state_index.get(request_id, (start - 1) // BLOCK)
        now = self.state_index[request_id] = (stop - 1) // BLOCK
        for group in STATES:
            table = self.tables[request_id][group]
            assert table[now] != 0
            if before not in (-1, now):
                self.states[group, table[now]] = self.states[group, table[before]]
            if start:
                assert self.states.get((group, table[now])) == seen(tokens, start), f"{request_id} at {start}"
            self.states[group, table[now]] = seen(tokens, stop)

    def close(self) -> None:
        self.scheduler.close()


def seen(tokens: list[int], number: int) -> int:
    return hash(tuple(tokens[:number]))


class Pair:
    """Both sides, and the transfers between them."""

    def __init__(self, prefill: Engine, decode: Engine, params: dict[str, Any]) -> None:
        self.prefill, self.decode, self.params = prefill, decode, params
        self.tickets: dict[str, Ticket] = {}
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.decode_cached = 0
        self.preempted = 0  # requests on decode
        self.transfers = 0

    def ask(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.decode.scheduler.add(request_id, prompt, self.params, max_tokens)

    def round(self) -> set[str]:
        """A step of both engines. Returns the requests that decode has ended."""
        received, self.received = self.received, set()
        _, outputs = self.decode.step(**({"finished_recving": received} if received else {}))
        self._take_tickets()
        sent, self.sent = self.sent, set()
        output, _ = self.prefill.step(**({"finished_sending": sent} if sent else {}))
        for send in output.kv_connector_metadata.step.sends:
            self._transfer(send)
        return {each.request_id for each in outputs if each.finished}

    def _take_tickets(self) -> None:
        transfers = self.decode.scheduler.connector._role._transfers
        for request_id, transfer in transfers.items():
            ticket = transfer.ticket
            if self.tickets.get(request_id) == ticket:
                continue
            self.tickets[request_id] = ticket
            self.decode_cached += ticket.remote_cached_tokens
            prompt = self.decode.scheduler.vllm.requests[request_id].all_token_ids
            self.prefill.scheduler.add(request_id, prompt, msgspec.to_builtins(ticket))

    def _transfer(self, send: Send) -> None:
        ticket = self.tickets[send.request_id]
        start, stop = send.tokens(0)
        for token in range(start, stop):
            ours, theirs = self.prefill.span, self.decode.span
            block = send.blocks[0][token // ours - start // ours]
            to = ticket.remote_block_ids[0][token // theirs]
            self.decode.slots[to, token % theirs] = self.prefill.slots[block, token % ours]
        for group in STATES:
            assert len(send.blocks[group]) == send.last
            if send.last:
                [block], [to] = send.blocks[group], ticket.remote_block_ids[group]
                assert block
                assert to
                self.decode.states[group, to] = self.prefill.states[group, block]
        if send.last:
            self.sent.add(send.request_id)
            self.received.add(send.request_id)
            self.transfers += 1


@pytest.fixture
def blocks() -> int:
    """How many blocks each engine has."""
    return 200


@pytest.fixture(params=[(0, 1), (2, 1)], ids=["no drafts", "two drafts"])
def pair(request: Any, blocks: int, scheduled_model: Path, all_prefilled: dict[str, Any]) -> Iterator[Pair]:
    drafts, dcp = request.param
    prefill = Engine(Role.PREFILL, scheduled_model, blocks, drafts)
    decode = Engine(Role.DECODE, scheduled_model, blocks, drafts, dcp)
    yield Pair(prefill, decode, all_prefilled)
    prefill.close()
    decode.close()


def converse(pair: Pair, chance: random.Random, conversations: int, turns: int, name: str = "") -> None:
    """Conversations side by side: each turn has the last one's prompt and answer, and some tokens more."""
    prompts = {f"{name}-{number}": chance.choices(range(9), k=chance.randint(2, 80)) for number in range(conversations)}
    left = dict.fromkeys(prompts, turns)
    running: dict[str, str] = {}
    for _ in range(2000):
        for name in [each for each in left if left[each] and each not in running.values()]:
            request_id = f"{name}-{left[name]}"
            running[request_id] = name
            left[name] -= 1
            pair.ask(request_id, prompts[name], chance.randint(1, 30))
        requests = dict(pair.decode.scheduler.vllm.requests)
        for request_id in pair.round():
            said = list(requests[request_id].all_token_ids)
            pair.preempted += requests[request_id].num_preemptions
            prompts[running.pop(request_id)] = [*said, *chance.choices(range(9), k=chance.randint(0, 30))]
        if not running and not any(left.values()):
            return
    raise AssertionError(f"still running: {running}")


@pytest.mark.parametrize("seed", range(8))
def test_conversations(pair: Pair, seed: int) -> None:
    converse(pair, random.Random(seed), conversations=4, turns=5)
    assert pair.transfers >= 4
    assert pair.prefill.hits
    assert pair.decode_cached


@pytest.mark.skipif(not HAS_TRANSFER_RESULTS, reason="vLLM 0.23 itself has no context parallelism beside states")
@pytest.mark.parametrize("pair", [(0, 2)], ids=["context parallelism on decode"], indirect=True)
def test_conversations_where_ranks_share_tokens(pair: Pair) -> None:
    """A block id of attention stands for a block on each rank, one of a state for copies of it."""
    for seed in range(4):
        converse(pair, random.Random(seed), conversations=4, turns=5, name=f"shared-{seed}")
    assert pair.transfers >= 16
    assert pair.decode_cached


@pytest.mark.parametrize("blocks", [45])
def test_conversations_with_few_blocks(pair: Pair, blocks: int) -> None:
    """Cached states are evicted and requests preempted."""
    for seed in range(8):
        converse(pair, random.Random(seed), conversations=6, turns=4, name=f"few-{seed}")
    assert pair.preempted


@pytest.mark.parametrize("tokens", [2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 4 * BLOCK + 1, 4 * BLOCK + 2, 100])
@pytest.mark.parametrize("forgets", [False, True], ids=["decode has it", "decode forgets it"])
def test_the_same_prompt_again(pair: Pair, tokens: int, forgets: bool) -> None:
    """Where decode forgets it, prefill has cached all that it is asked for, if that ends with a block."""
    for number in range(3):
        pair.ask(f"{number}", list(range(tokens)), 3)
        while not pair.round():
            pass
        if forgets:
            pair.round()
            assert pair.decode.scheduler.vllm.kv_cache_manager.reset_prefix_cache()
    assert pair.transfers == 3 or not forgets
