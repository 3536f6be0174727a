# SPDX-License-Identifier: Apache-2.0
"""Mooncake's protocol `ascend`: its settings, and what it needs to work.

Facts and where they are from:

- Mooncake, docs/source/design/transfer-engine/transport/ascend_direct_transport.md: its settings and their units; a
  device is set before an engine starts; `/etc/hccn.conf` exists, in containers too.
- Mooncake 0.3.11.post1 and 0.3.13, slice_dispatcher.cpp: one pool of threads, 8 unless `ASCEND_THREAD_POOL_SIZE` says
  otherwise, 16 at most, 1 with `ASCEND_BUFFER_POOL`; batches wait for a thread in a queue without bound or deadline.
- The same, transfer_executor_base.cpp and sync_transfer_executor.cpp: a batch is tried twice, each time with a
  connection, a transfer and, if that failed, a disconnection of 1 s. Before either the peer's metadata may be read, for
  60 s at most (transfer_metadata_plugin.cpp). With AutoConnect, which 0.3.13 turns on where CANN has it, the transfer's
  time limit is the connection's, too.
- CANN's HIXL, src/hixl/cs/hixl_cs_client.cc: each step of a connection has the whole time limit.
- CANN's HIXL, which that transport calls (src/hixl/common/hixl_utils.cc `GetDeviceIp`): an NPU's address is in
  `/etc/hccn.conf` as `address_<physical device>=<IP>`. `IPv6address_...` is not read. A file that cannot be opened and
  an entry that is no address are errors. Only without the file it asks `hccn_tool`, of the driver's folder or of
  `PATH`.
- HIXL, endpoint_generator.cc, `BuildEndpointList`: the client/server engine fails without an address ("Failed to get
  device ip"), also where all transfers go over HCCS. The comm engine then has no RoCE.
- HIXL, hixl_cs_client.cc and transfer_pool.cc: at its first connection a client/server engine takes 128 slots of two
  streams each, of the 1,984 that a device has, unless `comm_resource_config.max_active_channels` says otherwise
  (hixl_options.cc). Graphs of vllm-ascend take streams, too, and may leave too few (its issues 8393, 9564, 9596).
- CANN's environment variables `HCCL_RDMA_TIMEOUT` (5 to 24, 20 by default) and `HCCL_RDMA_RETRY_CNT` (1 to 7, 7 by
  default): a packet without an answer is sent again after 4.096 us * 2 ^ the first, as often as the second says. The
  first source: `ASCEND_TRANSFER_TIMEOUT` is slightly longer than all of that, 30 s by default.
- Measured: Mooncake built without this transport starts with protocol `ascend` all the same, and uses TCP.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_pd.core.protocol import Connects, EngineKind, TransportInfo
from vllm_ascend_pd.transport import mooncake_library

HCCN_CONF = Path("/etc/hccn.conf")
HCCN_TOOL = Path("/usr/local/Ascend/driver/tools/hccn_tool")
GLOBAL_RESOURCES = "ASCEND_GLOBAL_RESOURCE_CONFIG"
MAX_CHANNELS = 16
"""Slots of HIXL's client/server engine: no more batches are in flight, because Mooncake's pool has no more threads."""
LOG_LEVEL = "ERROR"
"""Mooncake's preset log level with this protocol. At WARNING, 0.3.13 writes a line for each descriptor to a peer whose
NPU is not its process's first (transfer_executor_base.cpp, EngineNameForDestAddr), which is thousands per batch."""
INSTALL = "pip install mooncake-transfer-engine-npu, or build Mooncake with -DUSE_ASCEND_DIRECT=ON"

BUFFER_POOL = "ASCEND_BUFFER_POOL"
_NO_BUFFER_POOL = "0:0"
POOL_SIZE = "ASCEND_THREAD_POOL_SIZE"
_DEFAULT_POOL, _LARGEST_POOL = 8, 16
_SLOTS_ONE_BY_ONE = 4

_ATTEMPTS = 2
_METADATA_S = 60.0
_DISCONNECT_S = 1.0
_CONNECT_STEPS = 7
"""Steps: a TCP connection, a header and a body to match endpoints, the endpoint, remote memory, the channel, an
answer."""
_NEVER_S = 3600
"""`MC_TRANSFER_TIMEOUT`. No thread waits in Mooncake. A shorter timeout makes it call a batch failed that has
arrived."""
_CLASSES = (b"AscendDirectTransport", b"HcclTransport")
"""Mooncake's transports for the protocol; 0.3.13's wheel has the first one in a library `ascend_transport.so`."""


