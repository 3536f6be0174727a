# SPDX-License-Identifier: Apache-2.0
"""Decides whether a failed attempt is retried, and on which engines. The same rules hold for prefill and decode.

Each retry goes to an engine that has not failed for this request. An engine that failed gets the request again only
if no other engine is left, and only if its failure may have been an accident (the `again` sets).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from starlette.responses import Response

from vllm_ascend_pd.proxy.routing.failure_kind import FailureKind


class Failure(NamedTuple):
    """One failed attempt at an engine."""

    kind: FailureKind
    reason: str
    """May quote the engine's own words, so only this request's client and the log get it."""
    url: str
    """The engine's; empty if none was asked."""
    answer: Response
    """What the client gets if its request ends with this failure."""
    unquoted: str | None = None
    """`reason` without the engine's own words, which may repeat what a client sent. None: `reason` quotes nothing."""

    @property
    def for_all(self) -> str:
        """The reason as everybody may see it, on the status page for instance."""
        return self.reason if self.unquoted is None else self.unquoted


PREFILL_AGAIN = frozenset({FailureKind.LOST})
"""Failures after which the same prefill engine may get the same ticket again."""
DECODE_AGAIN = frozenset({FailureKind.LOST, FailureKind.TRANSFER})
"""Failures after which the same decode engine may get the request again: missing KV is not its fault."""
PREFILL_MAY_WRITE = frozenset(
    {FailureKind.LOST, FailureKind.TIMEOUT, FailureKind.ERROR, FailureKind.GARBAGE, FailureKind.TRANSFER}
)
"""Failures after which the prefill engine may still write KV for the ticket.

Decode keeps the ticket's blocks until those writes are over, and the next attempt at the same ticket has to wait for
that. A new decode request has other blocks and need not wait."""
PREFILL_AGAIN_ANEW = PREFILL_AGAIN | {FailureKind.TIMEOUT, FailureKind.TRANSFER}
"""As `PREFILL_AGAIN`, if the retry is a new decode request. The transfer may have failed because of the earlier decode
engine, or of the network to it."""
_NO_ENGINE_HAD_IT = frozenset({FailureKind.UNREACHABLE, FailureKind.NO_ENGINE})
"""Failures of prefills that no engine got."""
_ENGINE_GONE = _NO_ENGINE_HAD_IT | {FailureKind.LOST, FailureKind.TIMEOUT}
"""Failures after which no prefill engine may be there."""
FINAL = frozenset({FailureKind.REFUSED, FailureKind.FULL, FailureKind.PREFILL, FailureKind.NO_PREFILL})
"""Failures after which neither prefill nor decode is retried: the client gets this answer."""


def engines_to_avoid(
    urls: Collection[str], failures: Sequence[Failure], attempts: int, again: frozenset[FailureKind]
) -> frozenset[str] | None:
    """Returns the engines that the next attempt must not use, or None if there is no next attempt.

    `urls`: all engines that may get requests. `failures`: of all attempts so far. `attempts`: how many are allowed.
    `again`: failures after which the same engine may be used again.
    """
    if len(failures) >= attempts or any(failure.kind in FINAL for failure in failures):
        return None
    failed = frozenset(failure.url for failure in failures)
    if not failed >= set(urls):
        return failed
    unusable = _unusable(failures, again)
    return unusable if not unusable >= set(urls) else None


def lacks_prefill(failures: Sequence[Failure]) -> bool:
    """Whether a prompt's prefills failed because no prefill engine is there, so that decode may compute it instead.

    `failures`: of all its prefills, in order. At most one of them may be of an engine that had the prompt. Otherwise
    the prompt itself may stop engines, and must not get to decode.
    """
    had_it = sum(failure.kind not in _NO_ENGINE_HAD_IT for failure in failures)
    return bool(failures) and failures[-1].kind in _ENGINE_GONE and had_it <= 1


def may_follow(
    urls: Collection[str], failures: Sequence[Failure], attempts: int, again: frozenset[FailureKind]
) -> bool:
    """Whether another attempt could follow the one in flight, if that fails through no fault of its own engine.

    `failures`: of the attempts before the one in flight.
    """
    return len(failures) + 1 < attempts and not _unusable(failures, again) >= set(urls)


def last_resorts(failures: Sequence[Failure], avoid: frozenset[str], again: frozenset[FailureKind]) -> list[str]:
    """Returns the engines of `avoid` that may be used again if no other engine can be reached."""
    return sorted({failure.url for failure in failures} & avoid - _unusable(failures, again))


def _unusable(failures: Sequence[Failure], again: frozenset[FailureKind]) -> frozenset[str]:
    """Engines that would fail again."""
    return frozenset(failure.url for failure in failures if failure.kind not in again)


def without(urls: Collection[str], avoid: frozenset[str], rather_not: Collection[str]) -> frozenset[str]:
    """Returns `avoid`, together with `rather_not` if that leaves any engine."""
    both = avoid.union(rather_not)
    return avoid if both >= set(urls) else both


def summary(failures: Sequence[Failure]) -> str:
    """Returns the reasons of all attempts in one line."""
    if len(failures) == 1:
        return failures[0].reason
    return "; ".join(f"attempt {number}: {failure.reason}" for number, failure in enumerate(failures, 1))
