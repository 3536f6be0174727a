# SPDX-License-Identifier: Apache-2.0
"""What decode's patch of vLLM's scheduler costs a step while many requests wait.

$ python benchmarks/waiting.py [--requests 1 1000] [--steps 200] [--check] [--json]
$ PYTHONPATH=.venv/vllm-0.23 python benchmarks/waiting.py ...

vLLM's own scheduler with decode's connector, which answers None for each request: "ask again in the next step". So
each step looks at all of them. CPU time of the scheduler's thread in `schedule()`, in milliseconds: with the patch and
without it, by turns. Each is the first quartile of its steps. With --check, exits with 1 if the patch adds more than
BAR_MS.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.report import options, quartiles, show

os.environ |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import vllm

from harness.engines import Role
from harness.models import TINY, make_model
from harness.real_scheduler import RealScheduler
from vllm_ascend_pd.connector import patches

BAR_MS = 0.5
PROMPT = 300
"""Tokens."""


@dataclass(frozen=True)
class Result:
    vllm: str
    requests: int
    without: float
    with_patch: float

    @property
    def holds(self) -> bool:
        return self.with_patch - self.without <= BAR_MS

    def row(self) -> str:
        added = self.with_patch - self.without
        return f"{self.vllm:>8} {self.requests:9} {self.without:10.2f} {self.with_patch:10.2f} {added:10.2f}"


def measured(model: Path, requests: int, steps: int) -> Result:
    """`steps`: of each side."""
    scheduler = RealScheduler(Role.DECODE, model, blocks=400)
    try:
        scheduler.connector.get_num_new_matched_tokens = lambda request, num_computed_tokens: (None, False)
        for index in range(requests):
            scheduler.add(f"r{index}", [(index * 7919 + place) % 400 for place in range(PROMPT)])
        sides = {
            True: {place: getattr(*place[:2]) for place in patches._replaced},
            False: dict(patches._replaced),
        }
        took: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * steps):
            patched = turn % 2 == 0
            for (owner, name, _), method in sides[patched].items():
                setattr(owner, name, method)
            began = time.thread_time()
            step = scheduler.schedule()
            took[patched].append(1e3 * (time.thread_time() - began))
            assert not step.num_scheduled_tokens
            scheduler.end(step)
        return Result(vllm.__version__, requests, quartiles(took[False])[0], quartiles(took[True])[0])
    finally:
        scheduler.close()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 1000])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    def results() -> Iterator[Result]:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(TINY, Path(folder))
            for requests in args.requests:
                yield measured(model, requests, args.steps)

    header = f"{'':18}    without       with   patch\n{'vLLM':>8} {'requests':>9} {'ms':>10} {'ms':>10} {'adds ms':>10}"
    sys.exit(show(results(), header, args))


if __name__ == "__main__":
    main()
