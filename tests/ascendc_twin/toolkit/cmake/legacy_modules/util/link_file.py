# SPDX-License-Identifier: Apache-2.0
"""A module beside the program that imports it: Python keeps its bytecode here, unless it is told not to."""

from pathlib import Path


def read(build: str, target: str) -> list[str]:
    """Only the generators for make write this file."""
    return Path(build, "CMakeFiles", f"{target}.dir", "link.txt").read_text().splitlines()
