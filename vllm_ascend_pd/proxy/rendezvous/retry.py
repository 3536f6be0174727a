# SPDX-License-Identifier: Apache-2.0
"""Decides whether a failed attempt is retried, and on which engines. The same rules hold for prefill and decode.

Each retry goes to an engine that has not failed for this request. An engine that failed gets the request again only
if no other engine is left, and only if its failure may have been an accident (`Rule.again`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from starlette.responses import Response

from vllm_ascend_pd.proxy.routing.answers import RULES, Asks, FailureKind, Then
from vllm_ascend_pd.proxy.routing.registry import EngineRole


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

    def then(self, role: EngineRole) -> Then:
        """What follows from it, if the engine was one of `role`."""
        return RULES[role, self.kind].then

    @property
    def for_all(self) -> str:
        """The reason as everybody may see it, on the status page for instance."""
        return self.reason if self.unquoted is None else self.unquoted


_RETRIED = (Then.ANEW, Then.ANEW_OR_DECODE)


def engines_to_avoid(
    role: EngineRole, urls: Collection[str], failures: Sequence[Failure], attempts: int
) -> frozenset[str] | None:
    """Returns the engines that the next attempt must not use, or None if there is no next attempt.

    `urls`: all engines of `role` that may get requests. `failures`: of all attempts so far. `attempts`: how many are
    allowed.
    """
    if len(failures) >= attempts or any(failure.then(role) not in _RETRIED for failure in failures):
        return None
    failed = frozenset(failure.url for failure in failures)
    if not failed >= set(urls):
        return failed
    unusable = _unusable(role, failures)
    return unusable if not unusable >= set(urls) else None


def lacks_prefill(failures: Sequence[Failure]) -> bool:
    """Whether a prompt's prefills failed because no prefill engine takes it, so that decode may compute it instead.

    `failures`: of all its prefills, in order. At most one of them may be of an engine that had the prompt. Otherwise
    the prompt itself may stop engines, and must not get to decode.
    """
    had_it = sum(RULES[EngineRole.PREFILL, failure.kind].asks is Asks.NONE for failure in failures)
    last = failures[-1].then(EngineRole.PREFILL) if failures else Then.END
    return last in (Then.DECODE, Then.ANEW_OR_DECODE) and had_it <= 1


def may_follow(role: EngineRole, urls: Collection[str], failures: Sequence[Failure], attempts: int) -> bool:
    """Whether another attempt could follow the one in flight, if that fails through no fault of its own engine.

    `failures`: of the attempts before the one in flight.
    """
    return len(failures) + 1 < attempts and not _unusable(role, failures) >= set(urls)


def last_resorts(role: EngineRole, failures: Sequence[Failure], avoid: frozenset[str]) -> list[str]:
    """Returns the engines of `avoid` that may be used again if no other engine can be reached."""
    return sorted({failure.url for failure in failures} & avoid - _unusable(role, failures))


def _unusable(role: EngineRole, failures: Sequence[Failure]) -> frozenset[str]:
    """Engines that would fail again."""
    return frozenset(failure.url for failure in failures if not RULES[role, failure.kind].again)


def without(urls: Collection[str], avoid: frozenset[str], rather_not: Collection[str]) -> frozenset[str]:
    """Returns `avoid`, together with `rather_not` if that leaves any engine."""
    both = avoid.union(rather_not)
    return avoid if both >= set(urls) else both


def summary(failures: Sequence[Failure]) -> str:
    """Returns the reasons of all attempts in one line."""
    if len(failures) == 1:
        return failures[0].reason
    return "; ".join(f"attempt {number}: {failure.reason}" for number, failure in enumerate(failures, 1))
