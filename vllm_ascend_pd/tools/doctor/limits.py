# SPDX-License-Identifier: Apache-2.0
"""Checks the limits of this user's processes. Engines inherit the limits of the shell that starts them."""

from __future__ import annotations

import os
import resource

from vllm_ascend_pd.tools.doctor.finding import Finding, ok, warning
from vllm_ascend_pd.transport.socket_limiter import FILES_WANTED, connections_for

SHM = "/dev/shm"
SHM_BYTES = 256 << 20
"""vLLM (shm_broadcast.py) allocates 10 chunks of 24 MiB there for each engine with several ranks. Docker's default is
64 MiB."""

_MIB = 1 << 20


def check(protocol: str) -> list[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    findings = [judge_files(_limit(files)), judge_memlock(_limit(locked), protocol)]
    try:
        shm = os.statvfs(SHM)
    except OSError as problem:
        action = "mount a tmpfs there: vLLM's ranks share memory through it"
        return [*findings, warning("limits.shm", f"{SHM}: {problem.strerror}", action)]
    return [*findings, judge_shm(shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize)]


def judge_files(soft: int | None) -> Finding:
    """`soft` is the number of files that a process may open, None for no limit."""
    check = "limits.open-files"
    connections = connections_for(soft)
    if soft is None or soft >= FILES_WANTED:
        files = "any number of" if soft is None else soft
        found = f"a process may open {files} files: each listener takes {connections} connections"
        return ok(check, found, connections=connections)
    found = f"a process may open {soft} files: each listener takes {connections} connections, a quarter of that"
    action = f"ulimit -n {FILES_WANTED} before engines start (LimitNOFILE of a unit, --ulimit nofile of a container)"
    return warning(check, found, action, files=soft, connections=connections)


def judge_memlock(nbytes: int | None, protocol: str) -> Finding:
    """`nbytes` is the memory that a process may lock, None for no limit. Only RDMA from host memory locks memory."""
    check = "limits.memlock"
    size = "any number of bytes" if nbytes is None else f"{nbytes >> 10} KiB"
    if protocol == "rdma" and nbytes is not None:
        action = "ulimit -l unlimited before engines start (LimitMEMLOCK of a unit, --ulimit memlock=-1 of a container)"
        return warning(
            check, f"a process may lock {size}, but registering KV caches for RDMA locks all of them", action
        )
    return ok(check, f"a process may lock {size}" + ("" if protocol == "rdma" else f", and {protocol} locks none"))


def judge_shm(total: int, free: int) -> Finding:
    check = "limits.shm"
    found = f"{SHM}: {free // _MIB} of {total // _MIB} MiB free"
    if free >= SHM_BYTES:
        return ok(check, found, total_bytes=total, free_bytes=free)
    action = (
        f"an engine with several ranks takes {SHM_BYTES // _MIB} MiB: give its container --ipc=host or --shm-size; "
        "remove the files of dead processes there"
    )
    return warning(check, found, action, total_bytes=total, free_bytes=free)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value
