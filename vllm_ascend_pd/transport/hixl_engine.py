# SPDX-License-Identifier: Apache-2.0
"""Finds out which of HIXL's engines Mooncake starts for protocol `ascend`, and when that engine connects.

Neither library tells, so this module repeats their decisions. Facts and where they are from:

- Mooncake 0.3.13, transfer_executor_base.cpp (`ParseExecutorEnvIntoInitParams`, `initEngines`): ASCEND_LOCAL_COMM_RES
  is handed to HIXL. Where it is not set and HIXL's `AdxlEngine::GetCapability` has CLIENT_SERVER_COMM, Mooncake asks
  for version 1.3. transfer_executor_base.h: AutoConnect is on unless ASCEND_AUTO_CONNECT turns it off.
  ascend_direct_transport.cpp: `fabric_memory` in ASCEND_GLOBAL_RESOURCE_CONFIG turns fabric memory on.
- Mooncake 0.3.11, the same files: it never asks HIXL, AutoConnect is off unless ASCEND_AUTO_CONNECT turns it on, and
  ASCEND_ENABLE_USE_FABRIC_MEM turns fabric memory on.
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
from vllm_ascend_pd.transport import ascend, mooncake_library

CLIENT_SERVER_COMM = 1
"""A value of HIXL's `FeatureType`."""

_GET_CAPABILITY = "_ZN4adxl10AdxlEngine13GetCapabilityENS_11FeatureTypeERi"
_CLIENT_SERVER_RESOURCES = b'{"version":"1.3"}'
_CLIENT_SERVER_CHIP = "Ascend950"


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
    return Offers(client_server=asks and hixl_has(CLIENT_SERVER_COMM), is_old=not asks, chip=ascend.chip_name())


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
    if "protocol_desc" in resources or _CLIENT_SERVER_CHIP in found.chip:
        return EngineKind.CLIENT_SERVER
    return EngineKind.COMM


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
