# SPDX-License-Identifier: Apache-2.0
"""The admin API: lists, adds, drains and removes engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.proxy.http.messages import BearerToken, RequestRefused, TooLarge, guarded, read_all
from vllm_ascend_pd.proxy.operate.status import EngineStatus, engine_status
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.discovery import COMMAND_LINE, check_engine_url
from vllm_ascend_pd.proxy.routing.engine import RegisteredEngine
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool
from vllm_ascend_pd.proxy.routing.registry import EngineRegistry, TooManyEnginesError

log = logging.getLogger(__name__)

PATH = "/admin/engines"
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
        """200: `{"engines": [...]}`, each as `EngineStatus`."""
        now = time.monotonic()
        engines = [engine_status(pool, each, now) for pool in self._pools.values() for each in pool.engines]
        return _json({"engines": engines})

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
        return _json(self._status(engine), HTTPStatus.CREATED)

    async def drain(self, request: Request) -> Response:
        """200 with the engine. It gets no more requests; those that it has go on."""
        engines, engine = self._find(request)
        engines.drain(engine)
        log.info("%s engine %s: drains", engine.role.value, engine.url)
        return _json(self._status(engine))

    async def undrain(self, request: Request) -> Response:
        engines, engine = self._find(request)
        engines.undrain(engine)
        log.info("%s engine %s: gets requests again", engine.role.value, engine.url)
        return _json(self._status(engine))

    async def remove(self, request: Request) -> Response:
        """200 with the engine as it was. Its requests go on. 409 if the engine would come back, because a DNS name
        lists it."""
        engines, engine = self._find(request)
        listed = engine.sources - {COMMAND_LINE, ADMIN}
        if listed:
            raise RequestRefused(
                HTTPStatus.CONFLICT, f"{', '.join(sorted(listed))} lists this engine: drain it here, or remove it there"
            )
        shown = self._status(engine)
        engines.remove(engine)
        log.info("%s engine %s: removed by %s", engine.role.value, engine.url, ADMIN)
        return _json(shown)

    def _find(self, request: Request) -> tuple[EngineRegistry, RegisteredEngine]:
        for pool in self._pools.values():
            engine = pool.engines.by_id(request.path_params["id"])
            if engine is not None:
                return pool.engines, engine
        raise RequestRefused(HTTPStatus.NOT_FOUND, "no engine has this id")

    def _status(self, engine: RegisteredEngine) -> EngineStatus:
        return engine_status(self._pools[engine.role], engine, time.monotonic())


def _json(body: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
