# SPDX-License-Identifier: Apache-2.0
"""What the tests' servers leave in shared memory when they are killed is removed."""

import os
import sys
from pathlib import Path

from harness.processes import ManagedProcess
from harness.waiting import wait_until

PROGRAM = """
import multiprocessing, time
from multiprocessing.shared_memory import SharedMemory
lock = multiprocessing.get_context("spawn").Lock()
memory = SharedMemory(create=True, size=4096)
print(f"sem.{lock._semlock.name[1:]} {memory.name} END", flush=True)
time.sleep(600)
"""


def test_a_killed_server_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    server = ManagedProcess("server", [sys.executable, "-c", PROGRAM], os.environ, tmp_path / "log")
    try:
        wait_until(lambda: "END" in server.tail() or server.exit_code is not None, 60)
        assert server.exit_code is None, server.account()
        files = [Path("/dev/shm", name) for name in server.tail().split()[:2]]
        assert all(path.exists() for path in files)
    finally:
        server.kill()
    assert not any(path.exists() for path in files)
