# SPDX-License-Identifier: Apache-2.0
"""Blocks of windows stay as they are while they are sent, in vLLM's own block pools: of both sides."""

import dataclasses
import hashlib
import math
from typing import Any

import msgspec
import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from harness.block_tables import BlockTables
from harness.connectors import caches_of
from harness.schedulers import prefill_scheduler
from harness.scheduling import make_output, make_request, remembered
from harness.tickets import ticket_with
from vllm_ascend_pd.connector import patches
from vllm_ascend_pd.connector.caches import lost_blocks_say_all
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.decode.arrivals import Arrivals
from vllm_ascend_pd.decode.worker import DecodeWorker

BLOCK = 4
OF_A_BLOCK: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
SLIDING = SlidingWindowSpec(**OF_A_BLOCK, sliding_window=6)
LOCAL = ChunkedLocalAttentionSpec(**OF_A_BLOCK, attention_chunk_size=8)
WINDOWED = 1  # the cache group beside full attention's

kinds = pytest.mark.parametrize("spec", [SLIDING, LOCAL], ids=["sliding window", "chunked local attention"])


class Engine(BlockTables):
    """Of a model with cache groups of these kinds."""

    def __init__(self, *specs: Any, block: int = BLOCK, caching: bool = False) -> None:
        super().__init__(caches_of(*specs, blocks=40), block, block, 64, caching)
        self.all_free = self.pool.get_num_free_blocks()

    def handed_out(self) -> set[int]:
        """What other requests may get now: all that is free."""
        blocks = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        ids = {block.block_id for block in blocks}
        self.pool.free_blocks(blocks)
        return ids


def ticket_of(decode: Engine, prompt: int, block: int = BLOCK) -> Ticket:
    """What decode asks for: all but the prompt's last token."""
    request = make_request("d", prompt, None)
    request.num_computed_tokens = 0
    blocks = decode.allocate(request, 0, num_external_computed_tokens=prompt - 1, delay_cache_blocks=True)
    return ticket_with(
        request_id="d",
        remote_block_ids=[list(ids) for ids in blocks],
        remote_block_size=[block, block],
        remote_engine_id="decode",
        ticket_id=hashlib.md5(b"d", usedforsecurity=False).hexdigest(),
        num_tokens=prompt - 1,
    )


