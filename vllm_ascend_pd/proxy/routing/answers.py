# SPDX-License-Identifier: Apache-2.0
"""What comes back from an engine: how it is told apart, and what follows from it. No I/O.

`kind_of` reads an HTTP answer that refuses a request. `RULES` has one row for each role and kind: which other engines
are asked, what follows then, and whether it counts against the engine. All of the proxy uses these rows, and
scripts/page_tables.py writes them into docs/proxy.md. `at_fault` decides between the two engines of a failed transfer.
The last functions apply the rows to all failures of a request: whether it is tried again, and at which engines.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from vllm_ascend_pd.core.text import UNREADABLE


class EngineRole(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class FailureKind(enum.Enum):
    """How an attempt failed. The value is its name in `/health`."""

    REFUSED = "refused"
    """The engine says that the request is wrong."""
    LACKS_MODEL = "no such model"
    """The engine has no model or adapter of the request's name."""
    DENIED = "denied"
    """The engine, or a gateway before it, does not take requests like this one, whatever is in them."""
    BUSY = "busy"
    """The engine takes no further request now."""
    UNREACHABLE = "unreachable"
    """No connection could be made, so nothing was sent. The engines before it in the ranking were unreachable too."""
    LOST = "connection lost"
    """The connection closed before the answer was complete. The engine died, or was closing an idle connection."""
    TIMEOUT = "timeout"
    """The engine stayed silent, did not answer a health probe, or computed nothing for too long."""
    ERROR = "server error"
    """The engine answered with HTTP 5xx, or sent an error in a stream."""
    GARBAGE = "unusable answer"
    """The answer is not vLLM's, or is too long."""
    ABORTED = "aborted"
    """Prefill only: the engine ended the request before the prompt was computed."""
    TICKET = "ticket refused"
    """Prefill only: the engine refuses the ticket, or the prompt is not the ticket's. It has sent no KV."""
    TRANSFER = "transfer failed"
    """The KV did not arrive, and the prefill engine is alive: it has answered, or reported the failure itself."""
    INTERRUPTED = "transfer interrupted"
    """Prefill only: the KV did not arrive, and the engine has not answered. It may have died of the prompt."""
    PREFILL = "prefill failed"
    """Decode only: all attempts at its prefill failed, and no further one is allowed."""
    NO_PREFILL = "no prefill engine"
    """Decode only: no prefill engine took its prompt, so decode may be asked to compute that itself."""
    NO_ENGINE = "no engine"
    """All engines have been removed, or drain."""
    FULL = "full"
    """No engine had a free slot in time. Another attempt would wait just as long."""

    @property
    def label(self) -> str:
        """The kind's name in metrics."""
        return self.value.replace(" ", "_")


class Asks(enum.Enum):
    """How many other engines of the role are asked with the same request, and for prefill with the same ticket."""

    NONE = "none"
    """The engine may have begun with it."""
    ONE = "one"
    ALL = "all"
    QUEUE = "all; then it waits"
    """The request waits in the queue until an engine has a free slot."""


class Then(enum.Enum):
    """What follows if none of these engines took the request."""

    END = "the client gets this error"
    DECODE = "decode is asked to compute"
    ANEW = "a new request"
    ANEW_OR_DECODE = "a new request; at last, decode is asked to compute"


class Counts(enum.Enum):
    """Whether a failure counts against the engine."""

    NO = "no"
    YES = "yes"
    IF_TAKEN = "if another takes it"
    """The engine refused what another engine took. A few of these in a row pass it over (`HealthGate.ended`)."""
    IF_IDLE = "if idle, and another takes it"
    IF_OTHERS_DELIVER = "if others deliver"
    """`at_fault` decides which of the transfer's two engines it counts against."""


class Rule(NamedTuple):
    """What follows from one kind of failure at an engine of one role."""

    seen: str
    """What the proxy sees, for docs/proxy.md."""
    asks: Asks
    then: Then
    counts: Counts
    again: bool = False
    """Whether a new request may go to the same engine if no other is left: its failure may have been an accident."""
    outlived: bool = False
    """Whether the prompt has certainly not stopped the engine, so that it may get to others, decode included."""

    @property
    def blames_the_link(self) -> bool:
        """Whether one of a transfer's two engines is at fault, or what is between them, and not the prompt."""
        return self.outlived and self.counts is Counts.IF_OTHERS_DELIVER


