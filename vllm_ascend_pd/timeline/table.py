# SPDX-License-Identifier: Apache-2.0
"""Where requests' time went, as a table."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from vllm_ascend_pd.timeline.summary import Request

MAX_ROWS = 50


def table(requests: Sequence[Request]) -> Table:
    """Where the time went, at most MAX_ROWS requests; of one alone, with what the figures mean."""
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
    result = Table(title="where the time went (ms)", box=SIMPLE)
    result.add_column("request", no_wrap=True, overflow="ellipsis")  # on narrow terminals its beginning tells it
    for heading, _ in columns():
        result.add_column(heading, justify="right", min_width=6)
    for one in requests[:MAX_ROWS]:
        name = escape(one.name) + (f" [red]{escape(failures(one))}[/]" if one.failures else "")
        result.add_row(name, *cells(one))
    return result


def failures(one: Request) -> str:
    """The kinds, each once."""
    return ", ".join(sorted({*one.failures}))


def columns() -> list[tuple[str, str]]:
    """(heading, what it means), in the order of `cells`."""
    return [
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
    return [*times, early, _ms(one.to_ready)]


def _ms(micros: float | None) -> str:
    return "-" if micros is None else f"{micros / 1000:.1f}"