class Prefill(Engine):
    """With a request for `ticket`. Of the last group, decode has blocks for those that are `wanted`."""

    def __init__(self, ticket: Ticket, *specs: Any) -> None:
        super().__init__(*specs)
        self.ticket = ticket
        self.scheduler = prefill_scheduler(self.groups, pool=self.pool)
        self.asked = make_request("p", ticket.num_tokens + 1, msgspec.to_builtins(ticket))
        self.asked.num_computed_tokens = 0

    def wanted(self, number: int) -> bool:
        return self.ticket.remote_block_ids[-1][number * BLOCK // self.ticket.remote_block_size[-1]] != 0

    def sent(self, tokens: int) -> dict[int, int]:
        """Computes so many tokens. Returns which of its blocks are sent to decode, with their numbers in the prompt."""
        sends = self.step(self.scheduler, self.asked, tokens).sends
        placed = (enumerate(send.blocks[-1], send.start // BLOCK) for send in sends)
        return {block: number for of_send in placed for number, block in of_send if self.wanted(number)}

    def generate(self, tokens: int) -> None:
        for token in range(tokens):
            self.asked.append_output_token_ids(token)
            self.sent(1)

    def finish(self) -> None:
        """As vLLM's scheduler does it."""
        self.manager.remove_skipped_blocks("p", self.asked.num_computed_tokens)
        assert self.scheduler.end_request(self.asked)[0]

    def end(self) -> None:
        """Once all is sent."""
        self.manager.free(self.asked)
        self.scheduler.update(None, {"p"})
        assert remembered(self.scheduler) == {}


def windowed_prefill(spec: Any, prompt: int) -> Prefill:
    specs = FullAttentionSpec(**OF_A_BLOCK), spec
    return Prefill(ticket_of(Engine(*specs), prompt), *specs)


@kinds
@pytest.mark.parametrize("chunk", [64, 5])
@pytest.mark.parametrize("generated", [0, 20])
@pytest.mark.parametrize("prompt", range(2, 28))
def test_blocks_of_windows_are_held_until_they_are_sent(spec: Any, prompt: int, generated: int, chunk: int) -> None:
    prefill, sent = windowed_prefill(spec, prompt), set()
    for begin in range(0, prompt, chunk):
        sent |= {*prefill.sent(min(chunk, prompt - begin))}
        assert not sent & prefill.handed_out()
    prefill.generate(generated)
    assert not sent & prefill.handed_out()
    prefill.finish()
    assert len(sent) == sum(map(bool, prefill.ticket.remote_block_ids[WINDOWED]))
    assert not sent & prefill.handed_out()
    prefill.end()
    assert prefill.pool.get_num_free_blocks() == prefill.all_free


def test_blocks_are_held_while_decodes_longer_ones_fill_up() -> None:
    """Parts are cut to the longer blocks: of a window, tokens that are computed are sent only steps later."""
    d_block, prompt = 4 * BLOCK, 30
    narrow = SlidingWindowSpec(**OF_A_BLOCK, sliding_window=3)
    decode = Engine(dataclasses.replace(narrow, block_size=d_block), block=d_block)
    prefill = Prefill(msgspec.structs.replace(ticket_of(decode, prompt, d_block), remote_block_size=[d_block]), narrow)
    prefill.pool.get_new_blocks(prefill.all_free - 7)  # others': of what is given away, blocks soon come again
    free = prefill.pool.get_num_free_blocks()
    computed: dict[int, int] = {}  # block id -> its number, of what was computed last
    done = 0
    for tokens in (22, 4, 4):
        sent = prefill.sent(tokens)
        [blocks] = prefill.blocks("p")
        computed |= {blocks[n]: n for n in range(done // BLOCK, math.ceil((done + tokens) / BLOCK))}
        assert sent.items() <= computed.items(), "a block holds other tokens"
        done += tokens
    prefill.finish()
    prefill.end()
    assert prefill.pool.get_num_free_blocks() == free
    assert len({block.block_id for block in prefill.pool.get_new_blocks(free)}) == free, "a block was given away twice"


def test_no_block_is_of_two_groups_where_some_are_cached() -> None:
    """Of decode: new blocks of one group, for tokens from prefill, and cached ones of the next."""
    patches.install_for_decode_scheduler()
    window = SlidingWindowSpec(**OF_A_BLOCK, sliding_window=12)
    decode = Engine(FullAttentionSpec(**OF_A_BLOCK), window, caching=True)

    beginning = list(range(100, 112))
    before, others = decode.request("before", beginning), decode.request("others", range(200, 248))
    for each in (before, others):  # the second leaves the first one's blocks to be given away next
        for _ in decode.compute(each, each.num_tokens):
            pass
    rest = decode.pool.get_num_free_blocks() - 2 * (len(beginning) + 48) // BLOCK
    decode.pool.get_new_blocks(rest)
    asked = decode.request("asked", [*beginning, *range(300, 309)])
    cached = decode.cached(asked)
    external = asked.num_tokens - 1 - len(beginning)
    assert cached["num_new_computed_tokens"] == len(beginning)
    blocks = decode.allocate(asked, 0, num_external_computed_tokens=external, delay_cache_blocks=True, **cached)
    full, windowed = (set(ids) - {0} for ids in blocks)
    assert not full & windowed
    assert all(decode.pool.blocks[block].ref_cnt == 1 for block in full | windowed)
    decode.manager.free(asked)
    assert decode.pool.get_num_free_blocks() == decode.all_free - rest


@kinds
@pytest.mark.parametrize(("p_block", "d_block"), [(4, 4), (4, 8), (4, 16), (8, 4), (8, 16)])
@pytest.mark.parametrize("prompt", range(2, 40))
def test_what_decode_wants_is_there_though_prefill_knows_the_prompt(
    spec: Any, p_block: int, d_block: int, prompt: int
) -> None:
    """By its prefix cache, which keeps less of a window than decode's first block of it holds, if that is longer."""

    def of(block: int) -> list[Any]:
        sizes = {"block_size": block}
        return [dataclasses.replace(each, **sizes) for each in (FullAttentionSpec(**OF_A_BLOCK), spec)]

    decode = Engine(*of(d_block), block=d_block)
    ticket = ticket_of(decode, prompt, d_block)
    prefill = Engine(*of(p_block), block=p_block, caching=True)
    for _ in prefill.compute(prefill.request("before", prompt), prompt):
        pass
    request = prefill.request("p", prompt, msgspec.to_builtins(ticket))
    scheduler = prefill_scheduler(prefill.groups, pool=prefill.pool)
    scheduler.add_request(request)
    cached = prefill.cached(request)
    known = cached["num_new_computed_tokens"]
    assert not (known and d_block > p_block)
    [send] = prefill.step(scheduler, request, prompt - known, **cached).sends
    first = send.start // p_block
    for token in range(send.start, send.stop):
        if ticket.remote_block_ids[WINDOWED][token // d_block]:
            assert send.blocks[WINDOWED][token // p_block - first]


@kinds
def test_a_preempted_request_gets_all_blocks_back(spec: Any) -> None:
    """Else it might wait for what it holds itself. In the same step ranks end what reads them."""
    prefill = windowed_prefill(spec, prompt=24)
    prefill.sent(24)
    prefill.manager.free(prefill.asked)
    assert prefill.pool.get_num_free_blocks() < prefill.all_free
    assert prefill.scheduler.build_step(make_output(preempted=[prefill.asked])).preempted == {"p"}
    assert prefill.pool.get_num_free_blocks() == prefill.all_free


@pytest.mark.parametrize(
    "specs",
    [(FullAttentionSpec(**OF_A_BLOCK),), (SLIDING,), (FullAttentionSpec(**OF_A_BLOCK), SLIDING)],
    ids=["all tokens", "a window", "both"],
)
def test_what_is_lost_is_computed_again_from_the_start(specs: tuple[Any, ...]) -> None:
    """By decode, whose vLLM is to recompute: before a window it has no blocks, and has computed nothing either."""
    patches.install_for_decode_scheduler()
    decode = Engine(*specs)
    request = make_request("d", 24, None)
    request.num_computed_tokens, request.status = 23, RequestStatus.WAITING_FOR_REMOTE_KVS
    blocks = decode.allocate(request, 0, num_external_computed_tokens=23, delay_cache_blocks=True)
    worker: Any = object.__new__(DecodeWorker)
    worker.take_arrivals = lambda: Arrivals({"d"}, {"d"}, {block for ids in blocks for block in ids if block})
    by_request = HAS_TRANSFER_RESULTS and not lost_blocks_say_all(decode.config)
    worker._fails_by_request, worker._lost_blocks = by_request, set()
    scheduler: Any = object.__new__(Scheduler)
    vars(scheduler).update(
        recompute_kv_load_failures=True,
        failed_recving_kv_req_ids=set(),
        kv_cache_config=decode.config,
        kv_cache_manager=decode.manager,
        block_size=BLOCK,
        requests={"d": request},
        running=[],
        kv_holding_waiting=[request],
        skipped_waiting=[request],
    )
    results = worker.take_results()
    if results.failed:
        scheduler._handle_failed_recving(results.failed)
    if lost := worker.take_lost_blocks():
        scheduler._handle_invalid_blocks(lost, {})
    assert request.num_computed_tokens == 0
    assert scheduler.failed_recving_kv_req_ids == {"d"}