_P, _D = EngineRole.PREFILL, EngineRole.DECODE
_NO_ANSWER = "HTTP 2xx without vLLM's answer, or with one that is too long; or HTTP 3xx"

RULES: Mapping[tuple[EngineRole, FailureKind], Rule] = {
    (_P, FailureKind.REFUSED): Rule(
        "HTTP 4xx about the request (400, 413, 422, ...)", Asks.ONE, Then.END, Counts.IF_TAKEN
    ),
    (_P, FailureKind.LACKS_MODEL): Rule("HTTP 404 about the model or adapter", Asks.ALL, Then.DECODE, Counts.NO),
    (_P, FailureKind.DENIED): Rule(
        "HTTP 401, 403, 407, 408, 421 or 425, or an HTML page", Asks.ALL, Then.DECODE, Counts.YES
    ),
    (_P, FailureKind.BUSY): Rule(
        "HTTP 429; or 503 in vLLM's words while `/health` is good; or either as a stream's first event",
        Asks.QUEUE,
        Then.END,
        Counts.IF_IDLE,
    ),
    (_P, FailureKind.UNREACHABLE): Rule("no connection", Asks.ALL, Then.DECODE, Counts.YES),
    (_P, FailureKind.NO_ENGINE): Rule("all drain or are removed", Asks.ALL, Then.DECODE, Counts.NO),
    (_P, FailureKind.FULL): Rule("no free slot in time", Asks.QUEUE, Then.END, Counts.NO),
    (_P, FailureKind.LOST): Rule("connection lost", Asks.NONE, Then.ANEW_OR_DECODE, Counts.YES, again=True),
    (_P, FailureKind.TIMEOUT): Rule("silence", Asks.NONE, Then.ANEW_OR_DECODE, Counts.YES, again=True),
    (_P, FailureKind.ERROR): Rule(
        "other HTTP 5xx, or an error as a stream's first event", Asks.NONE, Then.ANEW, Counts.YES
    ),
    (_P, FailureKind.GARBAGE): Rule(_NO_ANSWER, Asks.NONE, Then.ANEW, Counts.YES),
    (_P, FailureKind.ABORTED): Rule(
        'HTTP 200 with the finish reason "abort"', Asks.NONE, Then.ANEW, Counts.YES, again=True
    ),
    (_P, FailureKind.TICKET): Rule(
        "HTTP 200, and the ticket is refused",
        Asks.NONE,
        Then.ANEW_OR_DECODE,
        Counts.IF_TAKEN,
        again=True,
        outlived=True,
    ),
    (_P, FailureKind.TRANSFER): Rule(
        "HTTP 200 with an error of the transfer; or decode reports one of an engine that is alive",
        Asks.NONE,
        Then.ANEW_OR_DECODE,
        Counts.IF_OTHERS_DELIVER,
        again=True,
        outlived=True,
    ),
    (_P, FailureKind.INTERRUPTED): Rule(
        "decode reports a failed transfer, and the engine is silent",
        Asks.NONE,
        Then.ANEW,
        Counts.IF_OTHERS_DELIVER,
        again=True,
    ),
    (_D, FailureKind.REFUSED): Rule(
        "HTTP 4xx about the request (400, 401, 413, 422, ...)", Asks.ONE, Then.END, Counts.IF_TAKEN
    ),
    (_D, FailureKind.LACKS_MODEL): Rule("HTTP 404 about the model or adapter", Asks.ONE, Then.END, Counts.NO),
    (_D, FailureKind.DENIED): Rule(
        "HTTP 403, 407, 408, 421 or 425, or an HTML page", Asks.ALL, Then.END, Counts.IF_TAKEN
    ),
    (_D, FailureKind.BUSY): Rule(
        "HTTP 429; or 503 in vLLM's words while `/health` is good; or either as a stream's first event",
        Asks.QUEUE,
        Then.END,
        Counts.IF_IDLE,
    ),
    (_D, FailureKind.UNREACHABLE): Rule("no connection", Asks.ALL, Then.ANEW, Counts.YES),
    (_D, FailureKind.NO_ENGINE): Rule("all drain or are removed", Asks.ALL, Then.END, Counts.NO),
    (_D, FailureKind.FULL): Rule("no free slot in time", Asks.QUEUE, Then.END, Counts.NO),
    (_D, FailureKind.LOST): Rule("connection lost", Asks.NONE, Then.ANEW, Counts.YES, again=True),
    (_D, FailureKind.TIMEOUT): Rule("silence", Asks.NONE, Then.ANEW, Counts.YES),
    (_D, FailureKind.ERROR): Rule(
        "other HTTP 5xx, or an error as a stream's first event", Asks.NONE, Then.ANEW, Counts.YES
    ),
    (_D, FailureKind.GARBAGE): Rule(_NO_ANSWER, Asks.NONE, Then.ANEW, Counts.YES),
    (_D, FailureKind.TRANSFER): Rule(
        "the KV did not arrive", Asks.NONE, Then.ANEW, Counts.IF_OTHERS_DELIVER, again=True, outlived=True
    ),
    (_D, FailureKind.PREFILL): Rule("all attempts at its prefill failed", Asks.NONE, Then.END, Counts.NO),
    (_D, FailureKind.NO_PREFILL): Rule(
        "no prefill engine took its prompt", Asks.NONE, Then.DECODE, Counts.NO, again=True
    ),
}
"""One row for each way in which a request to an engine of a role can fail."""

