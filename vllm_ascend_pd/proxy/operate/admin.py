# SPDX-License-Identifier: Apache-2.0
"""The admin API: lists, adds, drains and removes engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.proxy.http.messages import BearerToken, RequestRefused, TooLarge, guarded, read_all
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.discovery import check_engine_url
from vllm_ascend_pd.proxy.routing.engine import RegisteredEngine
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool
from vllm_ascend_pd.proxy.routing.registry import EngineRegistry, TooManyEnginesError

log = logging.getLogger(__name__)

PATH = "/admin/engines"
COMMAND_LINE = "the command line"
ADMIN = "the admin API"
_MAX_BODY_BYTES = 64 * 1024


class _NewEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: EngineRole
    url: str


class Admin:
    def __init__(self, pools: tuple[EnginePool, ...], request_table: RequestTable, token: str) -> None:
        self._pools: Mapping[EngineRole, EnginePool] = {pool.role: pool for pool in pools}
        self._request_table = request_table
        self._token = BearerToken(token)

    def routes(self) -> list[BaseRoute]:
        return [
            Route(PATH, guarded(self._token, self.list), methods=["GET"]),
            Route(PATH, guarded(self._token, self.add), methods=["POST"]),
            Route(PATH + "/{id}:drain", guarded(self._token, self.drain), methods=["POST"]),
            Route(PATH + "/{id}:undrain", guarded(self._token, self.undrain), methods=["POST"]),
            Route(PATH + "/{id}", guarded(self._token, self.remove), methods=["DELETE"]),
        ]

    async def list(self, _: Request) -> Response:
        """200: `{"engines": [...], "waiting": {...}}`: each engine as `_shown`, and by role the requests that wait."""
        return JSONResponse(
            {
                "engines": [self._shown(each) for pool in self._pools.values() for each in pool.engines],
                "waiting": {role.value: pool.limiter.waiting for role, pool in self._pools.items()},
            }
        )

    async def add(self, request: Request) -> Response:
        """Takes `{"role": "prefill", "url": "http://..."}`. 201 with the engine; 400; 409 if the engine exists already,
        or there are too many."""
        try:
            with self._request_table.until_shut_down():
                body = await read_all(request.stream(), _MAX_BODY_BYTES)
            new = msgspec.json.decode(body, type=_NewEngine)
            url = check_engine_url(new.role.value, new.url, ("http", "https"))
        except TooLarge:
            raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request body is too large") from None
        except ClientDisconnect:
            raise RequestRefused(HTTPStatus.REQUEST_TIMEOUT, "the request body did not arrive") from None
        except (*UNREADABLE, ValueError) as error:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, str(error)) from None
        engines = self._pools[new.role].engines
        if engines.get(url) is not None:
            raise RequestRefused(HTTPStatus.CONFLICT, f"{new.role.value} engine {url} exists already")
        try:
            engine = engines.add(url, ADMIN)
        except TooManyEnginesError as full:
            raise RequestRefused(HTTPStatus.CONFLICT, str(full)) from None
        log.info("%s engine %s: added by %s", engine.role.value, url, ADMIN)
        return JSONResponse(self._shown(engine), status_code=HTTPStatus.CREATED)

    async def drain(self, request: Request) -> Response:
        """200 with the engine. It gets no more requests; those that it has go on."""
        engines, engine = self._find(request)
        engines.drain(engine)
        log.info("%s engine %s: drains", engine.role.value, engine.url)
        return JSONResponse(self._shown(engine))

    async def undrain(self, request: Request) -> Response:
        engines, engine = self._find(request)
        engines.undrain(engine)
        log.info("%s engine %s: gets requests again", engine.role.value, engine.url)
        return JSONResponse(self._shown(engine))

    async def remove(self, request: Request) -> Response:
        """200 with the engine as it was. Its requests go on. 409 if the engine would come back, because a file or a DNS
        name lists it."""
        engines, engine = self._find(request)
        listed = engine.sources - {COMMAND_LINE, ADMIN}
        if listed:
            raise RequestRefused(
                HTTPStatus.CONFLICT, f"{', '.join(sorted(listed))} lists this engine: drain it here, or remove it there"
            )
        shown = self._shown(engine)
        engines.remove(engine)
        log.info("%s engine %s: removed by %s", engine.role.value, engine.url, ADMIN)
        return JSONResponse(shown)

    def _find(self, request: Request) -> tuple[EngineRegistry, RegisteredEngine]:
        for pool in self._pools.values():
            engine = pool.engines.by_id(request.path_params["id"])
            if engine is not None:
                return pool.engines, engine
        raise RequestRefused(HTTPStatus.NOT_FOUND, "no engine has this id")

    def _shown(self, engine: RegisteredEngine) -> dict[str, object]:
        load = self._pools[engine.role].engines.load(engine, time.monotonic())
        return {
            "id": engine.id,
            "role": engine.role.value,
            "url": engine.url,
            "state": _state(engine),
            "reason": engine.gate.reason or None if engine.gate.shut else None,
            "listed_by": sorted(engine.sources),
            "in_flight": engine.sent.requests,
            "load": {"requests": load.requests, "tokens": load.tokens, "capacity_tokens": load.capacity},
        }


def _state(engine: RegisteredEngine) -> str:
    if engine.draining:
        return "draining"
    if engine.gate.ejected:
        return "ejected"
    return "serving" if engine.gate.proven else "new"
