# SPDX-License-Identifier: Apache-2.0
"""Pieces of a proxy: a client request without a client, settings, and engine registries that record what they tell
their queue and their prefix affinity."""

from typing import Any, cast

from starlette.types import Message

from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.http.streams import Reply
from vllm_ascend_pd.proxy.rendezvous.request_table import ProxiedRequest
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.engines import EngineRegistry, RegisteredEngine
from vllm_ascend_pd.proxy.routing.queue import Queue
from vllm_ascend_pd.proxy.routing.strategies import PrefixAffinity
from vllm_ascend_pd.proxy.settings import ProxySettings


def proxied_request() -> ProxiedRequest:
    async def send(_: Message) -> None:
        pass

    reply = Reply(send, request_id=None)
    return ProxiedRequest("POST", Endpoint.COMPLETIONS.value, Endpoint.COMPLETIONS, [], reply)


def settings_with(**fields: Any) -> ProxySettings:
    return ProxySettings(prefill=["http://p"], decode=["http://d"], **fields)


class RegistryListener:
    waiting = 1

    def __init__(self) -> None:
        self.opened_engines: list[RegisteredEngine] = []
        self.closed_engines: list[RegisteredEngine] = []
        self.forgotten: list[str] = []

    def opened(self, engine: RegisteredEngine, _: str) -> None:
        self.opened_engines.append(engine)

    def put_last(self, *_: object) -> None:
        pass

    def closed(self, engine: RegisteredEngine) -> None:
        self.closed_engines.append(engine)

    def forget(self, url: str) -> None:
        self.forgotten.append(url)

    def sent(self, *_: object) -> int:
        return 0

    def ended(self, *_: object) -> None:
        pass


def registry(role: EngineRole, listener: RegistryListener | None = None, **limits: int) -> EngineRegistry:
    """An empty registry. `listener` is its queue and its prefix affinity."""
    if listener is None:
        return EngineRegistry(role, Queue(None, 0, 0.0), settings_with(**limits))
    engines = EngineRegistry(role, cast("Queue[RegisteredEngine]", listener), settings_with(**limits))
    engines.affinity = cast(PrefixAffinity, listener)
    return engines
