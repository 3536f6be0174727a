# SPDX-License-Identifier: Apache-2.0
"""Writes down how many KV blocks requests have, and how many of them those that run."""

import os
import time
from pathlib import Path
from typing import Any


def write_down(folder: Path) -> None:
    """After each pass of the scheduler that changes it, adds a line to a file of this process: monotonic seconds,
    blocks of requests that run, and of all requests."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = Scheduler.schedule
    last = (-1, -1)

    def schedule_and_write(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal last
        output = schedule(self, *args, **kwargs)
        found = [0, 0]
        running = {request.request_id for request in self.running}
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            for request_id, blocks in manager.req_to_blocks.items():
                found[0] += len(blocks) if request_id in running else 0
                found[1] += len(blocks)
        if tuple(found) != last:
            last = (found[0], found[1])
            with (folder / f"{os.getpid()}").open("a") as file:
                file.write(f"{time.monotonic()} {found[0]} {found[1]}\n")
        return output

    Scheduler.schedule = schedule_and_write  # type: ignore[method-assign]
