# SPDX-License-Identifier: Apache-2.0
"""What an engine does for others while it is attacked, and what the attack costs it (tests/harness/attacks.py).

$ python benchmarks/attacks.py [--quick] [--rows WORD ...] [--write] [--check] [--json]

Each row attacks a real listener, client or rank in a process of its own, and then a sink beside it that takes the same
bytes: the control. Honest requests follow each other before, during and after the attack. All must end well.

honest   the median honest request before, during and after the attack, and during the control, in milliseconds
memory   how much more the attacked process took at most than before, above what it took in the control
CPU      of the attacked thread, for each message
lock     the longest that the scheduler's or the model's thread waited for a lock of the attacked thread. It waits for
         the interpreter, too, which other threads have for some milliseconds each. In the control, nobody has the lock

With --check, exits with 1 if a row takes more than MAX_GROWN_MIB or its lock wait is longer than MAX_LOCK_MS.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from helpers.report import ROOT, options, show

from harness.attacked import Outcome, Subject, outcome, subject_of
from harness.attacks import ROWS, Row
from vllm_ascend_pd.transport.secret_files import new_secret, write_new

MAX_GROWN_MIB, MAX_LOCK_MS = 64.0, 5.0
ROUNDS, QUICK_ROUNDS = 5, 3
MIB = 1 << 20


@dataclass(frozen=True)
class Result:
    row_name: str
    who: str
    secret: bool
    sent: int
    before_ms: float
    during_ms: float
    longest_ms: float
    after_ms: float
    control_ms: float
    grown_mib: float
    cpu_ms: float
    lock_ms: float
    control_lock_ms: float
    measure: str = "attack"

    @property
    def holds(self) -> bool:
        return self.grown_mib <= MAX_GROWN_MIB and self.lock_ms <= MAX_LOCK_MS

    @property
    def case(self) -> str:
        secret = "" if self.secret else "; the engine has no secret"
        return f"{self.row_name}, with {self.who}{secret}"

    def row(self) -> str:
        return (
            f"{self.case:<84}{self.sent:>6}{self.before_ms:>8.1f}{self.during_ms:>8.1f}{self.longest_ms:>8.1f}"
            f"{self.after_ms:>8.1f}{self.control_ms:>9.1f}{self.grown_mib:>8.1f}{self.cpu_ms:>9.2f}{self.lock_ms:>7.2f}"
        )


HEADER = (
    f"{'':<90}{'honest request, ms':>32}{'':>9}{'MiB':>8}{'CPU ms':>9}{'ms':>7}\n"
    f"{'attack':<84}{'sent':>6}{'before':>8}{'during':>8}{'longest':>8}{'after':>8}{'control':>9}{'memory':>8}"
    f"{'/message':>9}{'lock':>7}"
)


def measure(row: Row, subject: Subject, secret_file: str, rounds: int) -> Result:
    found: Outcome = outcome(row, subject, secret_file, rounds)
    control = outcome(row, subject, secret_file, rounds, sink=True)
    if found.errors:
        raise RuntimeError(f"{row.name}: {found.errors[0]}")

    def ms(seconds: list[float]) -> float:
        return median(seconds) * 1000

    return Result(
        row.name,
        row.who,
        row.engine_has_secret,
        found.sent,
        ms(found.before_s),
        ms(found.during_s),
        max(found.during_s) * 1000,
        ms(found.after_s),
        ms(control.during_s),
        (found.grown - control.grown) / MIB,
        found.cpu_s / max(1, found.sent) * 1000,
        found.lock_s * 1000,
        control.lock_s * 1000,
    )


def measured(words: list[str], rounds: int) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        secret_file = str(Path(folder) / "secret")
        write_new(secret_file, new_secret())
        for row in ROWS:
            if not words or any(word in f"{row.name}, with {row.who}" for word in words):
                subject = subject_of(row, secret_file)
                try:
                    yield measure(row, subject, secret_file, rounds)
                finally:
                    subject.close()


def results(found: list[Result]) -> dict[str, Any]:
    """For benchmarks/results, from which docs/performance.md has its rows."""
    today = datetime.now(tz=UTC).date().isoformat()
    most = max(found, key=lambda each: each.grown_mib)
    longest = max(found, key=lambda each: each.lock_ms)
    slowest = max(found, key=lambda each: each.longest_ms)
    latest = [
        (
            f"memory above the control's, {len(found)} attacks",
            f"{most.grown_mib:.0f} MiB ({most.case})",
            f"{MAX_GROWN_MIB:.0f} MiB",
            most.grown_mib <= MAX_GROWN_MIB,
        ),
        (
            "longest wait of the scheduler for a lock",
            f"{longest.lock_ms:.2f} ms ({longest.case})",
            f"{MAX_LOCK_MS:.0f} ms",
            longest.lock_ms <= MAX_LOCK_MS,
        ),
        ("slowest honest request meanwhile", f"{slowest.longest_ms:.0f} ms ({slowest.case})", "", None),
    ]
    columns = {
        "case": "",
        "sent": "messages",
        "before_ms": "honest request, ms",
        "during_ms": "during",
        "longest_ms": "longest",
        "after_ms": "after",
        "control_ms": "control",
        "grown_mib": "memory, MiB",
        "cpu_ms": "CPU of a message, ms",
        "lock_ms": "lock, ms",
        "control_lock_ms": "control",
        "holds": "",
    }
    rows = [
        {
            name: round(value, 2) if isinstance(value, float) else value
            for name, value in {**asdict(each), "case": each.case, "holds": each.holds}.items()
            if name in columns
        }
        for each in found
    ]
    machine = f"{os.cpu_count()} virtual cores, load average {os.getloadavg()[0]:.1f} at the end"
    return {
        "question": "What can an attacker cost an engine?",
        "latest": [
            {"date": today, "case": case, "figure": figure, "bar": bar, "state": state}
            for case, figure, bar, state in latest
        ],
        "tables": {
            "all": {
                "date": today,
                "machine": machine,
                "command": "python benchmarks/attacks.py",
                "columns": columns,
                "rows": rows,
            }
        },
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer honest requests")
    parser.add_argument("--rows", nargs="*", default=[], help="those whose names contain one of these words")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/attacks.json")
    args: argparse.Namespace = parser.parse_args()
    if args.write and (args.rows or args.quick):
        parser.error("--write needs all rows, in their long form")
    found: list[Result] = []

    def kept() -> Iterator[Result]:
        for result in measured(args.rows, QUICK_ROUNDS if args.quick else ROUNDS):
            found.append(result)
            yield result

    status = show(kept(), HEADER, args)
    if args.write:
        (ROOT / "benchmarks" / "results" / "attacks.json").write_text(json.dumps(results(found), indent=2) + "\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
