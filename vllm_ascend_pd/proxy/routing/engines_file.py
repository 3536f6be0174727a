# SPDX-License-Identifier: Apache-2.0
"""Reads a YAML file that lists engines, and reads it again when it changes. For example:

prefill:
  - http://10.0.0.1:8100
decode:
  - dns+http://decode.default.svc:8200
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import yaml

from vllm_ascend_pd.proxy.routing.addresses import check_engine_urls
from vllm_ascend_pd.proxy.routing.registry import EngineRole

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_MAX_BYTES = 1 << 20

Lists = Mapping[EngineRole, Sequence[str]]
"""URLs by role."""


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill: list[str] = []
    decode: list[str] = []


def parse_engines(text: bytes) -> Lists:
    """Reads the file's text. Raises ValueError if it lists no engine, or a wrong one."""
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
    try:
        content = msgspec.convert(yaml.safe_load(text), _Content)
    except Exception as error:  # noqa: BLE001 - PyYAML's constructors let any exception through: IndexError for `!!int ''`
        told = str(error) if isinstance(error, yaml.YAMLError | msgspec.ValidationError) else repr(error)
        raise ValueError(" ".join(told.split())) from None
    lists = {role: check_engine_urls(role.value, getattr(content, role.value)) for role in EngineRole}
    if not any(lists.values()):
        raise ValueError("it lists no engine")
    return lists


def read_engines(path: str) -> Lists:
    """Reads the file at `path`. Raises ValueError if it cannot be used."""
    try:
        if not Path(path).is_file():  # opening a pipe would wait for its other end
            raise ValueError("No such file")
        with Path(path).open("rb") as file:
            return parse_engines(file.read(_MAX_BYTES + 1))
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None


class EnginesFile:
    """Watches the file and passes on what it lists."""

    def __init__(self, path: str, use: Callable[[Lists], None]) -> None:
        """`use` is called with the lists at the start and after each change."""
        self._path = path
        self._use = use
        self._used: object = None
        """State of the file when it was last read."""
        self.problem: str | None = None
        """Why the file cannot be used now. The lists read before stay in use. None: it can."""

    async def start(self) -> None:
        """Reads the file for the first time."""
        self._used = await anyio.to_thread.run_sync(self._state)
        await self._read()

    async def run(self) -> None:
        """Watches the file until cancelled. A changed file is read once two looks in a row find it the same: until
        then it may still be written."""
        before: object = None
        while True:
            now = await anyio.to_thread.run_sync(self._state)
            if now == before != self._used:
                await self._read()
                self._used = now
            before = now
            await anyio.sleep(_LOOK_SECONDS)

    def _state(self) -> tuple[int, ...]:
        """Returns what differs after a change of the file: time, size and inode. () if the file cannot be examined."""
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino

    async def _read(self) -> None:
        try:
            lists = await anyio.to_thread.run_sync(read_engines, self._path)
        except ValueError as error:
            self.problem = f"the engines file {self._path} cannot be used: {error}"
            log.error("%s: the engines do not change", self.problem)
            return
        self.problem = None
        self._use(lists)
