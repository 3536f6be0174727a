# SPDX-License-Identifier: Apache-2.0
"""A link that RoCE repairs by itself costs a request time, and does not fail it."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import cann_on_host
from harness.kv import Model, Side
from harness.ranks import Pair, prompts, run

pytestmark = [pytest.mark.npu, pytest.mark.emulated]


def process_of(rank: Any) -> int:
    return os.getpid()


def test_a_link_that_comes_back_while_roce_sends_again_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its lease and its deadlines hold for as long as the link is gone, which is longer than `write_timeout_s`."""
    monkeypatch.setenv("CANN_ON_HOST_LINKS", str(tmp_path))
    monkeypatch.setenv("HCCL_RDMA_TIMEOUT", "18")
    config = {"write_timeout_s": 1.0, "lease_s": 2.0, "settle_timeout_s": 5.0}
    side = Side(1, num_blocks=16, block_size=128)
    pair = Pair(Model(layers=3, heads=4, widths=(32, 32)), side, side, config, device="npu")
    try:
        run(pair, prompts(pair, [128]))  # connects
        assert pair.wait_arrivals(1) == ({"request-0"}, {})
        assert pair.wait_sent(1) == {}
        process = pair.d_ranks[0].call("do", process_of)
        with cann_on_host.link_fault(process, "hang"):
            repair = threading.Timer(5.0, cann_on_host.link_fault(process, "slow 0").__enter__)
            repair.start()
            begun = time.monotonic()
            run(pair, prompts(pair, [256], seed=1))
            assert pair.wait_arrivals(1) == ({"request-0"}, {})
            assert time.monotonic() - begun > 3
            repair.join()
    finally:
        left = pair.close()
    assert left == [], "\n".join(left)
