# SPDX-License-Identifier: Apache-2.0
"""Checks the ports that an engine will listen on."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_ascend_pd.core.ascend import ascend_ports
from vllm_ascend_pd.tools.doctor.report import Finding, error, ok


class Port(NamedTuple):
    """A port to listen on. `host` is the address, "" for all."""

    number: int
    what: str
    host: str = ""


def check_ports(
    kv_port: int | None,
    engines: int,
    host: str,
    api_port: int | None,
    devices: Sequence[int],
    environment: Mapping[str, str],
) -> list[Finding]:
    """Checks the API server's port, and one port of `host` for each of decode's `engines`.

    kv_port: the first of these ports, None on prefill.
    devices: NPUs, for each of which Mooncake listens on a port of its own.
    """
    ports = [] if api_port is None else [Port(api_port, "the API server")]
    if kv_port is not None:
        ports += [Port(kv_port + i, f"the listener of data-parallel engine {i}", host) for i in range(engines)]
    taken = ascend_ports(devices, environment)
    findings = []
    for number in dict.fromkeys(port.number for port in ports):
        port, *others = [port for port in ports if port.number == number]
        if others:
            found = f"port {number} is used twice, for {port.what} and for {others[0].what}"
            findings.append(error(f"ports.{number}", found, "choose another --port or kv_port"))
        else:
            findings.append(judge_port(port, taken, try_port(port)))
    return findings


def judge_port(port: Port, ascend: Mapping[int, range], problem: int | None) -> Finding:
    """Judges one port.

    ascend: Mooncake's ports by NPU.
    problem: the error number of listening there now, None if it works.
    """
    check = f"ports.{port.number}"
    named = f"port {port.number}{f' of {port.host}' if port.host else ''}, for {port.what},"
    for device, ports in ascend.items():
        if port.number in ports:
            found = f"{named} is one of Mooncake's for NPU {device} ({ports[0]}-{ports[-1]})"
            lowest, highest = min(each[0] for each in ascend.values()), max(each[-1] for each in ascend.values())
            return error(check, found, f"choose a port below {lowest} or above {highest}")
    if problem == errno.EADDRINUSE:
        action = f"stop the process that listens there (ss -ltnp 'sport = :{port.number}'), or choose another port"
        return error(check, f"{named} is in use", action)
    if problem is not None:
        own = problem in (errno.EADDRNOTAVAIL, errno.EINVAL)
        action = "set VLLM_HOST_IP to an address of this host" if own else "choose another port"
        return error(check, f"{named} cannot be used: {os.strerror(problem)}", action)
    return ok(check, f"{named} is free")


def try_port(port: Port) -> int | None:
    """Returns the error number of listening there now, or None if it works."""
    family = socket.AF_INET6 if ":" in port.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT does not count
            listener.bind((port.host, port.number))
            listener.listen(1)
    except OSError as problem:
        return problem.errno or errno.EINVAL
    return None