NEVER_THE_REQUEST = frozenset({401, 403, 407, 408, 421, 425})
"""Statuses that tell nothing about a request's content."""


class _Error(msgspec.Struct, frozen=True):
    code: int
    param: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    """vLLM's body of an error."""

    error: _Error


def kind_of(role: EngineRole, status: int, content_type: str | None, body: bytes, well: bool) -> FailureKind | None:
    """Returns how an HTTP answer refuses a request before the engine has begun with it. None: it does not.

    `well`: whether the engine is alive, by its checks. A dead engine's 503 is a failure, not a busy engine's.
    """
    if is_page(content_type):
        return FailureKind.DENIED if status < 500 else None
    if status == 429:
        return FailureKind.BUSY
    if status == 503:
        return FailureKind.BUSY if well and _error(status, body) is not None else None
    if not 400 <= status < 500:
        return None
    if status == 401 and role is EngineRole.DECODE:  # the key is the client's
        return FailureKind.REFUSED
    if status in NEVER_THE_REQUEST:
        return FailureKind.DENIED
    error = _error(status, body) if status == 404 else None
    return FailureKind.LACKS_MODEL if error is not None and error.param == "model" else FailureKind.REFUSED


def is_page(content_type: str | None) -> bool:
    """Whether an answer is a page for people. It comes from a gateway, or from another server at the address."""
    return (content_type or "").lower().startswith("text/html")


class _Completion(msgspec.Struct, frozen=True):
    choices: list[msgspec.Raw] | None = None
    usage: dict[str, msgspec.Raw] | None = None


def is_completion(body: bytes) -> bool:
    """Whether `body` is the JSON of a completion. Those of /v1/responses and /v1/messages have a usage, and no
    choices."""
    try:
        answer = msgspec.json.decode(body, type=_Completion)
    except UNREADABLE:
        return False
    return bool(answer.choices) or (answer.choices is None and answer.usage is not None)


def is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except UNREADABLE:
        return False
    return True


def may_refuse(status: int, content_type: str | None) -> bool:
    """Whether `kind_of` needs the body of such an answer."""
    return 400 <= status < 500 or status == 503 or (is_page(content_type) and status < 500)


