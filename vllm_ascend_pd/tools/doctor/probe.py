# SPDX-License-Identifier: Apache-2.0
"""A child of the doctor: loads what an engine loads, in the same order, and reports each part.

Importing is the test that versions fit: compiled parts find their libraries, the connector finds vLLM's internals.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.util import find_spec

import msgspec

from vllm_ascend_pd.connector import setup as environment
from vllm_ascend_pd.tools.doctor import child, mooncake_engine


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

    from vllm_ascend_pd.transport import ascend

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

    return msgspec.json.encode(mooncake_engine.installed()).decode()


PARTS: dict[str, tuple[Callable[[], str], tuple[str, ...]]] = {
    "torch": (_torch, ()),
    "torch_npu": (_torch_npu, ("torch",)),
    "npus": (_npus, ("torch", "torch_npu")),
    "ops": (_ops, ("torch", "torch_npu")),
    "kernels": (_kernels, ("torch", "torch_npu", "ops")),
    "mooncake": (_mooncake, ()),
    "connector": (environment.load_connector, ("torch", "torch_npu", "ops")),
    "device": (environment.device_type, ("connector",)),
    "host": (environment.host_address, ("connector",)),
}
"""The parts in the order of loading, and what each requires."""

ON_NPUS = ("torch_npu", "npus", "kernels")
"""Parts that are loaded only if torch_npu is installed."""


def main() -> None:
    out = child.take_stdout()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu is imported next, with better errors
    failed: set[str] = set()
    for part, (load, needs) in PARTS.items():
        if part in ON_NPUS and find_spec("torch_npu") is None:
            continue
        missing = next((need for need in needs if need in failed), None)
        loaded = _try(part, load) if missing is None else Loaded(part, 0.0, missing=missing)
        if loaded.error or loaded.missing:
            failed.add(part)
        child.say(out, loaded)
    os._exit(0)  # skips the libraries' shutdown, which is not checked


def _try(part: str, load: Callable[[], str]) -> Loaded:
    started = time.monotonic()
    detail = error = ""
    try:
        detail = load()
    except BaseException as problem:  # noqa: BLE001 - libraries raise all kinds when they do not fit
        error = f"{type(problem).__name__}: {problem}"
        if problem.__cause__ is not None:
            error = f"{type(problem.__cause__).__name__}: {problem.__cause__}, so {error}"
    return Loaded(part, time.monotonic() - started, detail, error)
