# SPDX-License-Identifier: Apache-2.0
"""asyncio tasks of which the first error is the caller's, by itself: `asyncio.TaskGroup` raises groups."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to their end. At the first error the others are cancelled, and it is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
