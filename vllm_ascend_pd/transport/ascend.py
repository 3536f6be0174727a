# SPDX-License-Identifier: Apache-2.0
"""Mooncake's protocol `ascend`: its settings, and what must be there for it to work.

Facts and where they are from:

- Mooncake, docs/source/design/transfer-engine/transport/ascend_direct_transport.md: its settings and their units; a
  device is set before an engine starts; `/etc/hccn.conf` exists, in containers too; `MC_TRANSFER_TIMEOUT` is greater
  than `ASCEND_TRANSFER_TIMEOUT`, or a batch that was given up is still under way.
- Mooncake 0.3.13, transfer_executor_base.cpp and sync_transfer_executor.cpp: a batch is tried twice, each time with a
  connection, a transfer and, if that failed, a disconnection of 1 s; with it the network stops sending.
- CANN's HIXL, which that transport calls (src/hixl/common/hixl_utils.cc `GetDeviceIp`, docs/cpp `Connect`): an NPU's
  address is in `/etc/hccn.conf` as `address_<physical device>=<IP>` (or `IPv6address_...`). A file that cannot be
  opened and an entry that is no address are errors. Without the file it asks `hccn_tool`, of the driver's folder or
  of `PATH`. Without an address there is no RoCE; HCCS, inside a server or a super node, needs none.
- CANN's environment variables `HCCL_RDMA_TIMEOUT` (5 to 24, 20 by default) and `HCCL_RDMA_RETRY_CNT` (1 to 7, 7 by
  default): a packet without an answer is sent again after 4.096 us * 2 ^ the first, as often as the second says. The
  first source: `ASCEND_TRANSFER_TIMEOUT` is slightly longer than all of that, 30 s by default.
- Measured: Mooncake built without this transport starts with protocol `ascend` all the same, and uses TCP.
"""

from __future__ import annotations

import ctypes
import ipaddress
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_pd.transport import mooncake_library

HCCN_CONF = Path("/etc/hccn.conf")
HCCN_TOOL = Path("/usr/local/Ascend/driver/tools/hccn_tool")
LOG_LEVEL = "ERROR"
"""Mooncake's preset log level with this protocol. At WARNING, 0.3.13 writes a line for each descriptor to a peer whose
NPU is not its process's first (transfer_executor_base.cpp, EngineNameForDestAddr), which is thousands per batch."""
INSTALL = "pip install mooncake-transfer-engine-npu, or build Mooncake with -DUSE_ASCEND_DIRECT=ON"

_ATTEMPTS = 2
_DISCONNECT_S = 1.0
_LONGEST_S = 3600.0  # that a peer accepts (core/protocol.py)
_CLASSES = (b"AscendDirectTransport", b"HcclTransport")
"""Mooncake's transports for the protocol; 0.3.13's wheel has the first one in a library `ascend_transport.so`."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, and what to do about it. `fatal`: nothing can be transferred like this."""

    message: str
    fatal: bool = False


def settings(timeout_s: int, preset: Mapping[str, str]) -> dict[str, str]:
    """The environment that limits a connection to `timeout_s`, and a transfer to that or `repair_s`, whichever is
    longer. What `preset` has wins."""
    chosen = {
        "ASCEND_CONNECT_TIMEOUT": str(1000 * timeout_s),
        "ASCEND_TRANSFER_TIMEOUT": str(1000 * max(timeout_s, repair_s(preset))),
    }
    longest = _milliseconds({**chosen, **preset}, "ASCEND_TRANSFER_TIMEOUT", timeout_s) // 1000
    return {**chosen, "MC_TRANSFER_TIMEOUT": str(max(5, longest + 1))}


def repair_s(environment: Mapping[str, str]) -> int:
    """Seconds, and a tenth more, for which RoCE sends a packet again before it reports an error. A link that comes
    back within them costs time; a transfer that is given up earlier fails."""
    exponent = _bounded(environment, "HCCL_RDMA_TIMEOUT", 20, range(5, 25))
    times = _bounded(environment, "HCCL_RDMA_RETRY_CNT", 7, range(1, 8))
    return math.ceil(1.1 * 4.096e-6 * (1 << exponent) * times)


def settle_s(timeout_s: int, environment: Mapping[str, str]) -> float:
    """Seconds after a batch was given up (`MC_TRANSFER_TIMEOUT`) until both of Mooncake's attempts are over."""
    connect = _milliseconds(environment, "ASCEND_CONNECT_TIMEOUT", timeout_s) / 1000
    transfer = _milliseconds(environment, "ASCEND_TRANSFER_TIMEOUT", timeout_s) / 1000
    given_up = environment.get("MC_TRANSFER_TIMEOUT", "")
    waited = max(5, int(given_up)) if given_up.isdecimal() else 0
    return min(_LONGEST_S, max(0.0, _ATTEMPTS * (connect + transfer + _DISCONNECT_S) - waited))


