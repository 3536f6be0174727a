# SPDX-License-Identifier: Apache-2.0
"""Loads the installed Mooncake, names it, and explains why it cannot be loaded.

Facts and where they are from:

- Mooncake's wheels for NPUs, 0.3.11.post1 and 0.3.13.post1 (`readelf -d`): `mooncake.engine` is linked against
  `ascend_transport.so`, and that against CANN's libraries. Without CANN the import fails.
- Mooncake, transfer_engine_impl.cpp: a build for NPUs installs the transport `ascend` whatever protocol it is given.
  From 0.3.12 on it installs TCP instead if MC_FORCE_TCP is set, to any value, when an engine starts. 0.3.11 for NPUs
  does not read that variable: it has no TCP.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

FORCE_TCP = "MC_FORCE_TCP"
"""If it is set, Mooncake's engines use TCP. An engine reads it when it starts."""

_DISTRIBUTION = "mooncake-transfer-engine"
_FROM_CANN = ("libascendcl", "libllm_datadist", "libmetadef", "libhixl", "libhccl", "libhcomm", "libge_", "libgraph")
_PACKAGES = {
    "libcurl.so": ("libcurl4", "libcurl"),
    "libibverbs.so": ("libibverbs1", "rdma-core"),
    "libnuma.so": ("libnuma1", "numactl-libs"),
    "librdmacm.so": ("librdmacm1", "rdma-core"),
}
"""Packages of the system libraries that Mooncake's wheels need: Debian's and Ubuntu's, and openEuler's."""

_LIBRARIES = ("ascend_transport", "transfer_engine")
_MISSING = re.compile(r"(\S+): cannot open shared object file")


class LibraryError(Exception):
    """Mooncake cannot be loaded, or lacks a protocol. The message says what to do."""


def load() -> Any:
    """Returns Mooncake's class `TransferEngine`. Raises LibraryError."""
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise LibraryError(f"Mooncake cannot be loaded ({error}): {remedy(str(error))}") from error
    return TransferEngine


def remedy(error: str) -> str:
    """Returns what to do about an ImportError of `mooncake.engine`. `error`: its text."""
    missing = _MISSING.search(error)
    name = Path(missing[1]).name if missing else ""
    if name.startswith(_FROM_CANN):
        return f"{name} is part of CANN, which Mooncake for NPUs needs: install CANN and `source` its set_env.sh first"
    for library, package in _PACKAGES.items():
        if name.startswith(library):
            debian, red_hat = package
            return f"install {name} (apt-get install {debian}; on openEuler: yum install {red_hat})"
    if name:
        return f"install the system library {name}"
    if "undefined symbol" in error:
        return "it does not fit the installed CANN: install the versions that go together (docs/versions.md)"
    if "GLIBC" in error:
        return (
            "it needs a newer C or C++ library: its wheels for NPUs are made for glibc 2.35, which openEuler 24.03 "
            "has, and 22.03 and Kylin do not"
        )
    if "No module named" in error:
        return "install the Mooncake of requirements/cpu.txt, or on NPUs of requirements/npu.txt"
    return "install the Mooncake that requirements/ names again"


def installed() -> str:
    """Returns the name and version of the distribution of the loaded `mooncake.engine`; "" if it is not known.

    If several are in one folder, where they overwrite each other, it names all of them.
    """
    folder = Path(sys.modules["mooncake.engine"].__file__ or "").parent.parent
    found = {
        f"{dist.name} {dist.version}"
        for dist in distributions(path=[str(folder)])
        if (dist.name or "").lower().replace("_", "-").startswith(_DISTRIBUTION)
    }
    return " and ".join(sorted(found))


def loaded_files() -> list[Path]:
    """Returns the files of Mooncake that this process has mapped."""
    return files_in(Path("/proc/self/maps").read_text())


def files_in(maps: str) -> list[Path]:
    """Returns Mooncake's files in `maps`, the text of /proc/self/maps."""
    paths = {Path(fields[5]) for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(p for p in paths if "mooncake" in str(p).lower() or any(name in p.name for name in _LIBRARIES))


def mentions(path: Path, text: bytes) -> bool:
    """Returns whether the file contains `text`: the name of a class, a symbol, or a setting that it reads."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


def check_protocol(protocol: str, has_ascend: bool) -> None:
    """Raises LibraryError if the loaded Mooncake would move bytes by another protocol than `protocol`.

    `has_ascend`: it has the transport `ascend`.
    """
    if protocol == "ascend" or not has_ascend:
        return
    if protocol != "tcp":
        raise LibraryError(f"{installed()} has no {protocol!r}: set transfer_protocol to ascend or tcp")
    libraries = [path for path in loaded_files() if path.name.startswith("libtransfer_engine")]
    if not any(mentions(path, FORCE_TCP.encode()) for path in libraries):
        raise LibraryError(
            f"{installed()} moves bytes only by 'ascend': for TCP install mooncake-transfer-engine-npu 0.3.13.post1, "
            "or leave transfer_protocol out"
        )


@contextlib.contextmanager
def forced_tcp(protocol: str) -> Iterator[None]:
    """Makes an engine that starts meanwhile use TCP with any wheel, if `protocol` is "tcp"."""
    if protocol != "tcp" or FORCE_TCP in os.environ:
        yield
        return
    os.environ[FORCE_TCP] = "1"
    try:
        yield
    finally:
        del os.environ[FORCE_TCP]
