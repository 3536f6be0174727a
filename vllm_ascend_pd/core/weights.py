# SPDX-License-Identifier: Apache-2.0
"""What is known of a model's weights, and of their updates. Engines compare it (R8)."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

UNKNOWN = "unknown"
"""Instead of the fingerprint of files: weights that are not in files that can be read here."""

_UPDATES_BYTES = 8


@dataclass(frozen=True)
class Weights:
    """What is known of a model's weights at one moment."""

    # Rises with every change, so between two equal versions nothing has changed.
    version: int = 0
    # The fingerprint of the files that they were loaded from, or UNKNOWN. Then, behind a "+", a digest of the updates
    # since, if there were any. `are_alike` compares it.
    fingerprint: str = UNKNOWN
    # Whether they are being changed, so that some are new and some old.
    loading: bool = False


NOTHING_KNOWN = Weights()


def are_alike(one: str, other: str) -> bool:
    """Whether two engines' weights may be the same, as far as both know. By `Weights.fingerprint`, "" if one does not
    say."""
    if not one or not other:
        return True
    files, _, updates = one.partition("+")
    other_files, _, other_updates = other.partition("+")
    return updates == other_updates and (files == other_files or UNKNOWN in (files, other_files))


class LoadedWeights:
    """Records the weights of one model. The model thread calls all methods. Any thread may read `current`."""

    def __init__(self, files: str = UNKNOWN) -> None:
        """`files`: fingerprint of the files that they were loaded from."""
        self._files = files
        # Names of the updates since, in order, as a digest.
        self._updates = b""
        # The model thread replaces it as a whole, so any thread may read it without a lock.
        self.current = Weights(0, files)

    @contextmanager
    def changing(self, update: str, files: Callable[[], str] | None = None) -> Iterator[None]:
        """The weights change meanwhile, even if an error ends it.

        `update`: its name, such as "update_weights". Engines with the same updates in the same order count as equal.
        `files`: returns the fingerprint of the files that hold all weights now. None: no files do.
        """
        if self.current.loading:  # a part of an update that is recorded as a whole
            yield
            return
        self._publish(loading=True)
        known = ""
        try:
            yield
            known = files() if files is not None else ""
        finally:
            if known and known != UNKNOWN:
                self._files, self._updates = known, b""
            else:
                hashed = hashlib.blake2b(self._updates + update.encode(), digest_size=_UPDATES_BYTES)
                self._updates = hashed.digest()
            self._publish(loading=False)

    def _publish(self, loading: bool) -> None:
        updates = f"+{self._updates.hex()}" if self._updates else ""
        self.current = Weights(self.current.version + 1, self._files + updates, loading)


class WeightUpdates:
    """Counts how often a rank's weights have changed since it started to serve. The model thread calls all methods."""

    def __init__(self, rank: str, loaded: LoadedWeights) -> None:
        self._rank = rank
        self._loaded = loaded
        self._at_start = loaded.current.version
        self._reported = 0

    def take_news(self) -> dict[str, int]:
        """Returns {rank: number of updates}, once for each number; else {}."""
        count = self._count()
        if count == self._reported:
            return {}
        self._reported = count
        return {self._rank: count}

    def are_unknown_to(self, known: dict[str, int]) -> bool:
        """Returns whether the scheduler made a step without knowing the latest update. `known`: as in the step."""
        return known.get(self._rank, 0) != self._count()

    def _count(self) -> int:
        return self._loaded.current.version - self._at_start
