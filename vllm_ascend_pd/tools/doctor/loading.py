# SPDX-License-Identifier: Apache-2.0
"""Checks that an engine's libraries can be loaded: torch, Mooncake, vLLM and the compiled ops.

A child process loads what an engine loads, in the same order, and reports each part. Importing is the test that
versions fit: compiled parts find their libraries, the connector finds vLLM's internals.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_ascend_pd.connector import setup
from vllm_ascend_pd.core.hosts import is_loopback
from vllm_ascend_pd.tools.doctor.report import Finding, Level, error, note, ok, warning
from vllm_ascend_pd.tools.programs import Ran, child, run
from vllm_ascend_pd.transport import ascend, mooncake_library

TIMEOUT_S = 240.0
"""Importing vLLM takes seconds, or more than a minute on a busy machine."""

_CANN = "load CANN's environment (`source` its set_env.sh)"
_KERNELS = "pip install -v --no-build-isolation -e . in vllm-ascend-pd"
_HOST = "set VLLM_HOST_IP to the address by which other hosts reach this one"
_CHIP = (
    "install vllm-ascend for this chip. PyPI's wheel of 0.23.0 has kernels of A2 only; for A3, take vllm-ascend's "
    "image with `-a3` in its tag"
)
_KINDS = {"Ascend910B": "A2", "Ascend910_93": "A3", "Ascend310P": "_310P", "Ascend950": "A5"}
"""By how a chip's name begins: vllm-ascend's name of the kind (its setup.py)."""
_VLLM = "install the vLLM, and on NPUs the vllm-ascend, that requirements/ names"


def _npus() -> Finding:
    """The figure `npus` has the machine's numbers of the NPUs that processes see, "?" for one that ACL does not say."""
    import torch

    numbers = [ascend.physical_device(device) for device in range(torch.npu.device_count())]
    listed = ",".join("?" if number is None else str(number) for number in numbers)
    return ok("loading.npus", f"processes see the NPUs {listed or '(none)'}", npus=listed)


def _vllm_ascend() -> Finding | None:
    """Compares the chip that vllm-ascend's kernels are for with this machine's, without importing vllm-ascend."""
    spec = find_spec("vllm_ascend")
    info = Path(spec.origin).with_name("_build_info.py") if spec is not None and spec.origin else None
    if info is None or not info.is_file():
        return None
    found = re.search(r"__device_type__\s*=\s*['\"](\w+)", info.read_text(errors="replace"))
    return judge_build(found[1] if found else "", ascend.chip_name())


def judge_build(built_for: str, chip: str) -> Finding | None:
    """`built_for`: the `__device_type__` of vllm-ascend's build. None: nothing contradicts the chip."""
    is_one = next((kind for begin, kind in _KINDS.items() if chip.startswith(begin)), "")
    if not built_for or not is_one or built_for == is_one:
        return None
    found = f"vllm-ascend is built for {built_for}, and this machine's chip, {chip}, is an {is_one}"
    return error("loading.vllm_ascend", found, _CHIP, built_for=built_for, chip=chip)


def _ops() -> None:
    import torch

    from vllm_ascend_pd.device import ops

    units = torch.arange(4096, dtype=torch.uint8).reshape(8, 512)
    out = torch.zeros(4096, dtype=torch.uint8)
    ops.gather_units([units], torch.arange(7, -1, -1) * 512, 512, 2, out, 0, 0, 1024)
    if not torch.equal(out, units.flip(0).reshape(-1)):
        raise RuntimeError("gather_units gives wrong bytes")


def _kernels() -> Finding | None:
    from vllm_ascend_pd.device import ops

    if ops.npu_kernels.error:
        raise OSError(ops.npu_kernels.error)
    if not ops.npu_kernels.reason:
        return None
    slower = "the NPU's kernels were not built: torch's slower operators are used instead"
    return note("loading.kernels", slower, f"load CANN's environment, then {_KERNELS}")


def _mooncake() -> Finding:
    """The figures `no_PROTOCOL` say why it does not have a protocol; the others describe its engine over ascend."""
    import mooncake.engine  # noqa: F401 - loads its libraries

    has_ascend = ascend.is_loaded(Path("/proc/self/maps").read_text())
    figures = {} if has_ascend else {"no_ascend": "it has no Ascend transport and would use TCP"}
    for protocol in ("tcp", "rdma"):
        try:
            mooncake_library.check_protocol(protocol, has_ascend)
        except mooncake_library.LibraryError as problem:
            figures[f"no_{protocol}"] = str(problem)
    if has_ascend:
        figures |= msgspec.structs.asdict(ascend.describe_transport("ascend"))
    return ok("loading.mooncake", "Mooncake's engine: loaded", **figures)


