# SPDX-License-Identifier: Apache-2.0
"""TCP ports that no two users of this module get at the same time, in whatever process they are.

Asking the kernel for a free port and closing it again leaves a gap in which another process may take it. Here a
port belongs to the process that holds the abstract Unix socket of its number: the kernel allows one holder in a
network namespace, and lets go when the process ends, however that happens. Ports come from below the range from
which the kernel serves outgoing connections, so those do not take them either.
"""

import random
import socket

FIRST, LAST = 21000, 32000

_held: dict[int, socket.socket] = {}


def reserve_port(first: int = FIRST, last: int = LAST) -> int:
    """Return a free port of `[first, last)`, held until `release_port` or the end of this process."""
    for port in random.SystemRandom().sample(range(first, last), last - first):
        if _hold(port):
            return port
    raise RuntimeError(f"no free TCP port in [{first}, {last})")


def reserve_ports(count: int) -> range:
    """As `reserve_port`, `count` ports in a row."""
    while True:
        start = reserve_port(FIRST, LAST - count + 1)
        wanted = range(start, start + count)
        held = [start, *(port for port in wanted[1:] if _hold(port))]
        if len(held) == count:
            return wanted
        for port in held:
            release_port(port)


def release_port(port: int) -> None:
    _held.pop(port).close()


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT does not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _hold(port: int) -> bool:
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0vllm-ascend-pd-port-{port}")
    except OSError:
        holder.close()
        return False
    if not is_free(port):
        holder.close()
        return False
    _held[port] = holder
    return True
