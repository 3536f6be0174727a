# SPDX-License-Identifier: Apache-2.0
"""Our transfer engine in a process where vllm-ascend's connectors have one, with Mooncake's wheels for NPUs."""

from pathlib import Path

import pytest

from harness.pool import long
from mooncake_wheels import WHEELS, printed

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

PROGRAM = """
import os, subprocess, sys, torch
from vllm_ascend_pd.connector.setup import shared_engine
from vllm_ascend_pd.device.npu import NpuDevice
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.core.layout import LayerSpec
MIB = 1 << 20
torch.npu.set_device(int(sys.argv[1] == "peer"))  # there are no transfers inside an NPU
device = NpuDevice()

if sys.argv[1] == "peer":  # an engine of its own, which is written to
    memory = device.allocate(2 * MIB).zero_()
    torch.npu.synchronize()  # or it could be zeroed after the first write
    engine = TransferEngine("127.0.0.1", "ascend", TransferLimits())
    engine.register([(memory.data_ptr(), memory.numel())])
    print(engine.session, memory.data_ptr(), flush=True)
    for line in sys.stdin:
        torch.npu.synchronize()
        print(bytes(memory[: int(line)].tolist()), flush=True)
    sys.exit()

from vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine import global_te
from vllm_ascend.distributed.kv_transfer.utils.utils import collect_storage_merged_register_regions

peer = subprocess.Popen([sys.executable, sys.argv[2], "peer"], stdin=-1, stdout=-1, text=True)
session, there = next(line for line in peer.stdout if line.startswith("127.")).split()

def at_peer():
    print(4, file=peer.stdin, flush=True)
    return peer.stdout.readline().strip()

# 6 MiB of which the first 4 MiB hold K and V with a gap of 4 KiB.
storage = device.allocate(6 * MIB).zero_()
def cut(offset):
    return storage[offset : offset + MIB].view(torch.bfloat16).view(16, 16, 2, 1024)
caches = {"layers.0": (cut(0), cut(MIB + 4096))}
ring = device.allocate(2 * MIB)
ring[:4] = torch.tensor(list(b"ring"), dtype=torch.uint8)
storage[:4] = torch.tensor(list(b"mine"), dtype=torch.uint8)
torch.npu.synchronize()

def theirs():
    global_te.get_transfer_engine("127.0.0.1", None)
    regions = collect_storage_merged_register_regions(caches)
    global_te.register_buffer(regions.ptrs, regions.lengths)

def ours():
    engine = TransferEngine("127.0.0.1", "ascend", TransferLimits(), shared_engine("ascend"))
    known = describe(caches, {"layers.0": LayerSpec(0, 16, 2, 2)}, heads_first=False)
    engine.register(known.regions(), of_caches=True)
    engine.register([(ring.data_ptr(), ring.numel())])
    return engine

if sys.argv[1] == "theirs first":
    theirs()
    engine = ours()
else:
    engine = ours()
    theirs()

print("THREADS", os.environ["ASCEND_THREAD_POOL_SIZE"])
print("SESSION", engine.session == f"127.0.0.1:{global_te.transfer_engine.get_rpc_port()}")
engine.write(session, [storage.data_ptr()], [int(there)], [4])
print("CACHES", at_peer())
engine.write(session, [ring.data_ptr()], [int(there)], [4])
print("RING", at_peer())
engine.close()
mooncake = global_te.transfer_engine
print("THEIRS", mooncake.transfer_sync_write(session, storage.data_ptr(), int(there), 4), at_peer())
print("RING AFTER CLOSE", mooncake.transfer_sync_write(session, ring.data_ptr(), int(there), 4), at_peer(), flush=True)
peer.kill()
"""


@pytest.mark.parametrize("order", ["theirs first", long("ours first")])
@pytest.mark.parametrize("wheel", [*WHEELS[:1], *map(long, WHEELS[1:])])
def test_one_mooncake_engine_serves_vllm_ascend_and_us(wheel: str, order: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    said = printed(str(program), order, str(program), wheel=wheel).splitlines()
    # Mooncake's pool is what it was when its engine started, whoever started it.
    assert said[-6] == f"THREADS {8 if order == 'theirs first' else 16}"
    assert said[-5:] == [
        "SESSION True",
        "CACHES b'mine'",
        "RING b'ring'",
        "THEIRS 0 b'mine'",  # closing ours takes nothing from them
        "RING AFTER CLOSE -1 b'mine'",  # and what was only ours is given back
    ]
