# SPDX-License-Identifier: Apache-2.0
"""Checks that an engine's libraries can be loaded: torch, Mooncake, vLLM and the compiled ops.

A child process loads what an engine loads, in the same order, and reports each part. Importing is the test that
versions fit: compiled parts find their libraries, the connector finds vLLM's internals.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_ascend_pd.connector import setup
from vllm_ascend_pd.core.hosts import is_loopback
from vllm_ascend_pd.core.protocol import TransportInfo
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.tools.doctor.process import Ran, child, run, say
from vllm_ascend_pd.tools.doctor.report import Finding, error, note, ok, warning
from vllm_ascend_pd.transport import ascend, mooncake_library

TIMEOUT_S = 240.0
"""Importing vLLM takes seconds, or more than a minute on a busy machine."""

_CHARS = 300
_CANN = "load CANN's environment (`source` its set_env.sh)"
_KERNELS = "pip install -v --no-build-isolation -e . in vllm-ascend-pd"
_VLLM = "install the vLLM, and on NPUs the vllm-ascend, that requirements/ names"


class Loaded(msgspec.Struct, frozen=True):
    """The result of loading one part.

    detail: what the part says about itself.
    error: why it could not be loaded; "" if it was loaded or not tried.
    missing: the required part that is missing, so that this one was not tried.
    """

    part: str
    seconds: float
    detail: str = ""
    error: str = ""
    missing: str = ""


class LoadedMooncake(msgspec.Struct, frozen=True):
    """The Mooncake that a process of this environment loads.

    ascend: its engine with protocol `ascend`, or None without that protocol.
    refusals: why it does not have a protocol, by protocol.
    """

    ascend: TransportInfo | None
    refusals: dict[str, str]


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _torch_npu() -> str:
    import torch
    import torch_npu

    return f"{torch_npu.__version__}, {torch.npu.device_count()} NPUs"


def _npus() -> str:
    """Returns the machine's numbers of the NPUs that this process sees, such as "4,5", or "?" if ACL does not say."""
    import torch

    numbers = [ascend.physical_device(device) for device in range(torch.npu.device_count())]
    return ",".join("?" if number is None else str(number) for number in numbers)


def _ops() -> str:
    import torch

    from vllm_ascend_pd.device import ops

    units = torch.arange(4096, dtype=torch.uint8).reshape(8, 512)
    out = torch.zeros(4096, dtype=torch.uint8)
    ops.gather_units([units], torch.arange(7, -1, -1) * 512, 512, 2, out, 0, 0, 1024)
    if not torch.equal(out, units.flip(0).reshape(-1)):
        raise RuntimeError("gather_units gives wrong bytes")
    return ""


def _kernels() -> str:
    """Loads the ops. Returns "" if they were not built."""
    from vllm_ascend_pd.device import ops

    if ops.npu_kernels.error:
        raise OSError(ops.npu_kernels.error)
    return "" if ops.npu_kernels.reason else str(ops.NPU_LIBRARY)


def _mooncake() -> str:
    import mooncake.engine  # noqa: F401 - loads its libraries

    has_ascend = ascend.is_loaded(Path("/proc/self/maps").read_text())
    refusals = {} if has_ascend else {"ascend": "it has no Ascend transport and would use TCP"}
    for protocol in ("tcp", "rdma"):
        try:
            mooncake_library.check_protocol(protocol, has_ascend)
        except mooncake_library.LibraryError as problem:
            refusals[protocol] = str(problem)
    found = LoadedMooncake(ascend.describe_transport("ascend") if has_ascend else None, refusals)
    return msgspec.json.encode(found).decode()


class Part(NamedTuple):
    """One thing that an engine loads."""

    load: Callable[[], str]
    what: str
    action: str  # what to do if it cannot be loaded
    needs: tuple[str, ...] = ()  # parts without which it is not tried


PARTS = {
    "torch": Part(_torch, "torch", "install torch again, in the version that requirements/ names for this machine"),
    "torch_npu": Part(
        _torch_npu, "torch_npu", f"{_CANN}, and install a torch-npu that fits torch and CANN", ("torch",)
    ),
    "npus": Part(
        _npus,
        "the list of NPUs",
        "check that `npu-smi info` lists this machine's NPUs, and that this user may use them",
        ("torch", "torch_npu"),
    ),
    "ops": Part(
        _ops,
        "compiled ops",
        "build the compiled ops against this torch: pip install --no-build-isolation -e . in vllm-ascend-pd",
        ("torch", "torch_npu"),
    ),
    "kernels": Part(
        _kernels,
        "the NPU's kernels",
        f"{_CANN}; if that does not help, build them against this CANN and torch_npu: {_KERNELS}",
        ("torch", "torch_npu", "ops"),
    ),
    "mooncake": Part(
        _mooncake,
        "Mooncake's engine",
        "install the libraries it names (libibverbs1, librdmacm1; for the NPU wheel CANN's environment)",
    ),
    "connector": Part(setup.load_connector, "LayerwisePushConnector in vLLM", _VLLM, ("torch", "torch_npu", "ops")),
    "device": Part(setup.device_type, "vLLM's device", _VLLM, ("connector",)),
    "host": Part(
        setup.host_address,
        "vLLM's host",
        "set VLLM_HOST_IP to the address by which other hosts reach this one",
        ("connector",),
    ),
}
"""The parts in the order of loading."""

