# SPDX-License-Identifier: Apache-2.0
"""`GET /`: the status page, and the JSON that it polls.

The page itself contains nothing about the cluster. The JSON has engines' addresses and reasons of failures. If there is
an admin token, it needs that token; otherwise every client can read it, like `/health` and `/metrics`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from vllm_ascend_pd.proxy.http.bearer import Action, BearerToken, guarded
from vllm_ascend_pd.proxy.operate.status import Status

# Everything comes from this origin. The last two rules make sure that text is never parsed as HTML.
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_FILES = {
    "/": ("index.html", "text/html"),
    "/status.css": ("status.css", "text/css"),
    "/status.js": ("status.js", "text/javascript"),
    "/status.svg": ("status.svg", "image/svg+xml"),
}


class StatusPage:
    def __init__(self, snapshot: Callable[[], Status], token: str | None) -> None:
        """`token`: the admin API's. None: every client may read the status."""
        self._snapshot = snapshot
        self._get: Action = self.get if token is None else guarded(BearerToken(token), self.get)

    def routes(self) -> list[BaseRoute]:
        return [
            *(Route(path, _file(name, media_type), methods=["GET"]) for path, (name, media_type) in _FILES.items()),
            Route("/status.json", self._get, methods=["GET"]),
        ]

    async def get(self, _: Request) -> Response:
        """200: `status.Status` as JSON."""
        return Response(msgspec.json.encode(self._snapshot()), media_type="application/json", headers=_HEADERS)


def _file(name: str, media_type: str) -> Action:
    content = files(__package__).joinpath("page", name).read_bytes()

    async def get(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return get
