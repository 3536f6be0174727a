# SPDX-License-Identifier: Apache-2.0
"""Has an environment's Python load libraries from a folder before it imports a package that is linked against them.

    python load_unpacked.py FOLDER LIBRARY...

FOLDER has unpacked Debian packages with these libraries, such as libnuma.so.1, and those that they need and the machine
lacks. The package's extension then gets the loaded library of that name, wherever it was found. The environment's own
Python runs this. It writes a module and a `.pth` file, which imports it, to its site-packages.
"""

import ctypes
import sys
import sysconfig
from pathlib import Path

MODULE = '''\
"""Loads libraries that the machine lacks. Made by vllm-ascend-pd's scripts/load_unpacked.py."""

import sys


class LibrariesFirst:
    def find_spec(self, name, path=None, target=None):
        if name in ("mooncake", "vllm"):
            import ctypes
            import os

            for library in LIBRARIES:
                ctypes.CDLL(library)
            if name == "mooncake":  # its commands start programs that are linked against them, too
                paths = [*map(os.path.dirname, LIBRARIES), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
                os.environ["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys(filter(None, paths)))


LIBRARIES = {libraries}
sys.meta_path.insert(0, LibrariesFirst())
'''


def in_order(folder: Path, libraries: list[str]) -> list[str]:
    """Returns the paths of the libraries. Each comes after those that it needs itself."""
    unpacked = {path.name: str(path) for path in folder.resolve().glob("**/lib/*/*.so.*")}
    order: list[str] = []

    def load(name: str) -> None:
        while unpacked[name] not in order:
            try:
                ctypes.CDLL(unpacked[name])
            except OSError as error:
                needed = str(error).partition(":")[0]
                if needed not in unpacked or unpacked[needed] in order:
                    raise
                load(needed)
            else:
                order.append(unpacked[name])

    for library in libraries:
        load(library)
    return order


if __name__ == "__main__":
    module = MODULE.format(libraries=in_order(Path(sys.argv[1]), sys.argv[2:]))
    site = Path(sysconfig.get_path("purelib"))
    site.joinpath("unpacked_libraries.py").write_text(module)
    site.joinpath("unpacked_libraries.pth").write_text("import unpacked_libraries\n")
