# SPDX-License-Identifier: Apache-2.0
"""A YAML file that lists engines, read again when it changes:

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


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill: list[str] = []
    decode: list[str] = []


def parse_engines(text: bytes) -> Lists:
    """Raises ValueError for what lists no engines, or wrong ones."""
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
    try:
        content = msgspec.convert(yaml.safe_load(text), _Content)
    except Exception as error:  # noqa: BLE001 - PyYAML's constructors raise what they meet: IndexError for `!!int ''`
        told = str(error) if isinstance(error, yaml.YAMLError | msgspec.ValidationError) else repr(error)
        raise ValueError(" ".join(told.split())) from None
    lists = {role: check_engine_urls(role.value, getattr(content, role.value)) for role in EngineRole}
    if not any(lists.values()):
        raise ValueError("it lists no engine")
    return lists


def read_engines(path: str) -> Lists:
    """Raises ValueError."""
    try:
        if not Path(path).is_file():  # not to wait for the other end of a pipe
            raise ValueError("No such file")
        with Path(path).open("rb") as file:
            return parse_engines(file.read(_MAX_BYTES + 1))
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None


class EnginesFile:
    def __init__(self, path: str, use: Callable[[Lists], None]) -> None:
        """`use` gets what the file lists, each time it has changed."""
        self._path = path
        self._use = use
        self._used: object = None
        self.problem: str | None = None
        """Why the file as it is now cannot be used: what it listed before goes on."""

    async def start(self) -> None:
        """Reads it for the first time."""
        self._used = await anyio.to_thread.run_sync(self._state)
        await self._read()

    async def run(self) -> None:
        """Until cancelled. A file that is being written is left alone until it is the same at two looks."""
        before: object = None
        while True:
            now = await anyio.to_thread.run_sync(self._state)
            if now == before != self._used:
                await self._read()
                self._used = now
            before = now
            await anyio.sleep(_LOOK_SECONDS)

    def _state(self) -> tuple[int, ...]:
        """What is different after a change; () if it cannot be known."""
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
            log.error("%s: the engines stay as they were", self.problem)
            return
        self.problem = None
        self._use(lists)