@dataclass(frozen=True)
class AscendProblem:
    """Something on this host that may keep the protocol from working."""

    # What is wrong, and what to do about it.
    message: str
    # Kinds of engines that transfer nothing as long as it is so.
    fatal_for: frozenset[EngineKind] = frozenset()

    @property
    def is_fatal(self) -> bool:
        """Whether no engine transfers anything."""
        return self.fatal_for == _ALL_KINDS


_ALL_KINDS = frozenset(EngineKind)
_NEEDS_ADDRESS = frozenset((EngineKind.CLIENT_SERVER,))
_NO_ADDRESS = (
    "HIXL's client/server engine does not start without one, and the comm engine has no RoCE. Remedies: give it an "
    "address (`hccn_tool -i {device} -ip -s address ADDRESS netmask MASK`) that {conf} has, too; in a container, mount "
    "the host's {conf}; or set ASCEND_LOCAL_COMM_RES to the empty text on prefill and decode, for the comm engine"
)


def settings(timeout_s: int, preset: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that limits a connection to `timeout_s`, and a transfer to the longer of `timeout_s` and
    `repair_s`. Settings in `preset` win."""
    return {
        "ASCEND_CONNECT_TIMEOUT": str(1000 * timeout_s),
        "ASCEND_TRANSFER_TIMEOUT": str(1000 * max(timeout_s, repair_s(preset))),
        "MC_TRANSFER_TIMEOUT": str(_NEVER_S),
        POOL_SIZE: str(_LARGEST_POOL),
        GLOBAL_RESOURCES: json.dumps({"comm_resource_config.max_active_channels": MAX_CHANNELS}),
    }


def repair_s(environment: Mapping[str, str]) -> int:
    """Returns for how many seconds RoCE sends a packet again before it reports an error, plus a tenth.

    A link that comes back within this time only delays a transfer. A transfer with a shorter timeout would fail.
    """
    exponent = _bounded(environment, "HCCL_RDMA_TIMEOUT", 20, range(5, 25))
    times = _bounded(environment, "HCCL_RDMA_RETRY_CNT", 7, range(1, 8))
    return math.ceil(1.1 * 4.096e-6 * (1 << exponent) * times)


def pool_size(environment: Mapping[str, str]) -> int:
    """Returns the number of threads in Mooncake's pool. Repeats Mooncake's rules."""
    if has_buffer_pool(environment):
        return 1
    try:
        size = int(environment.get(POOL_SIZE, ""))
    except ValueError:
        return _DEFAULT_POOL
    return size if 0 <= size <= _LARGEST_POOL else _DEFAULT_POOL


def has_buffer_pool(environment: Mapping[str, str]) -> bool:
    """Returns whether Mooncake copies through a pool of intermediate buffers."""
    return environment.get(BUFFER_POOL, _NO_BUFFER_POOL) != _NO_BUFFER_POOL


def connects_one_by_one(transport: TransportInfo) -> bool:
    """Returns whether a connection to a peer waits for connections to other peers that are being made.

    Without AutoConnect Mooncake makes connections under a lock that every write takes. With it HIXL's comm engine
    makes them under one. An engine of a kind that is not known here may do the same.
    """
    return (transport.connects, transport.kind) != (Connects.AUTO, EngineKind.CLIENT_SERVER)


def slots(environment: Mapping[str, str], one_by_one: bool) -> tuple[int, int]:
    """Returns how many batches may be in flight, and how many of them to peers that may not answer.

    If connections are made one by one, few batches are in flight, and only one of them to an unproven peer. So a batch
    waits for few connections, and one to a healthy peer for a single one.
    """
    size = pool_size(environment)
    return (min(size, _SLOTS_ONE_BY_ONE), 1) if one_by_one else (size, max(1, size // 2))


def settle_s(timeout_s: int, environment: Mapping[str, str], transport: TransportInfo) -> float:
    """Returns for how many seconds a batch with a slot may take, whatever the peers do."""
    connect = _milliseconds(environment, "ASCEND_CONNECT_TIMEOUT", timeout_s) / 1000
    transfer = _milliseconds(environment, "ASCEND_TRANSFER_TIMEOUT", timeout_s) / 1000
    step = connect if transport.connects == Connects.BEFORE else max(connect, transfer)
    one_by_one = connects_one_by_one(transport)
    connections, _ = slots(environment, one_by_one) if one_by_one else (1, 1)
    return _ATTEMPTS * (_METADATA_S + connections * _CONNECT_STEPS * step + transfer + _DISCONNECT_S)


def check() -> AscendProblem | None:
    """Checks this host for the NPU that is current in this thread. Without an NPU no memory can be registered."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "npu"):
        reason = "protocol 'ascend' moves NPU memory, and torch_npu is not loaded: set transfer_protocol to tcp"
        return AscendProblem(reason, _ALL_KINDS)
    device = torch.npu.current_device()
    physical = physical_device(device)
    if physical is None:
        return AscendProblem(
            f"ACL does not say which NPU of this machine number {device} is: {HCCN_CONF} is not checked"
        )
    has_tool = HCCN_TOOL.exists() or shutil.which("hccn_tool") is not None
    return check_address(HCCN_CONF, physical, has_tool)


def why_not_started(problem: AscendProblem | None, environment: Mapping[str, str]) -> str:
    """Returns what may keep an engine from starting. The transport's library needs libraries of CANN."""
    reasons = [] if problem is None else [problem.message]
    if not environment.get("ASCEND_HOME_PATH"):
        reasons.append("CANN's environment is not loaded (libllm_datadist.so): `source` its set_env.sh first")
    return "; ".join([*reasons, "its log on standard error may say more"])


def physical_device(device: int) -> int | None:
    """Returns the machine's number of the NPU that this process calls `device`; None if ACL does not tell.

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
    """Returns the chip's name, such as "Ascend910B1"; "" if ACL does not tell."""
    try:
        name = _acl().aclrtGetSocName
    except (OSError, AttributeError):
        return ""
    name.restype = ctypes.c_char_p
    return (name() or b"").decode(errors="replace")


def streams_left() -> int | None:
    """Returns how many streams the current NPU of this thread has left; None if ACL does not tell."""
    streams = ctypes.c_uint32()
    try:
        code = _acl().aclrtGetStreamAvailableNum(ctypes.byref(streams))
    except (OSError, AttributeError):
        return None
    return streams.value if code == 0 else None


def check_address(hccn_conf: Path, device: int, has_tool: bool) -> AscendProblem | None:
    """Checks the entry of the physical `device` in `hccn_conf`. `has_tool`: `hccn_tool` replaces a missing file."""
    remedies = _NO_ADDRESS.format(device=device, conf=hccn_conf)
    try:
        listed = addresses(hccn_conf.read_text(errors="replace"), device)
    except FileNotFoundError:
        reason = f"{hccn_conf} does not exist and there is no hccn_tool, so NPU {device} has no address: "
        return None if has_tool else AscendProblem(reason + remedies, _NEEDS_ADDRESS)
    except OSError as error:
        reason = f"{hccn_conf} cannot be read ({error.strerror}): make it readable for this user"
        return AscendProblem(reason, _ALL_KINDS)
    if not listed:
        return AscendProblem(
            f"{hccn_conf} has no address_{device}, so NPU {device} has none: {remedies}", _NEEDS_ADDRESS
        )
    try:
        ipaddress.ip_address(listed[0])
    except ValueError:
        reason = f"{hccn_conf} has address_{device}={listed[0]!r}, which is not an address: {remedies}"
        return AscendProblem(reason, _ALL_KINDS)
    return None


def addresses(hccn_conf: str, device: int) -> list[str]:
    """Returns the addresses of the physical `device` in the text of hccn.conf, unchecked."""
    key = f"address_{device}="
    return [line.removeprefix(key) for line in hccn_conf.split("\n") if line.startswith(key)]


def is_loaded(maps: str) -> bool:
    """Returns whether this process has loaded a Mooncake with the transport. `maps`: the text of /proc/self/maps."""
    files = mooncake_library.files_in(maps)
    return any(
        path.name.startswith("ascend_transport") or any(mooncake_library.mentions(path, name) for name in _CLASSES)
        for path in files
    )


def _milliseconds(environment: Mapping[str, str], name: str, default_s: int) -> int:
    """Reads a setting as Mooncake does: a value that is not a number counts as not set."""
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else 1000 * default_s


def _bounded(environment: Mapping[str, str], name: str, default: int, values: range) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() and int(value) in values else default


def _acl() -> ctypes.CDLL:
    """Returns ACL's library, which torch_npu has loaded. Raises OSError if it is not there."""
    return ctypes.CDLL("libascendcl.so")


# Finds out which of HIXL's engines Mooncake starts for protocol `ascend`, and when that engine connects.
#
# Neither library tells, so this module repeats their decisions. Facts and where they are from:
#
# - Mooncake 0.3.13, transfer_executor_base.cpp (`ParseExecutorEnvIntoInitParams`, `initEngines`): ASCEND_LOCAL_COMM_RES
#   is handed to HIXL. Where it is not set and HIXL's `AdxlEngine::GetCapability` has CLIENT_SERVER_COMM, Mooncake asks
#   for version 1.3. transfer_executor_base.h: AutoConnect is on unless ASCEND_AUTO_CONNECT turns it off.
#   ascend_direct_transport.cpp: `fabric_memory` in ASCEND_GLOBAL_RESOURCE_CONFIG turns fabric memory on.
# - Mooncake 0.3.11, the same files: it never asks HIXL, AutoConnect is off unless ASCEND_AUTO_CONNECT turns it on, and
#   ASCEND_ENABLE_USE_FABRIC_MEM turns fabric memory on.
# - CANN's HIXL, src/hixl/engine/engine_factory.cc: fabric memory comes first, then LocalCommRes (version 1.3 is the
#   client/server engine, any other the comm engine), then `protocol_desc`, then the chip. hixl_options.cc: a file may
#   hold LocalCommRes. The rule for chips is that of CANN 9.2; whether 9.1 has it is not known.

CLIENT_SERVER_COMM = 1
"""A value of HIXL's `FeatureType`."""

_GET_CAPABILITY = "_ZN4adxl10AdxlEngine13GetCapabilityENS_11FeatureTypeERi"
_CLIENT_SERVER_RESOURCES = b'{"version":"1.3"}'
_CHIP_WITH_A_RULE = "Ascend950"


@dataclass(frozen=True)
class Offers:
    """What the loaded libraries offer."""

    # Whether HIXL has the client/server engine, and this Mooncake asks for it.
    client_server: bool
    # Whether this Mooncake never asks HIXL for its capabilities.
    is_old: bool
    # The chip's name, "" if it is not known.
    chip: str


def describe_transport(protocol: str) -> TransportInfo:
    """Describes an engine that this process has started with `protocol`."""
    wheel = mooncake_library.installed()
    if protocol != "ascend":
        return TransportInfo(protocol, wheel)
    found = offers()
    return TransportInfo(protocol, wheel, kind(os.environ, found), connects(os.environ, found))


def offers() -> Offers:
    """Returns what the libraries that this process has loaded offer."""
    libraries = [path for path in mooncake_library.loaded_files() if path.name.startswith("ascend_transport")]
    asks = any(mooncake_library.mentions(path, _CLIENT_SERVER_RESOURCES) for path in libraries)
    return Offers(client_server=asks and hixl_has(CLIENT_SERVER_COMM), is_old=not asks, chip=chip_name())


def hixl_has(feature: int) -> bool:
    """Returns whether the loaded HIXL has `feature`. Asks in the same way as Mooncake."""
    hixl = _loaded("libllm_datadist.so")
    ask = getattr(hixl, _GET_CAPABILITY, None)
    value = ctypes.c_int32()
    return ask is not None and ask(ctypes.c_int32(feature), ctypes.byref(value)) == 0 and value.value == 1


def kind(environment: Mapping[str, str], found: Offers) -> EngineKind:
    """Returns the kind of engine that starts. UNKNOWN if the settings do not decide it."""
    resources = _without_store(environment.get("ASCEND_GLOBAL_RESOURCE_CONFIG", ""))
    if found.is_old and "ASCEND_ENABLE_USE_FABRIC_MEM" in environment:
        return EngineKind.UNKNOWN
    if "fabric_memory" in resources:
        return EngineKind.UNKNOWN if found.is_old else EngineKind.FABRIC_MEMORY
    local = environment.get("ASCEND_LOCAL_COMM_RES")
    if local is None and found.client_server:
        return EngineKind.CLIENT_SERVER
    if local:
        return _by_local_resources(local)
    if "local_comm_res_path" in resources:
        return EngineKind.UNKNOWN
    if "protocol_desc" in resources:
        return EngineKind.CLIENT_SERVER
    return EngineKind.UNKNOWN if _CHIP_WITH_A_RULE in found.chip else EngineKind.COMM


def connects(environment: Mapping[str, str], found: Offers) -> Connects:
    """Returns when the engine that starts connects to a peer."""
    setting = environment.get("ASCEND_AUTO_CONNECT")
    if setting is None:
        return Connects.BEFORE if found.is_old else Connects.AUTO
    return Connects.AUTO if setting.isdecimal() and int(setting) == 1 else Connects.BEFORE


def _by_local_resources(text: str) -> EngineKind:
    try:
        resources = json.loads(text)
    except ValueError:
        return EngineKind.UNKNOWN  # HIXL refuses it
    version = resources.get("version") if isinstance(resources, dict) else None
    return EngineKind.CLIENT_SERVER if version == "1.3" else EngineKind.COMM


def _without_store(text: str) -> str:
    """Returns the settings in `text` that apply to transfer engines, which are all but those of Mooncake's store."""
    try:
        resources = json.loads(text)
    except ValueError:
        return text
    if isinstance(resources, dict):
        resources.pop("store", None)
    return json.dumps(resources)


def _loaded(library: str) -> ctypes.CDLL | None:
    """Returns `library` if this process has loaded it already."""
    try:
        return ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
