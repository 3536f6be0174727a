# SPDX-License-Identifier: Apache-2.0
"""A file of JSON objects, one a line, that is only ever added to."""

from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Lines(Generic[T]):
    def __init__(self, path: Path, type: Any) -> None:
        """`type`: what msgspec decodes a line as."""
        self._path = path
        self.items: list[T] = []
        if path.exists():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):  # the writer was killed in the middle of a line
                with path.open("r+b") as file:
                    file.truncate(len(whole))
            self.items = [msgspec.json.decode(line, type=type) for line in whole.splitlines()]

    def add(self, item: T) -> None:
        """It is in the file when this returns, whatever ends this process then."""
        self.items.append(item)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(item) + b"\n")