def _error(status: int, body: bytes) -> _Error | None:
    """The error in vLLM's form, which repeats the status."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except UNREADABLE:
        return None
    return error if error.code == status else None


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


def at_fault(to_decode: Collection[bool], from_prefill: Collection[bool]) -> EngineRole | None:
    """Returns the role of the engine that a failed transfer counts against; None if that is open.

    The other engines' results decide: the engine that has more success with its other partners is not at fault.
    An engine without other results has nothing to show.

    Args:
        to_decode: for each other prefill engine, whether its last transfer to this decode engine succeeded.
        from_prefill: for each other decode engine, whether the last transfer from this prefill engine succeeded.
    """
    by_others, elsewhere = (sum(each) / len(each) if each else 0.0 for each in (to_decode, from_prefill))
    if by_others == elsewhere:
        return None
    return EngineRole.PREFILL if by_others > elsewhere else EngineRole.DECODE


MAX_UNDELIVERED = 4
"""Attempts of a prompt of which only transfers fail (`Rule.blames_the_link`). Each costs a prefill."""
_RETRIED = (Then.ANEW, Then.ANEW_OR_DECODE)


def are_used_up(role: EngineRole, urls: Collection[str], failures: Sequence[Failure], attempts: int) -> bool:
    """Whether `failures` are as many attempts as are allowed. Arguments: as for `engines_to_avoid`.

    A failed transfer says nothing against the prompt. So further prefill engines are tried, up to `MAX_UNDELIVERED`
    attempts in all, unless retries are off. Decode's attempts are those of the same transfers.
    """
    if attempts > 1 and all(RULES[role, failure.kind].blames_the_link for failure in failures):
        has_untried = role is EngineRole.DECODE or set(urls) - {failure.url for failure in failures}
        attempts = max(attempts, MAX_UNDELIVERED) if has_untried else attempts
    return len(failures) >= attempts


def engines_to_avoid(
    role: EngineRole, urls: Collection[str], failures: Sequence[Failure], attempts: int
) -> frozenset[str] | None:
    """Returns the engines that the next attempt must not use, or None if there is no next attempt.

    Each retry goes to an engine that has not failed for this request. An engine that failed gets the request again only
    if no other engine is left, and only if its failure may have been an accident (`Rule.again`).

    `urls`: all engines of `role` that may get requests. `failures`: of all attempts so far. `attempts`: how many are
    allowed.
    """
    used_up = are_used_up(role, urls, failures, attempts)
    if used_up or any(failure.then(role) not in _RETRIED for failure in failures):
        return None
    failed = frozenset(failure.url for failure in failures)
    if not failed >= set(urls):
        return failed
    unusable = _unusable(role, failures)
    return unusable if not unusable >= set(urls) else None


def lacks_prefill(failures: Sequence[Failure]) -> bool:
    """Whether a prompt's prefills failed because no prefill engine takes it, so that decode may compute it instead.

    `failures`: of all its prefills, in order. At most one of them may be of an engine that had the prompt and may have
    stopped. Otherwise the prompt itself may stop engines, and must not get to decode.
    """
    rules = [RULES[EngineRole.PREFILL, failure.kind] for failure in failures]
    had_it = sum(rule.asks is Asks.NONE and not rule.outlived for rule in rules)
    last = failures[-1].then(EngineRole.PREFILL) if failures else Then.END
    return last in (Then.DECODE, Then.ANEW_OR_DECODE) and had_it <= 1


def last_resorts(role: EngineRole, failures: Sequence[Failure], avoid: frozenset[str]) -> list[str]:
    """Returns the engines of `avoid` that may be used again if no other engine can be reached."""
    return sorted({failure.url for failure in failures} & avoid - _unusable(role, failures))


def _unusable(role: EngineRole, failures: Sequence[Failure]) -> frozenset[str]:
    """Engines that would fail again."""
    return frozenset(failure.url for failure in failures if not RULES[role, failure.kind].again)


def summary(failures: Sequence[Failure]) -> str:
    """Returns the reasons of all attempts in one line."""
    if len(failures) == 1:
        return failures[0].reason
    return "; ".join(f"attempt {number}: {failure.reason}" for number, failure in enumerate(failures, 1))
