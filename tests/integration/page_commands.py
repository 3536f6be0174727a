# SPDX-License-Identifier: Apache-2.0
"""All documented commands, and how a test runs one."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from harness.documented import PAGES, REPOSITORY, filled, lines

ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]]),
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
}
del ENVIRONMENT["VLLM_HOST_IP"]  # of this process's engines: a host of the pages has its own


class Command(NamedTuple):
    line: str
    pages: tuple[Path, ...]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)

    def run(self, folder: Path, more: str = "", /, codes: tuple[int, ...] = (0,), **values: str) -> str:
        """Returns what the command prints in `folder`, with `more` options. `values`: environment."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{self.line} {more}"],
            cwd=folder,
            env=ENVIRONMENT | values,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode in codes, done.stdout + done.stderr
        return done.stdout

    def with_values(self, values: dict[str, str]) -> Command:
        return self._replace(line=filled(self.line, values))


def documented_commands() -> list[Command]:
    pages: dict[str, list[Path]] = {}
    for page in PAGES:
        for line in lines(page):
            pages.setdefault(line, []).append(page)
    return [Command(line, tuple(found)) for line, found in sorted(pages.items())]


COMMANDS = documented_commands()
