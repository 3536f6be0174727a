# SPDX-License-Identifier: Apache-2.0
"""Calls into processes of a running engine: the other end of `tests/plugins/remote_control.py`."""

from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

_TIMEOUT_S = 30.0


def call(folder: Path, pid: int, name: str, *args: Any) -> Any:
    """What the command `name` returned there. Raises OSError where nobody listens, RuntimeError for what it raised."""
    with Client(str(folder / f"{pid}.sock"), "AF_UNIX") as connection:
        connection.send((name, args))
        if not connection.poll(_TIMEOUT_S):
            raise TimeoutError(f"process {pid} did not answer {name}")
        try:
            ok, value = connection.recv()
        except EOFError:
            raise ConnectionResetError(f"process {pid} ended") from None
    if not ok:
        raise RuntimeError(f"in process {pid}: {value}")
    return value
