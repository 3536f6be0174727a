# SPDX-License-Identifier: Apache-2.0
"""Loads the emulated CANN libraries in this process, and reads their counters and injects their faults.

`activate()` must come before `import torch`. In the environment that scripts/setup_npu_emulation.sh makes, every
process with `CANN_ON_HOST=1` calls it at start, so that the workers of `vllm serve` are covered. README.md says
what is emulated and lists the settings.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

BEFORE_TORCH = (
    "libascendcl",
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libacl_tdt_channel",
    "libhccl",
    "libhcomm",
)
PLACES = ("device", "pinned host", "host", "out of bounds")


def library_folder() -> Path:
    """Where the libraries are: `CANN_ON_HOST_LIB`, or in this Python environment."""
    return Path(os.environ.get("CANN_ON_HOST_LIB") or Path(sys.prefix, "cann_on_host", "lib"))


def is_available() -> bool:
    """Whether they have been built."""
    return (library_folder() / "libascendcl.so").exists()


def is_active() -> bool:
    """Whether they are in use in this process."""
    return any(isinstance(finder, _Hooks) for finder in sys.meta_path)


def activate() -> None:
    """Make `import torch_npu` find the emulated libraries, here and in processes started from here."""
    if is_active():
        return
    if "torch" in sys.modules:
        raise RuntimeError("cann_on_host.activate() must come before `import torch`, which loads torch_npu")
    if not is_available():
        raise RuntimeError(f"no emulated CANN libraries in {library_folder()}: run scripts/setup_npu_emulation.sh")
    os.environ["CANN_ON_HOST"] = "1"
    # With torch_npu's own queue an operator that is not emulated raises once, and what follows computes garbage.
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    for name in BEFORE_TORCH:
        _load(name)
    here = Path(__file__).parent
    if str(here) not in sys.path:
        sys.path.append(str(here))
    tools = str(here / "tools")  # hccn_tool, which HIXL asks for a device's address
    if tools not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH", ""), tools)))
    sys.meta_path.insert(0, _Hooks())


# --- counters ----------------------------------------------------------------------------------------------


def counters() -> dict[str, int]:
    """Everything counted in this process since the last reset: names as in src/runtime/runtime.h."""
    runtime = _runtime()
    return {
        runtime.cann_on_host_counter_name(i).decode(): runtime.cann_on_host_counter(i)
        for i in range(runtime.cann_on_host_num_counters())
    }


def launches() -> dict[str, int]:
    """How often each operator was launched since the last reset."""
    runtime = _runtime()
    room = runtime.cann_on_host_launches(None, 0) + 4096
    text = ctypes.create_string_buffer(room)
    runtime.cann_on_host_launches(text, room)
    pairs = (line.rsplit(" ", 1) for line in text.value.decode().splitlines())
    return {name: int(times) for name, times in pairs}


def reset_counters() -> None:
    _runtime().cann_on_host_reset_counters()


def place(address: int, nbytes: int) -> str:
    """Where that memory is: one of `PLACES`."""
    return PLACES[_runtime().cann_on_host_locate(address, nbytes)]


# --- HCCL --------------------------------------------------------------------------------------------------


class Communicator(NamedTuple):
    """`name`: torch_npu's, and in brackets the `group_name` of the group's options; `nbytes`: of the device's memory;
    `aiv`: it runs operations on vector cores, one such communicator at a time."""

    name: str
    nbytes: int
    aiv: bool


def communicators() -> list[Communicator]:
    """This process's."""
    library = ctypes.CDLL(str(library_folder() / "libhccl.so"))
    library.cann_on_host_communicators.restype = ctypes.c_size_t
    library.cann_on_host_communicators.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    room = library.cann_on_host_communicators(None, 0) + 4096
    text = ctypes.create_string_buffer(room)
    library.cann_on_host_communicators(text, room)
    lines = (line.split("\t") for line in text.value.decode().splitlines())
    return [Communicator(name, int(nbytes), aiv == "1") for name, nbytes, aiv in lines]


@contextlib.contextmanager
def model_step() -> Iterator[None]:
    """The calling thread runs a step of a model: a communicator that would connect on it is refused meanwhile. Does
    nothing on real hardware."""
    if not is_active():
        yield
        return
    library = ctypes.CDLL(str(library_folder() / "libhccl.so"))
    library.cann_on_host_set_model_step(1)
    try:
        yield
    finally:
        library.cann_on_host_set_model_step(0)


# --- delays ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def delays(first_stream_us: int, side_streams_us: int | None = None) -> Iterator[None]:
    """Every task takes that much longer; the side streams' tasks by default as much as the others.

    The first stream of a device is torch_npu's default one. Leaves the process without delays.
    """
    set_delays(first_stream_us, first_stream_us if side_streams_us is None else side_streams_us)
    try:
        yield
    finally:
        set_delays(0, 0)


def set_delays(first_stream_us: int, side_streams_us: int) -> None:
    """As `delays`, until they are set again."""
    _runtime().cann_on_host_set_delays(ctypes.c_long(first_stream_us), ctypes.c_long(side_streams_us))


# --- faults ------------------------------------------------------------------------------------------------


def inject(faults: str) -> None:
    """Let something fail from now on: `where:what@n`, separated by commas (see README.md)."""
    if _runtime().cann_on_host_inject(faults.encode()) != 0:
        raise ValueError(f"not a list of faults: {faults!r}")