def _device() -> Finding:
    device, wanted = setup.device_type(), "cpu" if find_spec("torch_npu") is None else "npu"
    if device == wanted:
        return ok("loading.device", f"vLLM runs on {device}", device=device)
    found = f"vLLM runs on {device or 'no device that it knows'}, not on {wanted}"
    return error("loading.device", found, _VLLM, device=device)


def _host() -> Finding:
    host = setup.host_address()
    if host in ("0.0.0.0", "::"):
        return error("loading.host", "vLLM does not know this host's address", _HOST, host=host)
    if is_loopback(host):
        local = f"engines listen on {host}: other hosts cannot reach them"
        return warning("loading.host", local, f"if prefill and decode are on several hosts, {_HOST}", host=host)
    return ok("loading.host", f"engines listen on {host}", host=host)


class Part(NamedTuple):
    """One thing that an engine loads. `load` returns a finding where there is more to say than that it was loaded."""

    load: Callable[[], object]
    what: str
    action: str  # what to do if it cannot be loaded


PARTS = {
    "torch": Part(
        partial(import_module, "torch"),
        "torch",
        "install torch again, in the version that requirements/ names for this machine",
    ),
    "torch_npu": Part(
        partial(import_module, "torch_npu"),
        "torch_npu",
        f"{_CANN}, and install a torch-npu that fits torch and CANN",
    ),
    "npus": Part(
        _npus,
        "the list of NPUs",
        "check that `npu-smi info` lists this machine's NPUs, and that this user may use them",
    ),
    "ops": Part(
        _ops,
        "compiled ops",
        "build the compiled ops against this torch: pip install --no-build-isolation -e . in vllm-ascend-pd",
    ),
    "vllm_ascend": Part(
        _vllm_ascend,
        "vllm-ascend's build",
        f"{_CHIP}; `pip install` of the source distribution with SOC_VERSION compiles for a chip",
    ),
    "kernels": Part(
        _kernels,
        "the NPU's kernels",
        f"{_CANN}; if that does not help, build them against this CANN and torch_npu: {_KERNELS}",
    ),
    "mooncake": Part(
        _mooncake,
        "Mooncake's engine",
        "install the libraries it names (apt-get: libcurl4 libibverbs1 libnuma1; yum: libcurl rdma-core numactl-libs; "
        "for NPUs CANN's environment)",
    ),
    "connector": Part(setup.load_connector, "LayerwisePushConnector in vLLM", _VLLM),
    "device": Part(_device, "vLLM's device", _VLLM),
    "host": Part(_host, "vLLM's host", _HOST),
}
"""The parts in the order of loading."""

_ALONE = ("vllm_ascend", "mooncake", "device", "host")
"""Parts that no later one needs. All others are needed by those behind them, but for Mooncake's engine."""

_ON_NPUS = ("torch_npu", "npus", "vllm_ascend", "kernels")
"""Parts that are loaded only if torch_npu is installed."""


def main() -> Iterator[Finding]:
    """Runs in the child."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu is imported next, with better errors
    failed = ""
    for name in expected_parts():
        if failed and name != "mooncake":  # which needs none
            yield note(f"loading.{name}", f"not tried, since {failed} cannot be loaded")
            continue
        yield (found := load(name))
        if found.level is Level.ERROR and name not in _ALONE:
            failed = PARTS[name].what


def expected_parts() -> list[str]:
    on_npu = find_spec("torch_npu") is not None
    return [name for name in PARTS if on_npu or name not in _ON_NPUS]


def load(name: str) -> Finding:
    check, part, started = f"loading.{name}", PARTS[name], time.monotonic()
    try:
        result = part.load()
    except BaseException as problem:  # noqa: BLE001 - libraries raise all kinds when they do not fit
        reason = f"{type(problem).__name__}: {problem}"
        if problem.__cause__ is not None:
            reason = f"{type(problem.__cause__).__name__}: {problem.__cause__}, so {reason}"
        action = mooncake_library.remedy(reason) if name == "mooncake" else part.action
        return error(check, f"{part.what} cannot be loaded: {reason}", action)
    seconds = time.monotonic() - started
    found = result if isinstance(result, Finding) else ok(check, f"{part.what}: loaded in {seconds:.1f} s")
    return msgspec.structs.replace(found, figures={**found.figures, "seconds": round(seconds, 3)})


def check() -> list[Finding]:
    """Loads everything in a child process."""
    return judge(run(child(f"{__package__}.loading"), TIMEOUT_S))


def judge(ran: Ran) -> list[Finding]:
    """Returns what the child has found. If it did not reach its end, adds the part at which it stopped."""
    findings = ran.reports(Finding)
    if ran.problem is not None:
        reached = {each.check for each in findings}
        at = next((name for name in expected_parts() if f"loading.{name}" not in reached), None)
        found = f"loading stopped at {at or 'the end of the process'}: {ran.ending}"
        findings.append(error("loading.process", found, PARTS[at].action if at else "report this with its output"))
    return findings
