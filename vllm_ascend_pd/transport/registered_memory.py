# SPDX-License-Identifier: Apache-2.0
"""The memory that an engine has registered with Mooncake."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from vllm_ascend_pd.core.regions import Region, covered, merge, refusal
from vllm_ascend_pd.transport.existing_engine import ExistingEngine


class RegistrationError(Exception):
    """Memory could not be registered or unregistered."""


class RegisteredMemory:
    """Only registered memory can be written to by peers, and written from. Any thread may call it."""

    def __init__(self, mooncake: Any, chip: str | None, shared: ExistingEngine | None) -> None:
        """
        `mooncake`: Mooncake's engine.
        `chip`: as in `regions.refusal`. None: no limits of NPUs apply.
        `shared`: set if other connectors of this process use `mooncake`, too.
        """
        self._mooncake = mooncake
        self._chip = chip
        self._shared = shared
        self._lock = threading.Lock()
        # The two below change under the lock.
        # All registered regions, whoever registered them. Sorted and disjoint.
        self._known: list[Region] = []
        # Addresses of those that `close` unregisters.
        self._own: list[int] = []

    def add(self, regions: Sequence[Region], of_caches: bool) -> None:
        """Registers all of `regions` or none. Raises RegistrationError.

        `of_caches`: other connectors of this process register the same memory, the KV caches.
        """
        with self._lock:
            fresh = [region for region in merge(regions) if not covered(region, self._known)]
            for address, size in fresh:
                if any(address < begin + length and begin < address + size for begin, length in self._known):
                    raise RegistrationError(
                        f"region {address:#x}+{size} overlaps a registered one: register both in one call"
                    )
            if not fresh:
                return
            together = sorted(self._known + fresh)
            if self._chip is not None and (reason := refusal(together, self._chip)) is not None:
                raise RegistrationError(f"memory cannot be registered: {reason}")
            if self._shared is not None and of_caches:
                self._register_for_all(self._shared, fresh)
            else:
                self._register(fresh)
            self._known = together

    def close(self) -> None:
        """Unregisters the regions that only this engine uses. Raises RegistrationError."""
        with self._lock:
            own, self._own, self._known = self._own, [], []
            mooncake, self._mooncake = self._mooncake, None
        code = mooncake.batch_unregister_memory(own) if own else 0
        if code != 0:
            raise RegistrationError(f"Mooncake did not unregister its memory (code {code})")

    def _register(self, regions: Sequence[Region]) -> None:
        addresses = [address for address, _ in regions]
        code = self._mooncake.batch_register_memory(addresses, [size for _, size in regions])
        if code != 0:
            self._mooncake.batch_unregister_memory(addresses)
            raise RegistrationError(f"{_not_registered(regions)} (code {code})")
        self._own += addresses

    def _register_for_all(self, shared: ExistingEngine, regions: Sequence[Region]) -> None:
        try:
            shared.register_caches(regions)
        except RuntimeError as error:
            raise RegistrationError(f"{_not_registered(regions)}: {error}") from error


def _not_registered(regions: Sequence[Region]) -> str:
    return f"Mooncake did not register {len(regions)} regions of {sum(size for _, size in regions)} bytes"