def clear_faults() -> None:
    """Forget the faults that have not struck, and let go on what hangs."""
    _runtime().cann_on_host_clear_faults()


@contextlib.contextmanager
def injected(faults: str) -> Iterator[None]:
    inject(faults)
    try:
        yield
    finally:
        clear_faults()


@contextlib.contextmanager
def link_fault(process: int, fault: str) -> Iterator[None]:
    """Let transfers to a process fail as `fault` says: `hang`, `slow MILLISECONDS`, `refuse`, `down` or `lost` (see
    README.md). Any process may ask for it. Afterwards the link is as it was before."""
    folder = Path(os.environ.get("CANN_ON_HOST_LINKS") or "/dev/shm/cann_on_host_links")
    folder.mkdir(exist_ok=True)
    said, new = folder / str(process), folder / f"{process}.new"

    def say(what: str) -> None:
        new.write_text(what)
        new.rename(said)  # never half of it

    before = said.read_text() if said.exists() else None
    say(fault)
    try:
        yield
    finally:
        if before is None:
            said.unlink()
        else:
            say(before)


# --- loading -----------------------------------------------------------------------------------------------


def _load(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(library_folder() / f"{name}.so"), mode=ctypes.RTLD_GLOBAL)


def _runtime() -> ctypes.CDLL:
    runtime = ctypes.CDLL(str(library_folder() / "libascendcl.so"))
    runtime.cann_on_host_counter_name.restype = ctypes.c_char_p
    runtime.cann_on_host_counter.restype = ctypes.c_uint64
    runtime.cann_on_host_launches.restype = ctypes.c_size_t
    runtime.cann_on_host_launches.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    runtime.cann_on_host_locate.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return runtime


def _before_torch_npu() -> None:
    _load("libopapi")  # uses torch's libraries


def _after_torch_npu(torch_npu: ModuleType) -> None:
    import cann_on_host_operators
    import cann_on_host_triton

    cann_on_host_operators.install(torch_npu, library_folder() / "libcann_on_host_fallback.so")
    cann_on_host_triton.install()


def _after_block_table(block_table: ModuleType) -> None:
    import cann_on_host_triton

    block_table._compute_slot_mapping_kernel = cann_on_host_triton.SlotMappingKernel()


def _after_batch_memcpy(kernels: ModuleType) -> None:
    import cann_on_host_triton

    kernels.batch_memcpy_kernel = cann_on_host_triton.BatchMemcpyKernel()


def _after_vllm_ascend_utils(utils: ModuleType) -> None:
    """vllm-ascend's own compiled library needs CANN's compiler. Of its operators, `cann_on_host_operators` has those
    that a model needs. vllm-ascend uses torch_npu's in the place of the others, as on a chip that has none of its own.
    """
    utils._CUSTOM_OP_ENABLED = False
    sys.modules.setdefault("vllm_ascend.vllm_ascend_C", ModuleType("vllm_ascend.vllm_ascend_C"))


def _after_gated_delta(kernels: ModuleType) -> None:
    import cann_on_host_gated_delta

    cann_on_host_gated_delta.replace(kernels)


def _after_torchvision_extension(extension: ModuleType) -> None:
    """vllm-ascend imports transformers' image processors, and those torchvision; a build of torchvision for another
    torch or for CUDA has no operators here, but its Python part wants to register a fake one."""
    if extension._has_ops():
        return
    import torch

    global _torchvision
    _torchvision = torch.library.Library("torchvision", "DEF")
    _torchvision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _before_mooncake() -> None:
    for name in ("libmetadef", "libllm_datadist"):  # which Mooncake's wheel for NPUs is linked against
        _load(name)


_torchvision: object = None  # keeps the definition alive
_AROUND: dict[str, tuple[Callable[[], None] | None, Callable[[ModuleType], None] | None]] = {
    "torch_npu": (_before_torch_npu, _after_torch_npu),
    "vllm.v1.worker.block_table": (None, _after_block_table),
    "vllm_ascend.worker.block_table": (None, _after_block_table),
    "vllm_ascend.ops.triton.batch_memcpy": (None, _after_batch_memcpy),
    "vllm_ascend.utils": (None, _after_vllm_ascend_utils),
    "vllm.model_executor.layers.fla.ops.l2norm": (None, _after_gated_delta),
    "vllm_ascend.ops.triton.fla.l2norm": (None, _after_gated_delta),
    "vllm_ascend.ops.triton.fla.chunk": (None, _after_gated_delta),
    "vllm_ascend.ops.triton.fla.utils": (None, _after_gated_delta),
    "vllm_ascend.ops.triton.layernorm_gated": (None, _after_gated_delta),
    "torchvision.extension": (None, _after_torchvision_extension),
    "mooncake.engine": (_before_mooncake, None),
    "mooncake.store": (_before_mooncake, None),
}


class _Hooks(importlib.abc.MetaPathFinder):
    """Runs what `_AROUND` says before and after the import of a module."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in _AROUND or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is None or spec.loader is None:
            return None
        before, after = _AROUND[name]
        create, execute = spec.loader.create_module, spec.loader.exec_module

        def create_module(spec: ModuleSpec) -> ModuleType | None:
            if before:
                before()  # an extension module loads its libraries here
            return create(spec)

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if after:
                after(module)

        spec.loader.create_module = create_module  # type: ignore[method-assign]
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
