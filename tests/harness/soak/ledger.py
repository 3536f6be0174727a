# SPDX-License-Identifier: Apache-2.0
"""How every request ended, and the sum of it."""

import dataclasses
import enum
import re
from collections import Counter

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


@dataclasses.dataclass(frozen=True)
class Finished:
    """One request that has ended. Times are wall-clock seconds."""

    outcome: Outcome
    start: float
    end: float
    reason: str = ""


@dataclasses.dataclass
class Ledger:
    finished: list[Finished] = dataclasses.field(default_factory=list)
    killed: float = float("inf")
    """When the engine was killed, and when it was healthy again."""
    back: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Summary:
    outcomes: Counter[Outcome]
    unexplained: int
    """Failed, and not beside the restart."""
    reasons: Counter[str]
    """Of what failed, broke, hung or was wrong."""
    leaked_blocks: int
    """KV blocks that an engine still holds for good."""
    counted: dict[str, int]
    """What the proxy and decode have counted."""
    requests_per_second: float
    growth: dict[str, Growth]
    """By server, between the first and the last tenth of its longest life."""

    def __str__(self) -> str:
        counts = ", ".join(
            f"{self.outcomes[outcome]:,} {word}"
            for outcome, word in (
                (Outcome.RIGHT, "right"),
                (Outcome.ABORTED, "aborted"),
                (Outcome.FAILED, f"failed cleanly ({self.unexplained} of them not at the restart)"),
                (Outcome.BROKEN, "broken off"),
                (Outcome.WRONG, "wrong"),
                (Outcome.HUNG, "hung"),
            )
        )
        growth = "; ".join(f"{name} {growth}" for name, growth in self.growth.items())
        counted = ", ".join(f"{count:,} {what}" for what, count in self.counted.items())
        return (
            f"{self.outcomes.total():,} requests: {counts}; leaked blocks: {self.leaked_blocks}; "
            f"{self.requests_per_second:.1f} requests/s; {counted}. Growth: {growth}"
            + "".join(f"\n  {count:,} x {reason}" for reason, count in self.reasons.most_common())
        )


def summarize(ledger: Ledger, leaked_blocks: int, counted: dict[str, int], growth: dict[str, Growth]) -> Summary:
    finished = ledger.finished
    bad = [each for each in finished if each.outcome not in (Outcome.RIGHT, Outcome.ABORTED)]
    seconds = max(each.end for each in finished) - min(each.start for each in finished)
    return Summary(
        outcomes=Counter(each.outcome for each in finished),
        unexplained=sum(
            each.outcome is Outcome.FAILED and not (each.start < ledger.back and each.end > ledger.killed)
            for each in bad
        ),
        reasons=Counter(f"{each.outcome.value}: {_without_ids(each.reason)}" for each in bad),
        leaked_blocks=leaked_blocks,
        counted=counted,
        requests_per_second=len(finished) / seconds,
        growth=growth,
    )


def _without_ids(reason: str) -> str:
    """Returns a reason without request ids, so that equal reasons count together."""
    return re.sub(r"\b[0-9a-f]{8,}(?:-[0-9a-f]+)*\b", "...", reason)[:300]
