# SPDX-License-Identifier: Apache-2.0
"""Which pages of other origins may use the API from a browser (CORS), as `vllm serve` answers it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send


class CrossOrigin(CORSMiddleware):
    """Applies CORS to the routes for clients. Pages of other origins cannot use the remaining routes: those for
    operators and for decode engines, and the status page."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        paths: Collection[str],
        allow_origins: Sequence[str],
        allow_methods: Sequence[str],
        allow_headers: Sequence[str],
        allow_credentials: bool,
    ) -> None:
        """`paths`: those of the routes for clients, which may have parameters in braces. The others are those of
        `CORSMiddleware`."""
        super().__init__(
            app,
            allow_origins=allow_origins,
            allow_methods=allow_methods,
            allow_headers=allow_headers,
            allow_credentials=allow_credentials,
        )
        self._paths = [compile_path(path)[0] for path in paths]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(path.match(scope["path"]) for path in self._paths):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)
