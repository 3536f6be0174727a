# SPDX-License-Identifier: Apache-2.0
"""Processes with one of Mooncake's wheels for NPUs, of the versions that the environment has."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

FOLDER = Path(sys.prefix, "mooncake-npu")
WHEELS = sorted(path.name for path in FOLDER.glob("*"))


def python_path(wheel: str, *others: str) -> str:
    """Returns a PYTHONPATH with a wheel: a version, or a folder."""
    return os.pathsep.join([str(FOLDER / wheel), *filter(None, others)])


def printed(*arguments: str, wheel: str, timeout_s: float = 180.0, **env: str) -> str:
    """Returns what Python prints with these arguments and a wheel. The process has to end well."""
    env = {**os.environ, "PYTHONPATH": python_path(wheel, os.environ.get("PYTHONPATH", "")), **env}
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout_s, env=env)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


class Answering:
    """A process that reads commands, a line of JSON each, and prints its answers among what libraries print."""

    def __init__(self, program: str, env: dict[str, str], log: IO[str] | None = None) -> None:
        """`program`: a file of this folder; `log`: where its errors go."""
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(program))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **env},
        )

    def ask(self, *command: Any) -> Any:
        self.send(*command)
        return self.answer()

    def send(self, *command: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('["answer"'):
                return json.loads(line)[1]
        raise AssertionError(f"the process ended with {self.process.wait()}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
