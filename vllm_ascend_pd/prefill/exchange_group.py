# SPDX-License-Identifier: Apache-2.0
"""A group of prefill ranks that exchange KV heads. Once it has failed, it stays broken (R9).

The side stream runs the collectives. Any thread may report that this rank misses one.
"""

import logging
import threading
from collections.abc import Callable

from vllm_ascend_pd.device.base import DeviceError, Group

logger = logging.getLogger(__name__)


class ExchangeGroup:
    """Runs collectives in one process group until one of them fails here, or is missed here.

    Then nobody knows what the other ranks have exchanged, and a later collective could deliver the bytes of another
    layer or request (R5). So this rank runs no more of them. It closes its connections, and the other ranks' next
    collective fails, too: at once over Gloo, within `collective_timeout_s` over HCCL. No rank ever joins again.
    """

    def __init__(self, ranks: tuple[int, ...], group: Group) -> None:
        """`ranks`: the tensor-parallel ranks in `group`, for messages. The group keeps its connections for as long as
        it is referenced: over Gloo by this object alone, over HCCL by torch's own table, too."""
        self._ranks = ranks
        # Written under `_lock`, read without: a collective that runs when another thread breaks the group ends first.
        self._group: Group | None = group
        # Written once, under `_lock`. Any thread reads it. Clients get to read it: it names no addresses.
        self._failure: str | None = None
        self._lock = threading.Lock()

    @property
    def failure(self) -> str | None:
        """Why the group is broken; None while it works."""
        return self._failure

    def run(self, collective: Callable[[Group], None]) -> None:
        """Runs the next collective. The side stream calls it.

        Raises `DeviceError` at once if the group is broken, or if the collective fails, which breaks the group.
        """
        group = self._group
        if group is None:
            raise self._error()
        try:
            collective(group)
        except Exception as error:
            self.fail("an all-to-all failed (see the prefill engine's log)", error)
            raise self._error() from error
        except BaseException as error:
            self.fail("an all-to-all was interrupted", error)
            raise

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Breaks the group for good, because a collective failed on this rank, or this rank missed one. Any thread may
        call it.

        `cause`: for the log; its text may name addresses.
        """
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
            self._group = None
        logger.error(
            "Restart this prefill engine: %s%s",
            self._error(),
            "" if cause is None else f": {type(cause).__name__}: {cause}",
        )

    def close(self) -> None:
        """Closes this rank's connections, because the worker shuts down."""
        with self._lock:
            self._failure = self._failure or "the prefill engine shuts down"
            self._group = None

    def _error(self) -> DeviceError:
        return DeviceError(
            f"tensor-parallel ranks {self._ranks} exchange no KV heads until this prefill engine is restarted: "
            f"{self._failure}"
        )
