# SPDX-License-Identifier: Apache-2.0
"""The table of requests where it is narrow: figures are there in full, ids can be told apart and be asked for."""

import io

import pytest
from rich.console import Console

from vllm_ascend_pd.tools.timeline.summary import Request, chosen
from vllm_ascend_pd.tools.timeline.table import short_names, table


def a_request(name: str, **fields: object) -> Request:
    """Figures of 4 to 7 characters, all different."""
    return Request(
        name,
        [name],
        prompt_tokens=131072,
        issued=0.0,
        granted=12_300.0,
        computed=[(45_600.0, 24_045_600.0)],
        pushed=[(46_000.0, 24_101_200.0)],
        bytes=1000,
        bytes_before_end=970,
        ready=24_124_500.0,
        **fields,
    )


FIGURES = ["131072", "45.6", "12.3", "24000.0", "24055.2", "55.6", "97%", "24124.5"]
UUIDS = [f"cmpl-{n * 0x1357:08x}-4081-452b-b0c5-59bdae40532d-0" for n in range(1, 12)]
COUNTED = [f"cmpl-a-load-test-of-the-eleventh-of-november-{n:05d}" for n in range(11)]
WITHIN = [f"chatcmpl-a-load-test-of-november-{n:05d}-on-one-of-our-hosts" for n in range(11)]


def printed(requests: list[Request], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table(requests, width))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 300])
@pytest.mark.parametrize("names", [UUIDS, COUNTED, WITHIN], ids=["uuids", "counted", "counted within"])
def test_no_figure_is_cut_off(names: list[str], width: int) -> None:
    requests = [a_request(name) for name in names]
    text = printed(requests, width)
    assert max(map(len, text.splitlines())) <= width
    rows = [line.split() for line in text.splitlines() if "24124.5" in line]
    assert [row[1:] for row in rows] == [FIGURES] * len(names)
    shown = [row[0] for row in rows]
    assert len(set(shown)) == len(names)
    assert [chosen(requests, name) for name in shown] == [[one] for one in requests]
    assert width < 300 or shown == names
    heading = text.split("─")[0].split()
    assert {"prompt", "tokens", "queue", "grant", "compute", "push", "after", "early", "bytes", "ready"} <= {*heading}


def test_why_a_request_failed_is_not_cut_off_either() -> None:
    failed = a_request(UUIDS[0], failures=["no_grant", "decode gave it up"])
    text = printed([failed, a_request(UUIDS[1])], 80)
    assert "decode gave it up, no_grant" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_ids_that_cannot_be_shortened_stay_whole() -> None:
    names = [f"{'x' * 30}{a}{'y' * 30}{b}{'z' * 30}" for a in "01" for b in "01"]
    assert short_names(names, 12) == names
    assert short_names(["a", "b"], 12) == ["a", "b"]
    assert short_names(["x" * 20, "x" * 20], 12) == ["xxxxxxxxx…xx"] * 2  # two transfers of one request
    requests = [a_request(name) for name in names]
    assert printed(requests, 80).count("24124.5") == 4


def test_an_id_with_an_ellipsis_of_its_own_is_that_request() -> None:
    requests = [a_request("a…b"), a_request("a-b")]
    assert chosen(requests, "a…b") == requests[:1]
    assert chosen(requests, "a…") == requests
    assert chosen(requests, "a.b") == []
