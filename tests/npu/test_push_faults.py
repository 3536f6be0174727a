# SPDX-License-Identifier: Apache-2.0
"""What fails on an NPU or between NPUs while layers are pushed ends in the requests concerned, with a reason on both
sides; nobody hangs, decode never takes wrong bytes for right ones, and no block is held for ever (R1 to R5)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import cann_on_host
from harness.kv import GQA, Side, layer_name
from harness.rank_programs import PrefillRank, refuse_work
from harness.ranks import Pair, connected_pair, prompts, run

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

BLOCK = 128
QUICK = {"write_timeout_s": 2.0, "collective_timeout_s": 10.0, "lease_s": 5.0, "settle_timeout_s": 5.0}

# What is done to KV on its way: tensor-parallel sizes of prefill and decode.
SIZES = {"direct": (1, 1), "gather": (2, 1), "split": (1, 2)}

STREAM_FAILED = "the NPU reported an error"

SETTLED_S = 400.0
"""Decode keeps the blocks of a killed prefill rank until Mooncake would have given up: 238 s with `QUICK`."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """HCCL and the NPU give up after 5 seconds, which a busy machine needs for its first collective. torch_npu's
    watchdog, which ends a process in which a collective has failed, is off: what the process does then is to be seen.
    """
    monkeypatch.setenv("CANN_ON_HOST_HCCL_TIMEOUT_S", "5")
    monkeypatch.setenv("CANN_ON_HOST_OP_TIMEOUT_S", "5")
    monkeypatch.setenv("TORCH_HCCL_ASYNC_ERROR_HANDLING", "0")


@contextmanager
def pair_of(work: str) -> Iterator[Pair]:
    sides = (Side(tp, num_blocks=16, block_size=BLOCK) for tp in SIZES[work])
    with connected_pair(GQA, *sides, QUICK, device="npu") as pair:
        for rank in pair.p_ranks:
            rank.retire()  # a stream that has failed stays so
        yield pair


def inject_before_computing(rank: PrefillRank, layer: int, faults: str) -> None:
    """Injects the fault when the layer is next computed."""
    compute = rank.compute

    def late(index: int, copies: list[Any]) -> None:
        if index == layer:
            rank.compute = compute  # type: ignore[method-assign]
            cann_on_host.inject(faults)
        compute(index, copies)

    rank.compute = late  # type: ignore[method-assign]


def inject_before_pushing(rank: PrefillRank, layer: int, faults: str) -> None:
    """Injects the fault when the layer is next announced."""
    announce = rank.worker.push_layer

    def late(name: str) -> None:
        if name == layer_name(layer):
            rank.worker.push_layer = announce  # type: ignore[method-assign]
            cann_on_host.inject(faults)
        announce(name)

    rank.worker.push_layer = late  # type: ignore[method-assign]


def fail_hccl_once(rank: PrefillRank) -> None:
    inject_before_pushing(rank, 1, "hccl:fail")


def restart_needed(rank: PrefillRank) -> int:
    """Returns the metric `restart_needed`."""
    return int(rank.worker.status().restart_needed)


def compute_nothing(rank: PrefillRank) -> None:
    """Makes steps find their KV in the cache from now on: a device whose compute stream has failed computes nothing."""
    rank._values = lambda *_: []  # type: ignore[method-assign]


def expect_failure(pair: Pair, reason: str, count: int) -> None:
    """Checks that both sides end `count` requests with a reason."""
    received, failed = pair.wait_arrivals(count)
    sent = pair.wait_sent(count)
    assert received == set()
    assert len(failed) == len(sent) == count
    for why in (*failed.values(), *sent.values()):
        assert reason in why


@pytest.mark.parametrize(("work", "layer"), [("direct", 1), ("split", 0), ("gather", 0)])
def test_a_compute_stream_that_fails(work: str, layer: int) -> None:
    with pair_of(work) as pair:
        pair.p_ranks[0].call("do", inject_before_computing, layer, "task:fail@2")
        requests = prompts(pair, [BLOCK, 2 * BLOCK])
        run(pair, requests)
        expect_failure(pair, STREAM_FAILED, 2)
        pair.each(pair.p_ranks, "do", compute_nothing)
        run(pair, requests)
        expect_failure(pair, STREAM_FAILED, 2)


@pytest.mark.parametrize("work", ["split", "gather"])
def test_a_side_stream_that_fails(work: str) -> None:
    """The compute stream is well; what has to be regrouped is not pushed any more."""
    with pair_of(work) as pair:
        pair.p_ranks[0].call("do", inject_before_pushing, 1, "side-task:fail")
        requests = prompts(pair, [BLOCK, 2 * BLOCK])
        for _ in range(2):
            run(pair, requests)
            expect_failure(pair, STREAM_FAILED, 2)
        assert pair.p_ranks[0].call("do", restart_needed) == 1


@pytest.mark.parametrize("miss", [fail_hccl_once, refuse_work])
def test_a_collective_that_one_rank_misses(miss: Callable[[PrefillRank], None]) -> None:
    """Its later collectives must not meet the other rank's earlier ones: decode would get wrong bytes and no error."""
    with pair_of("gather") as pair:
        pair.p_ranks[0].call("do", miss)
        requests = prompts(pair, [BLOCK] * 4)
        for request in requests:
            run(pair, [request])
        received, failed = pair.wait_arrivals(4)
        assert received == set(), pair.differences(requests)
        assert failed.keys() == {request.request_id for request in requests}
        assert pair.wait_sent(4).keys() == failed.keys()
        assert [rank.call("do", restart_needed) for rank in pair.p_ranks] == [1, 1]


def test_an_hccl_call_that_hangs() -> None:
    with pair_of("gather") as pair:
        pair.p_ranks[0].call("do", inject_before_pushing, 1, "hccl:hang")
        requests = prompts(pair, [BLOCK] * 2)
        for _ in range(2):
            run(pair, requests)
            expect_failure(pair, STREAM_FAILED, 2)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_decode_ends_the_requests_of_a_process_that_torch_npu_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by default: torch_npu's watchdog takes a process down in which a collective has failed."""
    monkeypatch.delenv("TORCH_HCCL_ASYNC_ERROR_HANDLING")
    with pair_of("gather") as pair:
        survivor, victim = pair.p_ranks
        victim.call("do", inject_before_pushing, 1, "hccl:hang")
        run(pair, prompts(pair, [BLOCK]))
        pair.kill(victim)
        received, failed = pair.wait_arrivals(1, SETTLED_S)
        assert (received, failed.keys()) == (set(), {"request-0"})
        assert survivor.dies(30)
        pair.kill(survivor)