def check() -> list[Finding]:
    """What is wrong for the NPU that is current in this thread. Without one nothing can be registered."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "npu"):
        reason = "protocol 'ascend' moves memory of NPUs, and torch_npu is not loaded: set transfer_protocol to tcp"
        return [Finding(reason, fatal=True)]
    device = torch.npu.current_device()
    physical = physical_device(device)
    if physical is None:
        return [Finding(f"ACL does not say which NPU of this machine number {device} is: {HCCN_CONF} is not checked")]
    has_tool = HCCN_TOOL.exists() or shutil.which("hccn_tool") is not None
    return check_address(HCCN_CONF, physical, has_tool)


def why_not_started(findings: Sequence[Finding], environment: Mapping[str, str]) -> str:
    """What may keep an engine from starting. The transport's library needs some of CANN's."""
    reasons = [finding.message for finding in findings]
    if not environment.get("ASCEND_HOME_PATH"):
        reasons.append("CANN's environment is not loaded (libllm_datadist.so): `source` its set_env.sh first")
    return "; ".join([*reasons, "its log on standard error may say more"])


def physical_device(device: int) -> int | None:
    """The number on the machine of the NPU that this process calls `device`; None where ACL does not say.

    ASCEND_RT_VISIBLE_DEVICES and containers both change how a process counts. ACL's function takes the number that
    `aclrtSetDevice` takes, whatever its name says (CANN 9.1 reference, `aclrtGetPhyDevIdByLogicDevId`).
    """
    physical = ctypes.c_int32()
    try:
        code = _acl().aclrtGetPhyDevIdByLogicDevId(ctypes.c_int32(device), ctypes.byref(physical))
    except (OSError, AttributeError):  # no ACL, or one without the function
        return None
    return physical.value if code == 0 else None


def chip_name() -> str:
    """The chip's name, such as "Ascend910B1"; "" where ACL does not say."""
    try:
        name = _acl().aclrtGetSocName
    except (OSError, AttributeError):
        return ""
    name.restype = ctypes.c_char_p
    return (name() or b"").decode(errors="replace")


def check_address(hccn_conf: Path, device: int, has_tool: bool) -> list[Finding]:
    """What `hccn_conf` says of the physical `device`. `has_tool`: `hccn_tool` can be asked where there is no file."""
    try:
        text = hccn_conf.read_text(errors="replace")
    except FileNotFoundError:
        reason = (
            f"{hccn_conf} does not exist and there is no hccn_tool, so NPU {device} has no address: it reaches others "
            f"over HCCS alone, if at all. In a container, mount the host's {hccn_conf}"
        )
        return [] if has_tool else [Finding(reason)]
    except OSError as error:
        return [Finding(f"{hccn_conf} cannot be read ({error.strerror}): make it readable for this user", fatal=True)]
    return [] if (finding := check_entry(text, device)) is None else [finding]


def check_entry(hccn_conf: str, device: int) -> Finding | None:
    """What is wrong with the physical `device`'s entry in the text of hccn.conf."""
    repair = f"set it with `hccn_tool -i {device} -ip -s address ADDRESS netmask MASK`"
    for key in (f"address_{device}=", f"IPv6address_{device}="):
        for line in hccn_conf.split("\n"):
            if line.startswith(key):
                try:
                    ipaddress.ip_address(line.removeprefix(key))
                except ValueError:
                    return Finding(f"hccn.conf has {line!r}, which is no address: {repair}", fatal=True)
                return None
    return Finding(f"hccn.conf has no address_{device}: NPU {device} reaches others over HCCS alone; for RoCE {repair}")


def is_loaded(maps: str) -> bool:
    """Whether this process has loaded a Mooncake with the transport. `maps`: the text of /proc/self/maps."""
    files = mooncake_library.files_in(maps)
    return any(
        path.name.startswith("ascend_transport") or any(mooncake_library.mentions(path, name) for name in _CLASSES)
        for path in files
    )


def _milliseconds(environment: Mapping[str, str], name: str, default_s: int) -> int:
    """As Mooncake reads it: what is no number is as if it were not there."""
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else 1000 * default_s


def _bounded(environment: Mapping[str, str], name: str, default: int, values: range) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() and int(value) in values else default


def _acl() -> ctypes.CDLL:
    """ACL's library, which torch_npu has loaded. Raises OSError where it is not there."""
    return ctypes.CDLL("libascendcl.so")
