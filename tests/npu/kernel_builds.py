# SPDX-License-Identifier: Apache-2.0
"""Builds of the NPU's library with the CANN toolkits of tests/ascendc_twin, each made when it is first asked for."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from make_toolkit import BUILD_PY, HERE, LIBRARY, build_kernels, emulated_libascendcl, make_toolkit

REPOSITORY = HERE.parents[1]
COMPILE_ONCE = HERE / "compile_once.sh"


@dataclass(frozen=True)
class Built:
    """`written_elsewhere`: what the build wrote outside its folder, apart from the libraries."""

    toolkit: Path
    library: Path
    printed: str
    written_elsewhere: list[Path]


class Builds(dict[str, Built]):
    """The builds, by the way in which CANN builds kernels: `find_package(ASC)` or `ascendc_library`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self._compiled = folder / "compiled"
        self._compiled.mkdir()
        self._compiled.chmod(0o777)

    def __missing__(self, way: str) -> Built:
        self[way] = self.build(way)
        return self[way]

    def toolkit(self, way: str, name: str | None = None) -> Path:
        asc = way == "find_package(ASC)"
        # Without hyphens: CMake quotes objects' names that have some, which `relink.py` would not undo.
        folder = self._folder / (name or ("cann_91" if asc else "cann_90"))
        return folder if folder.exists() else make_toolkit(folder, asc)

    def build(self, way: str, toolkit: Path | None = None) -> Built:
        """Builds the library. Raises RuntimeError if the compiler fails."""
        self._made += 1
        toolkit = toolkit or self.toolkit(way)
        folder = self._folder / f"build-{self._made}"
        root, build, output = (folder / name for name in ("root", "build", "output"))
        for path in (folder, root):
            path.mkdir()
            path.chmod(0o777)
        watched = (toolkit, BUILD_PY.parent)
        before = files(*watched)
        environ = {
            # Whatever a rule installs lands below `root`.
            "DESTDIR": str(root),
            "CMAKE_CXX_COMPILER_LAUNCHER": str(COMPILE_ONCE),
            "COMPILED": str(self._compiled),
            # Settings of a user that are not for CANN.
            "CMAKE_GENERATOR": "Ninja",
            "PYTHONDONTWRITEBYTECODE": "",
            "VERBOSE": "1",
        }
        printed = build_kernels(toolkit, build, output, **environ)[1]
        mine = [Path(f"{root}{path}") for path in (build, output)]
        elsewhere = [path for path in files(root) if not any(path.is_relative_to(each) for each in mine)]
        return Built(toolkit, mine[1] / LIBRARY, printed, sorted(elsewhere + list(files(*watched) - before)))


def files(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*") if not path.is_dir()}


def kernels_cannot_be_built() -> dict[str, object]:
    """For `pytest.mark.skipif`."""
    missing = [tool for tool in ("cmake", "make", "c++", "ar") if shutil.which(tool) is None]
    if not emulated_libascendcl().exists():
        missing.append("the emulated CANN libraries")
    return {"condition": bool(missing), "reason": f"needs {', '.join(missing)}"}
