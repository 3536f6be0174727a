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
from mooncake_wheels import WHEELS, printed

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

PROGRAM = """
import os, subprocess, sys, threading, time, torch
import cann_on_host
from vllm_ascend_pd.device.npu import NpuDevice
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import TransferError
from vllm_ascend_pd.transport.batches import TransferLimits
torch.npu.set_device(int(sys.argv[1] == "peer"))  # there are no transfers inside an NPU
memory = NpuDevice().allocate(2 << 20).zero_()
torch.npu.synchronize()
engine = TransferEngine("127.0.0.1", "ascend", TransferLimits(timeout_s=1))
engine.register([(memory.data_ptr(), memory.numel())])

if sys.argv[1] == "peer":
    print(engine.session, memory.data_ptr(), flush=True)
    sys.stdin.read()
    sys.exit()

def write():
    begun = time.monotonic()
    try:
        engine.write(session, [memory.data_ptr()], [int(there)], [4])
        return "WRITTEN", time.monotonic() - begun
    except TransferError as error:
        return "FAILED", time.monotonic() - begun

peer = subprocess.Popen([sys.executable, sys.argv[1], "peer"], stdin=-1, stdout=-1, text=True)
session, there = next(line for line in peer.stdout if line.startswith("127.")).split()
print("FIRST", *write(), flush=True)
with cann_on_host.link_fault(peer.pid, "hang"):
    repaired = threading.Timer(4.0, cann_on_host.link_fault(peer.pid, "slow 0").__enter__)
    repaired.start()
    print("REPAIRED", *write(), flush=True)
    repaired.join()
peer.kill()
os._exit(0)
"""


@pytest.mark.parametrize("wheel", WHEELS)
def test_a_link_that_comes_back_while_roce_sends_again_fails_no_write(wheel: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # RoCE sends again for 7.5 s; without that, both of Mooncake's attempts would be over after 3 s.
    env = {"CANN_ON_HOST_LINKS": str(tmp_path), "HCCL_RDMA_TIMEOUT": "18"}
    said = printed(str(program), str(program), wheel=wheel, **env)
    found = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.strip()}
    assert found["FIRST"][0] == "WRITTEN"
    assert found["REPAIRED"][0] == "WRITTEN"
    assert 3 < float(found["REPAIRED"][1]) < 9


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
