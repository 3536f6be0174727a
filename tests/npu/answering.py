# SPDX-License-Identifier: Apache-2.0
"""A process that reads commands, a line of JSON each, and prints its answers among what libraries print."""

import json
import subprocess
from typing import Any


class Answering:
    process: "subprocess.Popen[str]"

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
