# SPDX-License-Identifier: Apache-2.0
"""Renders where requests' time went as a table."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vllm_ascend_pd.tools.timeline.summary import ELLIPSIS, Request

MAX_ROWS = 50

_LEAST_NAME = 8


def table(requests: Sequence[Request], width: int) -> Table:
    """Returns a table of at most MAX_ROWS requests. A single request's table explains the figures.

    `width` is the console's. If it is too small, ids are shortened, but never figures.
    """
    if len(requests) == 1:
        result = Table(title=f"where the time of {escape(requests[0].name)} went (ms)", box=SIMPLE, show_header=False)
        result.add_column(no_wrap=True)
        result.add_column(justify="right")
        result.add_column()
        for (heading, meaning), cell in zip(columns(), cells(requests[0]), strict=True):
            result.add_row(heading, cell, meaning)
        if requests[0].failures:
            result.add_row("[red]failed[/]", "", escape(failures(requests[0])))
        return result
    headings = [heading.replace(" ", "\n") for heading, _ in columns()]
    rows = [cells(one) for one in requests[:MAX_ROWS]]
    figures = sum(
        max(map(len, [*heading.split("\n"), *column])) for heading, *column in zip(headings, *rows, strict=True)
    )
    names = [one.name for one in requests]
    between = len(headings) + 2  # spaces between columns and at both edges
    spacious = max(map(len, names), default=0) + figures + 3 * between <= width
    if not spacious:
        names = short_names(names, max(_LEAST_NAME, width - figures - between))
    result = Table(title="where the time went (ms)", box=SIMPLE, padding=(0, int(spacious)))
    result.add_column("request", overflow="fold")  # the only column that may be narrower than its content
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    for one, name, row in zip(requests, names, rows, strict=False):
        result.add_row(Text(name).append(f"\n{failures(one)}" if one.failures else "", "red"), *row)
    return result


def short_names(names: Sequence[str], room: int) -> list[str]:
    """Shortens `names` to at most `room` characters so that they still differ. Returns them unchanged if that fails.

    Ids of one kind differ at the beginning, at the end, or after their common prefix.
    """
    long = [name for name in names if len(name) > room]
    pairs = zip(
        min(long, default=""), max(long, default=""), strict=False
    )  # the common prefix of these two is common to all
    begin = next((place for place, (one, other) in enumerate(pairs) if one != other), 0)
    ends = (min(2, room - 1), room // 2, 0, room - 1)
    ways = [(0, room - 1 - end, end) for end in ends] + [(begin, room - 2, 0)]
    for first, head, tail in ways:
        shortened = [name if len(name) <= room else _shorten(name, first, head, tail) for name in names]
        if len(set(shortened)) == len(set(names)):
            return shortened
    return list(names)


def _shorten(name: str, first: int, head: int, tail: int) -> str:
    before = ELLIPSIS if first else ""
    return before + name[first : first + head] + ELLIPSIS + name[len(name) - tail :]


def failures(one: Request) -> str:
    """Returns the kinds of failures, each once."""
    return ", ".join(sorted({*one.failures}))


def columns() -> list[tuple[str, str]]:
    """Returns (heading, meaning) of each column, in the order of `cells`."""
    return [
        ("prompt tokens", "of the prompt, as far as prefill has computed it for decode"),
        ("queue", "from the ticket until prefill begins to compute: the way over the proxy, and prefill's queue"),
        ("to grant", "from the ticket until every prefill rank may write"),
        ("compute", "from the first layer to the end of the last forward pass"),
        ("push", "the time in which at least one rank writes"),
        ("push after", "from the end of the forward pass until all is written"),
        ("early bytes", "the share that decode had when the forward pass ended"),
        ("to ready", "from the ticket until decode could run the request"),
    ]


def cells(one: Request) -> list[str]:
    early = "-" if one.early_share is None else f"{one.early_share:.0%}"
    times = [_ms(time) for time in (one.queue, one.to_grant, one.compute, one.push, one.push_after)]
    tokens = "-" if one.prompt_tokens is None else str(one.prompt_tokens)
    return [tokens, *times, early, _ms(one.to_ready)]


def _ms(micros: float | None) -> str:
    return "-" if micros is None else f"{micros / 1000:.1f}"
