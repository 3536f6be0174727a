# SPDX-License-Identifier: Apache-2.0
"""A link that RoCE repairs by itself costs a request time, and does not fail it. One that hangs for longer fails the
request, and nothing of it is written once its blocks have another owner."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cann_on_host
from harness.kv import GQA, Side
from harness.rank_programs import DecodeRank
from harness.ranks import connected_pair, prompts, run

pytestmark = [pytest.mark.npu, pytest.mark.emulated]


OTHERS = 7
"""What the owner of blocks writes into them that decode gave back."""


SIDE = Side(1, num_blocks=16, block_size=128)
PAIR = (GQA, SIDE, SIDE)


def process_of(rank: Any) -> int:
    return os.getpid()


def test_a_link_that_comes_back_while_roce_sends_again_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its lease and its deadlines hold for as long as the link is gone, which is longer than `write_timeout_s`."""
    monkeypatch.setenv("CANN_ON_HOST_LINKS", str(tmp_path))
    monkeypatch.setenv("HCCL_RDMA_TIMEOUT", "18")
    config = {"write_timeout_s": 1.0, "lease_s": 2.0, "settle_timeout_s": 5.0}
    with connected_pair(*PAIR, config, device="npu") as pair:
        process = pair.d_ranks[0].call("do", process_of)
        with cann_on_host.link_fault(process, "hang"):
            repair = threading.Timer(5.0, cann_on_host.link_fault(process, "slow 0").__enter__)
            repair.start()
            begun = time.monotonic()
            run(pair, prompts(pair, [256], seed=1))
            assert pair.wait_arrivals(1) == ({"request-0"}, {})
            assert time.monotonic() - begun > 3
            repair.join()


def reuse(rank: DecodeRank, blocks: list[int]) -> None:
    """Gives the blocks to another owner."""
    for cache in kv_of(rank, blocks):
        cache.fill_(OTHERS)
    torch.npu.synchronize()


def is_untouched(rank: DecodeRank, blocks: list[int]) -> bool:
    """Whether the blocks hold what their owner wrote."""
    return all(bool(cache.eq(OTHERS).all().item()) for cache in kv_of(rank, blocks))


def kv_of(rank: DecodeRank, blocks: list[int]) -> list[torch.Tensor]:
    return [cache[block] for parts in rank.caches.values() for cache in parts for block in blocks]


@pytest.mark.long
def test_nothing_is_written_late_over_a_link_that_hung(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CANN_ON_HOST_LINKS", str(tmp_path))
    monkeypatch.setenv("HCCL_RDMA_TIMEOUT", "10")  # RoCE repairs nothing: a transfer has `write_timeout_s`
    config = {"write_timeout_s": 2.0, "lease_s": 5.0, "settle_timeout_s": 5.0, "grant_timeout_s": 60.0}
    with connected_pair(*PAIR, config, device="npu") as pair:
        [rank] = pair.d_ranks
        [prompt] = prompts(pair, [256], seed=1)
        with cann_on_host.link_fault(rank.call("do", process_of), "hang"):
            run(pair, [prompt])
            received, failed = pair.wait_arrivals(1, 60.0)
            assert (received, failed.keys()) == (set(), {"request-0"})
            rank.call("do", reuse, prompt.d_blocks)
        time.sleep(6.0)  # both of Mooncake's attempts, for whatever still waited for a thread
        assert rank.call("do", is_untouched, prompt.d_blocks)
        assert pair.wait_sent(1, 60.0).keys() == {"request-0"}
