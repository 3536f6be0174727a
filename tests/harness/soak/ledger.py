# SPDX-License-Identifier: Apache-2.0
"""Records how every request ended, in a file that a later run continues, and sums it up."""

import dataclasses
import enum
import re
from collections import Counter
from pathlib import Path

import msgspec

from harness.soak.lines import Lines
from harness.soak.samples import Growth


class Outcome(enum.Enum):
    RIGHT = "right"
    ABORTED = "aborted"
    """The client left; what it had got by then was right."""
    FAILED = "failed"
    """An API error, said as one."""
    BROKEN = "broken"
    """An end that is no answer: a connection closed, something that is not the API's."""
    WRONG = "wrong"
    HUNG = "hung"


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """One request that has ended. Times are wall-clock seconds, as in all records."""

    number: int
    outcome: Outcome
    start: float
    end: float
    reason: str = ""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """All processes have started, at the beginning or when a run is resumed."""

    at: float


class Killed(msgspec.Struct, frozen=True, tag="killed"):
    at: float
    server: str
    signal: str


class Back(msgspec.Struct, frozen=True, tag="back"):
    """The killed engine is healthy again."""

    at: float


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """All requests have ended. `leaked_blocks`: KV blocks that an engine still holds for good."""

    at: float
    leaked_blocks: int


Record = Finished | Started | Killed | Back | Drained


class Ledger:
    def __init__(self, path: Path) -> None:
        self._file: Lines[Record] = Lines(path, Record)
        self.records = self._file.items
        self.finished = {record.number: record for record in self.records if isinstance(record, Finished)}

    def add(self, record: Record) -> None:
        self._file.add(record)
        if isinstance(record, Finished):
            self.finished[record.number] = record

    @property
    def restarts(self) -> list[tuple[float, float]]:
        """When an engine was killed, and when it was back; one that never came back because the run was
        interrupted was so until all processes were started again."""
        restarts = []
        killed: float | None = None
        for record in self.records:
            if isinstance(record, Killed):
                killed = record.at
            elif isinstance(record, Back | Started) and killed is not None:
                restarts.append((killed, record.at))
                killed = None
        return restarts if killed is None else [*restarts, (killed, float("inf"))]

    @property
    def completed_restarts(self) -> int:
        return sum(isinstance(record, Back) for record in self.records)

    @property
    def leaked_blocks(self) -> int | None:
        """None until the end was reached."""
        last = self.records[-1] if self.records else None
        return last.leaked_blocks if isinstance(last, Drained) else None

    @property
    def seconds(self) -> float:
        """Seconds in which requests were served, of all runs together."""
        sessions: list[list[float]] = [[]]
        for record in self.records:
            if isinstance(record, Started):
                sessions.append([])
            elif isinstance(record, Finished):
                sessions[-1] += [record.start, record.end]
        return sum(max(times) - min(times) for times in sessions if times)


@dataclasses.dataclass(frozen=True)
class Summary:
    requests: int
    """That were to be asked."""
    outcomes: Counter[Outcome]
    unexplained: int
    """Failed, and not beside a restart."""
    reasons: Counter[str]
    """Of what failed, broke, hung or was wrong."""
    leaked_blocks: int | None
    restarts: int
    retries: int
    requests_per_second: float
    growth: dict[str, Growth]
    """By server, between the first and the last tenth of its longest life."""

    @property
    def passed(self) -> bool:
        none_bad = not any(self.outcomes[bad] for bad in (Outcome.WRONG, Outcome.HUNG, Outcome.BROKEN))
        done = self.outcomes.total() == self.requests and self.restarts > 0
        return none_bad and done and self.unexplained == 0 and self.leaked_blocks == 0

    @property
    def line(self) -> str:
        counts = ", ".join(
            f"{self.outcomes[outcome]:,} {word}"
            for outcome, word in (
                (Outcome.RIGHT, "right"),
                (Outcome.ABORTED, "aborted"),
                (Outcome.FAILED, f"failed cleanly ({self.unexplained} of them not at a restart)"),
                (Outcome.BROKEN, "broken off"),
                (Outcome.WRONG, "wrong"),
                (Outcome.HUNG, "hung"),
            )
        )
        leaked = "not counted yet" if self.leaked_blocks is None else f"{self.leaked_blocks}"
        growth = "; ".join(f"{name} {growth}" for name, growth in self.growth.items())
        return (
            f"{self.outcomes.total():,} of {self.requests:,} requests: {counts}; leaked blocks: {leaked}; "
            f"{self.requests_per_second:.1f} requests/s; {self.restarts} restart(s) of P, {self.retries} retries. "
            f"Growth: {growth}"
        )

    def as_json(self) -> bytes:
        fields = {
            "passed": self.passed,
            "requests": self.requests,
            **{outcome.value: self.outcomes[outcome] for outcome in Outcome},
            "failed_not_at_a_restart": self.unexplained,
            "reasons": dict(self.reasons.most_common()),
            "leaked_blocks": self.leaked_blocks,
            "restarts": self.restarts,
            "retries": self.retries,
            "requests_per_second": round(self.requests_per_second, 2),
            "growth": self.growth,
        }
        return msgspec.json.format(msgspec.json.encode(fields)) + b"\n"


def summarize(ledger: Ledger, requests: int, retries: int, growth: dict[str, Growth]) -> Summary:
    """Sums up the first `requests` requests."""
    finished = [record for record in ledger.finished.values() if record.number < requests]
    bad = [record for record in finished if record.outcome not in (Outcome.RIGHT, Outcome.ABORTED)]
    seconds = ledger.seconds
    return Summary(
        requests=requests,
        outcomes=Counter(record.outcome for record in finished),
        unexplained=sum(record.outcome is Outcome.FAILED and not _at_a_restart(record, ledger) for record in bad),
        reasons=Counter(f"{record.outcome.value}: {_without_ids(record.reason)}" for record in bad),
        leaked_blocks=ledger.leaked_blocks,
        restarts=ledger.completed_restarts,
        retries=retries,
        requests_per_second=len(finished) / seconds if seconds else 0.0,
        growth=growth,
    )


def _at_a_restart(record: Finished, ledger: Ledger) -> bool:
    """Whether a part of the request lay between the engine's end and its return."""
    return any(record.start < back and record.end > killed for killed, back in ledger.restarts)


def _without_ids(reason: str) -> str:
    """Returns a reason without request ids, so that equal reasons count together."""
    return re.sub(r"\b[0-9a-f]{8,}(?:-[0-9a-f]+)*\b", "...", reason)[:300]
