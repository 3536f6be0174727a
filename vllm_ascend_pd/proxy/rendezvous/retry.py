# SPDX-License-Identifier: Apache-2.0
"""What may be tried again after an engine failed, and where. Both roles follow the same rules.

Each attempt goes to an engine that has not failed yet. The same one gets another only if there is no other, and only
after a failure that says nothing about it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

from starlette.responses import Response


class Kind(enum.Enum):
    """How an attempt failed; the value is its name in `/health`."""

    UNREACHABLE = "unreachable"
    """No connection: nothing was sent. Engines before it in line were passed over already."""
    LOST = "connection lost"
    """Broken off without a whole answer: the engine died, or was just closing an idle connection."""
    TIMEOUT = "timeout"
    ERROR = "server error"
    """HTTP 5xx, or an error as a stream's first event."""
    GARBAGE = "unusable answer"
    TRANSFER = "transfer failed"
    """The engine answered, but says that the KV did not get through."""
    PREFILL = "prefill failed"
    """Of decode: its prefill was tried as often, and at as many engines, as may be."""
    NO_ENGINE = "no engine"
    """All have been removed, or drain."""
    FULL = "full"
    """No engine had a place in time. It would take another attempt as long."""
    REFUSED = "refused"
    """HTTP 4xx, which another engine would answer too."""


class Failure(NamedTuple):
    """An attempt that failed. `answer`: what the client gets, should its request end by this."""

    kind: Kind
    reason: str
    url: str
    answer: Response
    unquoted: str | None = None
    """`reason` without the engine's own words, which may repeat what a client sent. None: it has none of them."""

    @property
    def for_all(self) -> str:
        """The reason for others than this client."""
        return self.reason if self.unquoted is None else self.unquoted


# A lost connection says little about the engine, and a decode engine to which no KV came is not at fault itself.
PREFILL_AGAIN = frozenset({Kind.LOST})
DECODE_AGAIN = frozenset({Kind.LOST, Kind.TRANSFER})
# A prefill engine that failed like this had the ticket: it may have begun to write, and may still. Until that cannot
# be, decode keeps the blocks from all others, the next attempt at this ticket included. A new request has other ones.
PREFILL_MAY_WRITE = frozenset({Kind.LOST, Kind.TIMEOUT, Kind.ERROR, Kind.GARBAGE, Kind.TRANSFER})
# So a silent one may be asked again then, if it is the only one; and one whose transfer failed, be it for the decode
# engine, or the way there.
PREFILL_AGAIN_ANEW = PREFILL_AGAIN | {Kind.TIMEOUT, Kind.TRANSFER}
# After these there is no other attempt, of prefill or decode: the client gets that answer.
FINAL = frozenset({Kind.REFUSED, Kind.FULL, Kind.PREFILL})
# Failures that are held against an engine when others are served.
DECODE_BLAMED = frozenset({Kind.UNREACHABLE, Kind.LOST, Kind.TIMEOUT, Kind.ERROR, Kind.GARBAGE})
PREFILL_BLAMED = DECODE_BLAMED | {Kind.TRANSFER}


def engines_to_avoid(
    urls: Collection[str], failures: Sequence[Failure], attempts: int, again: frozenset[Kind]
) -> frozenset[str] | None:
    """The engines to leave out of the next attempt, of at most `attempts`; None: there is none."""
    if len(failures) >= attempts or any(failure.kind in FINAL for failure in failures):
        return None
    failed = frozenset(failure.url for failure in failures)
    if not failed >= set(urls):
        return failed
    spoilt = _spoilt(failures, again)
    return spoilt if not spoilt >= set(urls) else None


def may_follow(urls: Collection[str], failures: Sequence[Failure], attempts: int, again: frozenset[Kind]) -> bool:
    """Whether there is an engine for another attempt should the one that is under way, after `failures`, fail in a way
    that says nothing about its own."""
    return len(failures) + 1 < attempts and not _spoilt(failures, again) >= set(urls)


def last_resorts(failures: Sequence[Failure], avoid: frozenset[str], again: frozenset[Kind]) -> list[str]:
    """Of the engines to avoid those that may be asked again if no other can be reached."""
    return sorted({failure.url for failure in failures} & avoid - _spoilt(failures, again))


def _spoilt(failures: Sequence[Failure], again: frozenset[Kind]) -> frozenset[str]:
    """Engines whose failure says that they would fail again."""
    return frozenset(failure.url for failure in failures if failure.kind not in again)


def without(urls: Collection[str], avoid: frozenset[str], rather_not: Collection[str]) -> frozenset[str]:
    """`avoid`, and those of `rather_not` too if that leaves any engine."""
    both = avoid.union(rather_not)
    return avoid if both >= set(urls) else both


def summary(failures: Sequence[Failure]) -> str:
    """The reasons of all attempts in one line."""
    if len(failures) == 1:
        return failures[0].reason
    return "; ".join(f"attempt {number}: {failure.reason}" for number, failure in enumerate(failures, 1))
