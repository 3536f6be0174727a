# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/preemptions.py` takes for lost time, and which bars it finds missed."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from preemptions import LOST_TIMES, Row, misses, stood_still

ROW = Row("", 8, wrong_length=0, wrong_tokens=0, compared=0.9, failed=0, preemptions=3, lost_s=1.0, round_s=5.0)


@pytest.mark.parametrize(
    ("arrivals", "lost"), [((), 0.0), ((1.0,), 0.0), ((0.0, 1.0, 2.0, 3.0), 0.0), ((0.0, 1.0, 2.0, 3.0, 30.0), 26.0)]
)
def test_long_pauses_are_lost_time(arrivals: tuple[float, ...], lost: float) -> None:
    assert stood_still(arrivals) == lost


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (ROW, 0),
        (replace(ROW, lost_s=LOST_TIMES), 0),
        (replace(ROW, lost_s=LOST_TIMES + 0.01), 1),
        (replace(ROW, wrong_tokens=1), 1),
        (replace(ROW, wrong_length=1), 1),
        (replace(ROW, failed=1, lost_s=9.0), 2),
    ],
)
def test_bars(ours: Row, missed: int) -> None:
    assert len(list(misses([ours, replace(ROW, wrong_tokens=8)]))) == missed
