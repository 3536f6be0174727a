# SPDX-License-Identifier: Apache-2.0
"""Host names and their addresses. A name server that does not answer for one name delays no other one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from vllm_ascend_pd.core.threads import owned

_FRESH_SECONDS = 5.0
"""After so long an answer is asked for again: Kubernetes' own records live 5 s to 30 s."""


class HostNames:
    """Looks names up, one lookup per name at a time, each on a thread of its own.

    A lookup cannot be cancelled, and takes a minute and more if no name server answers. The threads of a pool, such as
    asyncio's and uvloop's own, would soon all wait for one name. The event loop's thread owns it.
    """

    def __init__(self) -> None:
        self._lookups: dict[str, asyncio.Future[list[str]]] = {}
        """Those under way, by name."""
        self._answers: dict[str, list[str]] = {}
        """The last addresses of each name."""
        self._fresh_until: dict[str, float] = {}
        """Until when a name in `_answers` is not looked up again, on `time.monotonic`'s clock."""

    @owned
    async def addresses(self, name: str) -> list[str]:
        """Returns the last known addresses at once, and looks an old answer up again meanwhile. Of an unknown name it
        does what `look_up` does."""
        known = self._answers.get(name)
        if known is None:
            return await self.look_up(name)
        if time.monotonic() >= self._fresh_until[name]:
            self._lookup(name)
        return known

    @owned
    async def look_up(self, name: str) -> list[str]:
        """Waits for a lookup, for the one under way if there is one. Raises OSError, or UnicodeError for an invalid
        name. The lookup goes on if the caller is cancelled."""
        return await asyncio.shield(self._lookup(name))

    def _lookup(self, name: str) -> asyncio.Future[list[str]]:
        under_way = self._lookups.get(name)
        if under_way is None:
            loop = asyncio.get_running_loop()
            under_way = loop.create_future()
            answered = partial(self._answered, name)
            threading.Thread(target=_ask, args=(name, loop, answered), name="pd-lookup", daemon=True).start()
            self._lookups[name] = under_way
        return under_way

    def _answered(self, name: str, found: list[str] | Exception) -> None:
        lookup = self._lookups.pop(name)
        self._fresh_until[name] = time.monotonic() + _FRESH_SECONDS
        if not isinstance(found, Exception):
            self._answers[name] = found
            lookup.set_result(found)
            return
        if not (isinstance(found, socket.gaierror) and found.errno == socket.EAI_AGAIN):
            self._answers.pop(name, None)  # the name has no address any more
        lookup.set_exception(found)
        lookup.exception()  # nobody may wait for it


def _ask(name: str, loop: asyncio.AbstractEventLoop, answered: Callable[[list[str] | Exception], object]) -> None:
    found: list[str] | Exception
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        found = list(dict.fromkeys(str(address[0]) for _, _, _, _, address in infos))
    except (OSError, UnicodeError) as error:
        found = error
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(answered, found)
