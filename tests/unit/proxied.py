# SPDX-License-Identifier: Apache-2.0
"""A client request at the proxy, without a client, and settings of a proxy."""

from __future__ import annotations

from typing import Any

from starlette.types import Message

from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.http.streams import Reply
from vllm_ascend_pd.proxy.rendezvous.request_table import ProxiedRequest
from vllm_ascend_pd.proxy.settings import ProxySettings


def proxied_request() -> ProxiedRequest:
    async def send(_: Message) -> None:
        pass

    reply = Reply(send, request_id=None)
    return ProxiedRequest("POST", Endpoint.COMPLETIONS.value, Endpoint.COMPLETIONS, [], reply)


def settings_with(**fields: Any) -> ProxySettings:
    return ProxySettings(prefill=["http://p"], decode=["http://d"], **fields)
