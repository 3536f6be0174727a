# SPDX-License-Identifier: Apache-2.0
"""What may be registered for protocol `ascend`, with Mooncake's wheels for NPUs, and which NPU a process is on."""

from pathlib import Path

import pytest

from mooncake_wheels import WHEELS, printed

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

BEGIN = """
import torch
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import TransferError
from vllm_ascend_pd.transport.batches import TransferLimits
MIB = 1 << 20
torch.npu.set_device(0)
engine = TransferEngine("127.0.0.1", "ascend", TransferLimits())
def refused(regions):
    try:
        engine.register(regions)
    except TransferError as error:
        print("REFUSED", error.reason, flush=True)
    else:
        print("REGISTERED AT LAST", flush=True)
"""


@pytest.mark.parametrize("wheel", WHEELS)
def test_what_may_be_registered(wheel: str) -> None:
    program = """
from vllm_ascend_pd.device.npu import NpuDevice
from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.core.layout import LayerSpec
many = 257
storage = NpuDevice().allocate(many * 2 * MIB)
tensors = storage.view(torch.bfloat16).view(many, 16, 16, 2, 2048)
layers = {f"layers.{n}": tensor for n, tensor in enumerate(tensors)}
caches = describe(layers, dict.fromkeys(layers, LayerSpec(0, 16, 2, 2)), heads_first=False)
refused([(tensor.data_ptr(), 2 * MIB) for tensor in tensors])
engine.register(caches.regions())
print("REGISTERED", len(caches.regions()))
refused([(storage.data_ptr() + (1 << 40) + 64, 100)])
large = NpuDevice().allocate(50 << 30)
refused([(large.data_ptr(), 50 << 30)])
"""
    said = printed("-c", BEGIN + program, wheel=wheel)
    assert "REFUSED memory cannot be registered: 257 regions of memory, and HCCL takes 256 for each process" in said
    assert "REGISTERED 1\n" in said, "caches of one storage are one region"
    assert "REGISTERED AT LAST" in said, "more than HIXL's documented limit, which it does not check"
    assert "does not begin at a multiple of 2 MiB, which HCCS needs" in said


NO_ADDRESS = """
import os
from pathlib import Path
from vllm_ascend_pd.transport import ascend
ascend.HCCN_CONF = Path(os.environ["CANN_ON_HOST_HCCN_CONF"])
{ours}
try:
    import torch
    from vllm_ascend_pd.transport.engine import TransferEngine
    from vllm_ascend_pd.transport.batches import TransferLimits
    torch.npu.set_device(0)
    TransferEngine("127.0.0.1", "ascend", TransferLimits())
    print("STARTED")
except Exception as error:
    print("REFUSED", error)
"""


@pytest.mark.parametrize(
    ("ours", "comm_res", "outcome"),
    [
        ("", None, "failed: {conf} has no address_0"),
        ("ascend.check = lambda: None", None, "failed: Mooncake did not start"),  # the library by itself
        ("", "", "STARTED"),
    ],
)
def test_the_client_server_engine_needs_an_address(
    ours: str, comm_res: str | None, outcome: str, tmp_path: Path
) -> None:
    """Also where all goes over HCCS. The comm engine does not."""
    conf = tmp_path / "hccn.conf"
    conf.write_text("address_1=192.0.2.11\n")
    env = {"CANN_ON_HOST_HCCN_CONF": str(conf), **({} if comm_res is None else {"ASCEND_LOCAL_COMM_RES": comm_res})}
    said = printed("-c", NO_ADDRESS.format(ours=ours), wheel=WHEELS[-1], **env)
    assert outcome.format(conf=conf) in said


def test_acl_says_which_npu_of_the_machine_a_process_is_on() -> None:
    """In a container that sees only some of them, ASCEND_RT_VISIBLE_DEVICES does not."""
    program = """
import torch
from vllm_ascend_pd.tools.doctor.loading import PARTS
from vllm_ascend_pd.transport import ascend
print(ascend.physical_device(0), ascend.physical_device(1), ascend.chip_name(), PARTS["npus"].load().figures["npus"])
"""
    env = {"ASCEND_RT_VISIBLE_DEVICES": "2,3", "CANN_ON_HOST_FIRST_DEVICE": "4", "CANN_ON_HOST_DEVICES": "2"}
    assert printed("-c", program, wheel="", **env).endswith("6 7 Ascend910B1 6,7\n")
