# SPDX-License-Identifier: Apache-2.0
"""Measures what the processes of a server hold: threads, sockets, other files and memory."""

import contextlib
import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from harness import remote
from harness.engines import Server

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Level:
    """What one server holds. `threads`: of all its processes, by name if Python knows it; `memory`: resident bytes."""

    processes: int
    threads: Counter[str]
    sockets: dict[str, str]
    """Of each, between which addresses it is, by what it is called in /proc."""
    files: int
    memory: int

    def above(self, before: "Level") -> dict[str, int]:
        """Returns what has grown since then, apart from memory."""
        grown = {
            "processes": self.processes - before.processes,
            "sockets": len(self.sockets) - len(before.sockets),
            "files": self.files - before.files,
        }
        grown |= {f"thread {name}": count for name, count in (self.threads - before.threads).items()}
        return {what: count for what, count in grown.items() if count > 0}

    def new_sockets(self, before: "Level") -> list[str]:
        return sorted(text for name, text in self.sockets.items() if name not in before.sockets)


def measure(server: Server, control: Path) -> Level:
    threads: Counter[str] = Counter()
    files = memory = 0
    sockets: dict[str, str] = {}
    members = server.process.members()
    for pid in members:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            process = psutil.Process(pid)
            memory += process.memory_info().rss
            count = process.num_threads()
            names = _names(control, pid)
            threads.update(names)
            threads["native"] += count - len(names)
            ends = {c.fd: f"{c.status} {_text(c.laddr)} to {_text(c.raddr)}" for c in process.net_connections("all")}
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if (target := os.readlink(fd)).startswith("socket:"):
                        sockets[f"{pid} {fd.name} {target}"] = f"{pid}: {ends.get(int(fd.name), 'unknown')}"
                    else:
                        files += 1
    return Level(len(members), threads, sockets, files, memory)


def _text(address: Any) -> str:
    return f"port {address.port}" if hasattr(address, "port") else str(address)


def _names(control: Path, pid: int) -> list[str]:
    """Returns the names of the threads that Python started, without numbers."""
    try:
        names = remote.call(control, pid, "threads")
    except OSError:  # not a process of vLLM's
        return []
    return [name.rstrip("0123456789") for name in names]
