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
- Measured: Mooncake built without this transport starts with protocol `ascend` all the same, and uses TCP.
"""

from __future__ import annotations

import ipaddress
import os
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
    """The environment that limits a connection and a transfer to `timeout_s` each. What `preset` has wins.

    That is shorter than the time for which RoCE sends again by itself (4.096 us * 2 ^ `HCCL_RDMA_TIMEOUT`, times
    `HCCL_RDMA_RETRY_CNT`: 30 s by default), on purpose: a peer that is silent for `timeout_s` is given up.
    """
    milliseconds = str(1000 * timeout_s)
    chosen = {"ASCEND_CONNECT_TIMEOUT": milliseconds, "ASCEND_TRANSFER_TIMEOUT": milliseconds}
    longest = _milliseconds({**chosen, **preset}, "ASCEND_TRANSFER_TIMEOUT", timeout_s) // 1000
    return {**chosen, "MC_TRANSFER_TIMEOUT": str(max(5, longest + 1))}


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
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    physical = physical_device(device, visible)
    if physical is None:
        return [
            Finding(f"ASCEND_RT_VISIBLE_DEVICES is {visible!r}, without a number for NPU {device}: list them, as 0,1")
        ]
    has_tool = HCCN_TOOL.exists() or shutil.which("hccn_tool") is not None
    return check_address(HCCN_CONF, physical, has_tool)


def why_not_started(findings: Sequence[Finding], environment: Mapping[str, str]) -> str:
    """What may keep an engine from starting. The transport's library needs some of CANN's."""
    reasons = [finding.message for finding in findings]
    if not environment.get("ASCEND_HOME_PATH"):
        reasons.append("CANN's environment is not loaded (libllm_datadist.so): `source` its set_env.sh first")
    return "; ".join([*reasons, "its log on standard error may say more"])


def physical_device(device: int, visible: str | None) -> int | None:
    """The number that `device`, as processes count, has on the machine; None if `visible` does not say.

    `visible`: the value of ASCEND_RT_VISIBLE_DEVICES, or None.
    """
    if not visible:
        return device
    entries = [entry.strip() for entry in visible.split(",")]
    return int(entries[device]) if device < len(entries) and entries[device].isdecimal() else None


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
