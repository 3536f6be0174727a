# SPDX-License-Identifier: Apache-2.0
"""Checks which of Mooncake's protocols an engine on this machine uses, and whether it works."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vllm_ascend_pd.tools.doctor.finding import Finding, error, note, ok, warning
from vllm_ascend_pd.tools.doctor.mooncake_engine import Installed
from vllm_ascend_pd.tools.doctor.stacks import CANN
from vllm_ascend_pd.transport import ascend

_CANN_INFO = "*/ascend_toolkit_install.info"
_MAX_INFO_BYTES = 64 << 10


def protocol_of(transfer_protocol: str | None, on_npu: bool) -> str:
    """Chooses the protocol as the connector does: the configured one, else the device's."""
    return transfer_protocol or ("ascend" if on_npu else "tcp")


def judge(transfer_protocol: str | None, on_npu: bool, installed: Installed | None) -> Finding:
    """Judges the protocol that an engine would use. `installed`: the loaded Mooncake (`probe`), or None."""
    check = "mooncake.protocol"
    protocol = protocol_of(transfer_protocol, on_npu)
    why = "as transfer_protocol says" if transfer_protocol else f"the default on {'NPUs' if on_npu else 'CPUs'}"
    found = f"{protocol}, {why}"
    if protocol == "ascend" and not on_npu:
        action = "set transfer_protocol to tcp, or leave it out"
        return error(check, f"{found}: it moves NPU memory, and vLLM uses no NPU here", action, protocol=protocol)
    if protocol == "ascend" and "MC_FORCE_TCP" in os.environ:
        action = "unset MC_FORCE_TCP"
        return error(check, f"{found}: MC_FORCE_TCP is set, which turns it into TCP", action, protocol=protocol)
    if protocol == "ascend" and installed is not None and installed.ascend is None:
        action = ascend.INSTALL
        return error(
            check, f"{found}: this Mooncake has no Ascend transport and would use TCP", action, protocol=protocol
        )
    if protocol not in ("ascend", "tcp", "rdma"):
        return error(
            check, f"{found}: Mooncake has none of that name here", "use ascend, tcp or rdma", protocol=protocol
        )
    action = "leave transfer_protocol out of kv_connector_extra_config"
    if installed is not None and not installed.has(protocol):
        return error(check, f"{found}: the installed Mooncake does not have it", action, protocol=protocol)
    if protocol != "ascend" and on_npu:
        return warning(check, f"{found}: NPU memory needs ascend", action, protocol=protocol)
    if protocol == "ascend":
        found += "; `doctor --hardware` tries it, the transfer below goes over TCP"
    return ok(check, found, protocol=protocol)


def check_cann(environment: Mapping[str, str]) -> Finding:
    """Checks CANN on a machine with NPUs."""
    check = "mooncake.cann"
    home = environment.get("ASCEND_HOME_PATH")
    if not home:
        found = "CANN's environment is not loaded: ASCEND_HOME_PATH is not set"
        return error(check, found, f"install CANN {CANN} and `source` its set_env.sh before engines start")
    version = installed_toolkit(environment)
    if version is None:
        return note(check, f"CANN at {home}, which does not say its version", f"it should be {CANN}")
    if version == CANN:
        return ok(check, f"CANN {version} at {home}", version=version)
    found = f"CANN {version} at {home} is not what vllm-ascend was built for, {CANN}"
    return warning(check, found, f"install CANN {CANN}, or the vllm-ascend that fits {version}", version=version)


def installed_toolkit(environment: Mapping[str, str]) -> str | None:
    """Returns the version of the loaded CANN, or None if there is none or its version is unknown."""
    home = environment.get("ASCEND_HOME_PATH")
    for info in sorted(Path(home).glob(_CANN_INFO)) if home else []:
        try:
            with info.open(errors="replace") as file:
                version = parse_version(file.read(_MAX_INFO_BYTES))
        except OSError:
            continue
        if version is not None:
            return version
    return None


def parse_version(info: str) -> str | None:
    """Parses `ascend_toolkit_install.info`, which has lines `name=value`."""
    values = dict(line.strip().split("=", 1) for line in info.splitlines() if "=" in line)
    return values.get("version")
