# SPDX-License-Identifier: Apache-2.0
"""Which bars `benchmarks/ttft.py` prints, and finds missed with --check, from rows as it measures them."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from ttft import Row, bars, misses


def ttft(side: str, of_single: float, prompt: int = 1024, pair: str = "1/1") -> Row:
    return Row("small", pair, side, "ttft", prompt, 7, of_single * 100, 100)


def load(side: str, of_single: float) -> Row:
    return Row("small", "1/1", side, "load", 512, 3, of_single * 20, 20)


@pytest.mark.parametrize(
    ("pair", "prompt", "bar"),
    [
        ("1/1", 128, 1.15),
        ("1/1", 1024, 1.08),
        ("1/1", 4096, 1.08),
        ("2/1", 128, 1.2),
        ("2/1", 1024, 1.15),
        ("2/1", 4096, 1.15),
    ],
)
def test_first_token_against_two_engines_without_a_transfer(pair: str, prompt: int, bar: float) -> None:
    bare = ttft("bare", 1.1, prompt, pair)
    assert not list(misses([ttft("ours", 1.1 * bar - 0.01, prompt, pair), bare], ["ours", "bare"]))
    [miss] = misses([ttft("ours", 1.1 * bar + 0.01, prompt, pair), bare], ["ours", "bare"])
    assert miss.startswith(f"small {pair}, {prompt} tokens: ")
    assert miss.endswith(f"times bare's, not {bar} at most")


def test_slower_than_a_single_instance_is_no_miss() -> None:
    rows = [ttft("ours", 3.0), ttft("bare", 2.9)]
    assert not list(misses(rows, ["ours", "bare"]))


def test_no_bar_for_other_pairs_and_lengths() -> None:
    rows = [ttft("ours", 3.0, 512), ttft("bare", 1.0, 512), ttft("ours", 3.0, pair="2/2"), ttft("bare", 1.0)]
    assert not list(misses(rows, ["ours", "bare"]))


@pytest.mark.parametrize("prompt", [128, 1024, 4096])
def test_ahead_of_every_peer_at_every_length(prompt: int) -> None:
    sides = ["ours", "mooncake"]
    assert not list(misses([ttft("ours", 1.49, prompt), ttft("mooncake", 1.5, prompt)], sides))
    [miss] = misses([ttft("ours", 1.5, prompt), ttft("mooncake", 1.5, prompt)], sides)
    assert miss.endswith("1.00 times mooncake's, not less than 1")


def test_requests_a_second() -> None:
    assert not list(misses([load("ours", 0.9), load("mooncake", 0.9), load("bare", 2.0)], ["mooncake", "bare"]))
    [miss] = misses([load("ours", 0.9), load("mooncake", 1.0)], ["mooncake"])
    assert miss.endswith("0.90 times mooncake's requests/s, not 1 at least")
    [miss] = misses([load("ours", 0.7)], [])
    assert miss.endswith("0.70 times the single instance's requests/s, not 0.75 at least")


def test_a_side_that_did_not_run_shows_no_bar() -> None:
    rows = [ttft("ours", 1.0), Row("small", "1/1", "bare", "failure", failure="it did not start")]
    assert list(misses(rows, ["ours", "bare"])) == ["small 1/1, 1024 tokens: not compared with bare, which did not run"]


def test_bars_that_hold_are_printed_with_their_ratios() -> None:
    rows = [ttft("ours", 1.1, 128), ttft("bare", 1.0, 128), ttft("mooncake", 2.2, 128)]
    assert [str(bar) for bar in bars(rows, ["ours", "bare", "mooncake"])] == [
        "small 1/1, 128 tokens: 1.10 times bare's, 1.15 at most",
        "small 1/1, 128 tokens: 0.50 times mooncake's, less than 1",
    ]
