# SPDX-License-Identifier: Apache-2.0
"""Names the process that listens on a port, for the error of one that cannot.

An engine core whose API server was killed alone goes on, for example, and keeps its ports.
"""

import errno
from contextlib import suppress
from pathlib import Path

from vllm_ascend_pd.core.text import one_line

_PROC = Path("/proc")
_LISTENS = "0A"
_MAX_NAME_CHARS = 32


def held_by(port: int, number: int | None) -> str:
    """Returns how the error of a process that cannot listen on `port` goes on: the process that does, if it is known.

    `number`: the error's. Linux shows only processes of the same user and the same container, unless this one has more
    rights.
    """
    holder = _holder(port) if number == errno.EADDRINUSE else None
    return "" if holder is None else f" by process {holder[0]} ({holder[1]})"


def _holder(port: int) -> tuple[int, str] | None:
    """Returns the id and the name of a process that listens on `port`; None if none is found."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for process in _PROC.iterdir() if sockets else ():
        with suppress(OSError):  # it has ended, or it is another user's
            if process.name.isdigit() and any(str(each.readlink()) in sockets for each in (process / "fd").iterdir()):
                return int(process.name), one_line((process / "comm").read_text(), _MAX_NAME_CHARS)
    return None


def _listening(port: int) -> set[str]:
    """Returns the inodes of sockets that listen on `port`, on any address."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found
