# SPDX-License-Identifier: Apache-2.0
"""Which of HIXL's engines Mooncake starts for protocol `ascend` in this process, and when that engine connects.

Neither library says so, so this module follows their decisions. Facts and where they are from:

- Mooncake 0.3.13, transfer_executor_base.cpp (`ParseExecutorEnvIntoInitParams`, `initEngines`): ASCEND_AUTO_CONNECT
  decides about AutoConnect. Where it is not set, AutoConnect is on: Mooncake asks HIXL's `AdxlEngine::GetCapability`,
  but its default (transfer_executor_base.h) is on, too. ASCEND_LOCAL_COMM_RES is handed to HIXL. Where it is not set
  and HIXL has the capability CLIENT_SERVER_COMM, Mooncake asks for version 1.3.
  ascend_direct_transport.cpp: `fabric_memory` in ASCEND_GLOBAL_RESOURCE_CONFIG turns fabric memory on.
- Mooncake 0.3.11, the same file: it never asks HIXL, and ASCEND_ENABLE_USE_FABRIC_MEM turns fabric memory on.
- CANN's HIXL, src/hixl/engine/engine_factory.cc: fabric memory comes first, then LocalCommRes (version 1.3 is the
  client/server engine, any other the comm engine), then `protocol_desc`, then the chip. hixl_options.cc: a file may
  hold LocalCommRes.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_ascend_pd.core.transports import Connects, EngineKind, TransportInfo
from vllm_ascend_pd.transport import mooncake_library

CLIENT_SERVER_COMM = 1
"""Of HIXL's `FeatureType`."""

_GET_CAPABILITY = "_ZN4adxl10AdxlEngine13GetCapabilityENS_11FeatureTypeERi"
_CLIENT_SERVER_RESOURCES = b'{"version":"1.3"}'
_CLIENT_SERVER_CHIP = "Ascend950"


@dataclass(frozen=True)
class Offers:
    """What the loaded libraries offer.

    `client_server`: Mooncake asks HIXL for it, and HIXL has it. `is_old`: a Mooncake that never asks. `chip`: its name,
    "" if it is not known.
    """

    client_server: bool
    is_old: bool
    chip: str


def describe_transport(protocol: str) -> TransportInfo:
    """Of an engine that this process has started with `protocol`."""
    wheel = mooncake_library.installed()
    if protocol != "ascend":
        return TransportInfo(protocol, wheel)
    found = offers()
    return TransportInfo(protocol, wheel, kind(os.environ, found), connects(os.environ, found))


def offers() -> Offers:
    """Of the libraries that this process has loaded."""
    libraries = [path for path in mooncake_library.loaded_files() if path.name.startswith("ascend_transport")]

    def asks(text: bytes) -> bool:
        return any(mooncake_library.mentions(path, text) for path in libraries)

    asks_for_client_server = asks(_CLIENT_SERVER_RESOURCES)
    return Offers(
        client_server=asks_for_client_server and hixl_has(CLIENT_SERVER_COMM),
        is_old=not asks_for_client_server,
        chip=_chip(),
    )


def hixl_has(feature: int) -> bool:
    """Whether the loaded HIXL says that it has `feature`: asked as Mooncake asks."""
    hixl = _loaded("libllm_datadist.so")
    ask = getattr(hixl, _GET_CAPABILITY, None)
    value = ctypes.c_int32()
    return ask is not None and ask(ctypes.c_int32(feature), ctypes.byref(value)) == 0 and value.value == 1


def kind(environment: Mapping[str, str], found: Offers) -> EngineKind:
    """Of the engine that starts. UNKNOWN where the settings say too little."""
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
    if "protocol_desc" in resources or _CLIENT_SERVER_CHIP in found.chip:
        return EngineKind.CLIENT_SERVER
    return EngineKind.COMM


def connects(environment: Mapping[str, str], found: Offers) -> Connects:
    """When the engine that starts connects to a peer."""
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
    """The settings that apply to engines which are no store's."""
    try:
        resources = json.loads(text)
    except ValueError:
        return text
    if isinstance(resources, dict):
        resources.pop("store", None)
    return json.dumps(resources)


def _chip() -> str:
    name = getattr(_loaded("libascendcl.so"), "aclrtGetSocName", None)
    if name is None:
        return ""
    name.restype = ctypes.c_char_p
    return (name() or b"").decode(errors="replace")


def _loaded(library: str) -> ctypes.CDLL | None:
    """`library` if this process has loaded it already."""
    try:
        return ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
