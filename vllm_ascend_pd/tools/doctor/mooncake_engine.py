# SPDX-License-Identifier: Apache-2.0
"""Checks which of HIXL's engines Mooncake starts on this machine, and whether driver and CANN support it.

HIXL's reference of its options (docs/zh/api/cpp/HIXL-interface.md, `version`) says what the client/server engine
needs. HIXL says that it has that engine whatever the driver is, so Mooncake chooses it on older drivers, too.
That engine does not start with a buffer pool (HIXL, src/hixl/engine/hixl_engine.cc, `HixlEngine::Initialize`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from vllm_ascend_pd.core.transports import EngineKind, TransportInfo
from vllm_ascend_pd.tools.doctor.driver import Driver, version_key
from vllm_ascend_pd.tools.doctor.finding import Finding, error, note, ok
from vllm_ascend_pd.transport import ascend, mooncake_library

CHECK = "mooncake.engine"
DRIVER, TOOLKIT = "25.5.0", "9.1.0"
"""The minimum versions for the client/server engine."""

WITHOUT_TCP = "this Mooncake moves bytes only by ascend"


class Installed(msgspec.Struct, frozen=True):
    """The Mooncake that the doctor's child has loaded."""

    ascend: TransportInfo | None
    """Its engine with protocol `ascend`, or None without that protocol."""
    tcp: bool
    """Whether it supports TCP."""

    def has(self, protocol: str) -> bool:
        if protocol == "ascend":
            return self.ascend is not None
        return self.tcp if protocol == "tcp" else self.ascend is None


def installed() -> Installed:
    """Returns what this process has loaded."""
    has_ascend = ascend.is_loaded(Path("/proc/self/maps").read_text())
    try:
        mooncake_library.check_protocol("tcp", has_ascend)
    except mooncake_library.LibraryError:
        tcp = False
    else:
        tcp = True
    return Installed(ascend.describe_transport("ascend") if has_ascend else None, tcp)


def read(detail: str | None) -> Installed | None:
    """Parses the child's report. Returns None if it did not load Mooncake."""
    return None if detail is None else msgspec.json.decode(detail, type=Installed)


def judge(transport: TransportInfo, driver: Driver, toolkit: str | None, environment: Mapping[str, str]) -> Finding:
    """Judges whether the engine that `transport` describes can start with protocol `ascend`.

    `toolkit` is CANN's version, None if unknown. `environment` has the settings that the engine will start with.
    """
    starts = f"{transport.wheel} starts HIXL's {transport.kind} engine ({transport.connects})"
    figures = {"kind": transport.kind, "connects": transport.connects, "wheel": transport.wheel}
    if transport.kind == EngineKind.UNKNOWN:
        found = f"{transport.wheel}: ASCEND_* settings do not say which of HIXL's engines starts"
        return note(CHECK, found, "use the same settings and the same Mooncake on prefill and decode", **figures)
    if transport.kind != EngineKind.CLIENT_SERVER:
        return ok(CHECK, starts, **figures)
    if ascend.has_buffer_pool(environment):
        setting = f"{ascend.BUFFER_POOL}={environment[ascend.BUFFER_POOL]}"
        action = f"unset {ascend.BUFFER_POOL} on prefill and decode"
        return error(CHECK, f"{starts}, which does not start with {setting}", action, **figures)
    too_old = [
        f"{name} {found}"
        for name, found, least in (("driver", driver.driver, DRIVER), ("CANN", toolkit, TOOLKIT))
        if found is not None and version_key(found) < version_key(least)
    ]
    needs = f"{starts}, which needs driver {DRIVER} and CANN {TOOLKIT} at least"
    if too_old:
        action = (
            f"update to driver {DRIVER} (Ascend HDK) and CANN {TOOLKIT}, or install mooncake-transfer-engine-npu "
            "0.3.11.post1 on prefill and decode, which starts the older engine"
        )
        return error(CHECK, f"{needs}; this machine has {' and '.join(too_old)}", action, **figures)
    if driver.driver is None or toolkit is None:
        return note(
            CHECK,
            f"{needs}; not all versions can be read here",
            "see the findings mooncake.cann and npu.driver",
            **figures,
        )
    return ok(CHECK, f"{needs}: this machine has both", **figures)


def no_loopback(mooncake: Installed | None) -> Finding | None:
    """Returns why the transfer over TCP is skipped on this machine, or None if it is possible."""
    if mooncake is None or mooncake.tcp:
        return None
    found = f"not tried: {WITHOUT_TCP}"
    return note("transfer.loopback", found, "install mooncake-transfer-engine-npu 0.3.13.post1 to try it over TCP")
