# SPDX-License-Identifier: Apache-2.0
"""`GET /health`: whether the proxy could serve a request now."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_ascend_pd.proxy.operate.failure_stats import FailureStats
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool
from vllm_ascend_pd.proxy.routing.registry import EngineRegistry


class Health:
    def __init__(
        self, pools: tuple[EnginePool, ...], failure_stats: FailureStats, problems: Callable[[], list[str]]
    ) -> None:
        self._pools = pools
        self._failure_stats = failure_stats
        self._problems = problems

    async def get(self, _: Request) -> Response:
        """200 if each role has an engine whose last check was good and that may get requests, else 503.

        The body has the result of each engine's last check, the reasons why engines get no requests, problems with
        lists of engines, and counts of failures and retries."""
        roles = {pool.role.value: pool.engines for pool in self._pools}
        usable = all(any(each.open and each.gate.last_check == "ok" for each in engines) for engines in roles.values())
        return JSONResponse(
            {
                "status": "ok" if usable else "unavailable",
                **{role: {each.url: each.gate.last_check for each in engines} for role, engines in roles.items()},
                "withheld": {role: _withheld(engines) for role, engines in roles.items()},
                "problems": self._problems(),
                **self._failure_stats.shown(),
            },
            status_code=HTTPStatus.OK if usable else HTTPStatus.SERVICE_UNAVAILABLE,
        )


def _withheld(engines: EngineRegistry) -> dict[str, str]:
    """Returns by URL why an engine gets no requests, or gets them only if no other is left."""
    reasons = {engine.url: "new: no health check was good yet" for engine in engines if not engine.gate.proven}
    reasons |= {engine.url: f"ejected: {engine.gate.reason}" for engine in engines if engine.gate.ejected}
    return reasons | {engine.url: "draining" for engine in engines if engine.draining}
