# SPDX-License-Identifier: Apache-2.0
"""Shows on standard error the steps that take more than a second."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from rich.console import Console

QUIET_S = 1.0


class Progress:
    """On a terminal, shows a temporary progress line. Elsewhere, prints a line for each long step."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False)

    @asynccontextmanager
    async def step(self, what: str) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._show, what)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def _show(self, what: str) -> None:
        await anyio.sleep(QUIET_S)
        if not self._console.is_terminal:
            print(f"{what} ...", file=sys.stderr, flush=True)
            return
        with self._console.status(f"{what} ..."):
            await anyio.sleep_forever()
