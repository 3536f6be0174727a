# SPDX-License-Identifier: Apache-2.0
"""The timeline as one HTML file without anything from elsewhere: a canvas to zoom and move, and the table.

Names in traces come from clients. In HTML they are escaped, in the script they are data that cannot end it, and on
the canvas they are drawn, not parsed.
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ascend_pd.tools.timeline.picture import Picture, explanation, headline
from vllm_ascend_pd.tools.timeline.summary import Request
from vllm_ascend_pd.tools.timeline.table import cells, columns, failures

_TEMPLATE = Path(__file__).with_name("page.html")


def page(picture: Picture, requests: Sequence[Request], note: str) -> str:
    """Returns the HTML file."""
    head = "".join(f'<th title="{html.escape(why)}">{html.escape(name)}</th>' for name, why in columns())
    body = "".join(
        f"<tr><td>{html.escape(one.name)}{_failures(one)}</td>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(one))
        + "</tr>"
        for one in requests
    )
    parts = {
        "HEADLINE": html.escape(headline(picture.request)),
        "EXPLANATION": html.escape(explanation(picture)),
        "NOTE": html.escape(note + (f"; {picture.omitted} bars left out" if picture.omitted else "")),
        "TABLE": f"<tr><th>request</th>{head}</tr>{body}",
        "DATA": _script_data(picture),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    before, *rest = text.split("@@")
    # Split once, so that inserted values are never searched for placeholders.
    return before + "".join(parts[piece] if i % 2 == 0 else piece for i, piece in enumerate(rest))


def _failures(one: Request) -> str:
    return f' <b class="bad">{html.escape(failures(one))}</b>' if one.failures else ""


def _script_data(picture: Picture) -> str:
    request = picture.request
    zero = request.compute_begin if request.compute_begin is not None else picture.begin
    data: dict[str, Any] = {
        "layers": len(picture.layers),
        "from": picture.begin - zero,
        "to": picture.end - zero,
        "rows": [
            {
                "kind": row.kind,
                "title": row.title,
                "bars": [
                    [round(bar.begin - zero, 1), round(bar.end - zero, 1), bar.layer, bar.label, int(bar.mine)]
                    for bar in row.bars
                ],
            }
            for row in picture.rows
        ],
        "arrivals": [[arrival.at - zero, arrival.share] for arrival in picture.arrivals],
        "moments": [
            [at - zero, label, color]
            for at, label, color in (
                (request.issued, "ticket", "#777"),
                (request.compute_end, "forward pass ends", "#d62728"),
                (request.ready, "decode is ready", "#2ca02c"),
            )
            if at is not None
        ],
    }
    # In a script element only `<` can end the JSON, and only these two characters end a line of JavaScript.
    text = json.dumps(data)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