_ON_NPUS = ("torch_npu", "npus", "kernels")
"""Parts that are loaded only if torch_npu is installed."""


def main() -> None:
    """Runs in the child."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu is imported next, with better errors
    failed: set[str] = set()
    for name, part in PARTS.items():
        if name in _ON_NPUS and find_spec("torch_npu") is None:
            continue
        missing = next((need for need in part.needs if need in failed), None)
        loaded = load(name) if missing is None else Loaded(name, 0.0, missing=missing)
        if loaded.error or loaded.missing:
            failed.add(name)
        say(loaded)
    os._exit(0)  # skips the libraries' shutdown, which is not checked


def load(name: str) -> Loaded:
    started = time.monotonic()
    detail = error = ""
    try:
        detail = PARTS[name].load()
    except BaseException as problem:  # noqa: BLE001 - libraries raise all kinds when they do not fit
        error = f"{type(problem).__name__}: {problem}"
        if problem.__cause__ is not None:
            error = f"{type(problem.__cause__).__name__}: {problem.__cause__}, so {error}"
    return Loaded(name, time.monotonic() - started, detail, error)


def load_all() -> tuple[list[Loaded], Ran]:
    """Loads everything in a child process. Returns its reports and how it ended."""
    ran = run(child("loading"), TIMEOUT_S)
    return ran.reports(Loaded), ran


def details(loaded: Sequence[Loaded]) -> dict[str, str]:
    """Returns what the parts that could be loaded say about themselves."""
    return {each.part: each.detail for each in loaded if not each.error and not each.missing}


def judge(loaded: Sequence[Loaded], ran: Ran, on_npu: bool) -> list[Finding]:
    findings = [_judge_part(each, on_npu) for each in loaded]
    if ran.problem is not None:
        reached = [each.part for each in loaded]
        at = next((name for name in PARTS if name not in reached and (on_npu or name not in _ON_NPUS)), None)
        last = f" ({ran.last_words})" if ran.last_words else ""
        reason = f"loading stopped at {at or 'the end of the process'}: the process {ran.problem}{last}"
        action = PARTS[at].action if at else "report this with its output"
        findings.append(error("loading.process", reason, action))
    return findings


def _judge_part(loaded: Loaded, on_npu: bool) -> Finding:
    check, part = f"loading.{loaded.part}", PARTS[loaded.part]
    if loaded.missing:
        return note(check, f"not tried, since {PARTS[loaded.missing].what} cannot be loaded")
    if loaded.error:
        action = mooncake_library.remedy(loaded.error) if loaded.part == "mooncake" else part.action
        return error(check, f"{part.what} cannot be loaded: {one_line(loaded.error, _CHARS)}", action)
    if loaded.part == "device":
        return _judge_device(check, loaded.detail, on_npu)
    if loaded.part == "host":
        return _judge_host(check, loaded.detail)
    if loaded.part == "kernels" and not loaded.detail:
        slower = "the NPU's kernels were not built: torch's slower operators are used instead"
        return note(check, slower, f"load CANN's environment, then {_KERNELS}")
    return ok(check, f"{part.what}: loaded in {loaded.seconds:.1f} s", seconds=round(loaded.seconds, 3))


def _judge_device(check: str, device: str, on_npu: bool) -> Finding:
    wanted = "npu" if on_npu else "cpu"
    if device == wanted:
        return ok(check, f"vLLM runs on {device}", device=device)
    found = f"vLLM runs on {device or 'no device that it knows'}, not on {wanted}"
    return error(check, found, PARTS["device"].action, device=device)


def _judge_host(check: str, host: str) -> Finding:
    action = PARTS["host"].action
    if host in ("0.0.0.0", "::"):
        return error(check, "vLLM does not know this host's address", action, host=host)
    if is_loopback(host):
        local = f"engines listen on {host}: other hosts cannot reach them"
        return warning(check, local, f"if prefill and decode are on several hosts, {action}", host=host)
    return ok(check, f"engines listen on {host}", host=host)
