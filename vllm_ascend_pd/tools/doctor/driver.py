# SPDX-License-Identifier: Apache-2.0
"""Reads the versions of the Ascend driver and firmware from the files that their packages install.

Both are a `version.info` of lines `name=value`, below `/usr/local/Ascend` or the folder that `/etc/ascend_install.info`
names. `Version=` is the version: `25.2.0` or `25.0.rc1.1` of a driver, `7.7.0.1.231` of firmware. A container has only
the files that are mounted into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_pd.tools.doctor.finding import Finding, note, ok

INSTALL_INFO = Path("/etc/ascend_install.info")
DEFAULT_ROOT = Path("/usr/local/Ascend")
CHECK = "npu.driver"

_MAX_INFO_BYTES = 64 << 10
_BEFORE_RELEASE = -1  # rank of a version's part `rc1`


@dataclass(frozen=True)
class Driver:
    """The installed versions, None if `version.info` has none or cannot be read. `root`: folder of the packages."""

    root: Path
    driver: str | None
    firmware: str | None


def installed(install_info: Path = INSTALL_INFO, default_root: Path = DEFAULT_ROOT) -> Driver:
    """Reads the versions on this machine, as far as a container can see them."""
    root = Path(_values(install_info).get("Driver_Install_Path_Param") or default_root)
    driver, firmware = (_values(root / part / "version.info").get("Version") for part in ("driver", "firmware"))
    return Driver(root, driver, firmware)


def version_key(version: str) -> tuple[int, ...]:
    """A sort key for driver versions: `25.0.rc1.1` < `25.0.0` < `25.5.0`. A part that is not a number counts as 0."""
    key: list[int] = []
    for part in version.lower().split("."):
        if part.startswith("rc"):
            key.append(_BEFORE_RELEASE)
            part = part.removeprefix("rc")
        key.append(int(part) if part.isdecimal() else 0)
    return tuple(key)


def judge(found: Driver) -> list[Finding]:
    """Reports the versions."""
    if found.driver is None:
        info = found.root / "driver" / "version.info"
        return [note(CHECK, f"{info} does not say the driver's version", f"in a container, mount the host's {info}")]
    firmware = f", firmware {found.firmware}" if found.firmware else ""
    figures = {"driver": found.driver} | ({"firmware": found.firmware} if found.firmware else {})
    return [ok(CHECK, f"driver {found.driver}{firmware}", **figures)]


def _values(path: Path) -> Mapping[str, str]:
    """Returns the lines `name=value` of a small text file, or nothing if it cannot be read."""
    try:
        with path.open(errors="replace") as file:
            text = file.read(_MAX_INFO_BYTES)
    except OSError:
        return {}
    lines = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in lines}
