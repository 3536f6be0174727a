# SPDX-License-Identifier: Apache-2.0
"""Asks prefill hosts' bootstrap servers where their engines take tickets.

Mooncake's routers name such a server instead of an address. Its answer is `{"0": {"engine_id": ..., "worker_addr":
{"0": {"0": "host:port"}}}}`, with one entry per data-parallel engine (`connector/bootstrap_server.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

import anyio
import httpx
import msgspec

from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.decode.routed_prompt import PromptNameError, RoutedPrompt, endpoint_of
from vllm_ascend_pd.transport.http_client import HTTP_FAILURES, describe, open_client, read_at_most

_MAX_ANSWER_BYTES = 256 << 10
# Servers whose answers are remembered.
_MAX_REMEMBERED = 256

_Text = Annotated[str, msgspec.Meta(max_length=512)]


class BootstrapError(Exception):
    """A bootstrap server does not say where an engine takes tickets. `final`: asking again does not help."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class _Engine(msgspec.Struct, frozen=True):
    """One data-parallel engine."""

    # The id that routers know it by.
    engine_id: _Text
    # Tensor-parallel rank -> pipeline rank -> `host:port`. Ours names the engine's listener as rank 0, 0.
    worker_addr: dict[_Text, dict[_Text, _Text]]
    # The id of this start of the engine. None: `engine_id`.
    started_as: _Text | None = None


class PrefillAddresses:
    """Finds endpoints, and remembers them until `forget`. The thread of one event loop owns it."""

    def __init__(self, hosts: HostList, timeout_s: float) -> None:
        """`hosts`: those that may be connected to. `timeout_s`: for one answer."""
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._known: OrderedDict[str, dict[str, tuple[str, str]]] = OrderedDict()  # by server, then by engine id

    async def of(self, prompt: RoutedPrompt) -> tuple[str, str]:
        """Returns the endpoint that takes tickets for the prompt, and the id of the engine's start there.

        Raises BootstrapError.
        """
        if prompt.endpoint is not None:
            return prompt.endpoint, prompt.engine_id
        assert prompt.bootstrap is not None
        found = self._known.get(prompt.bootstrap, {}).get(prompt.engine_id)
        if found is None:
            engines = await self._ask(prompt.bootstrap)
            self._known[prompt.bootstrap] = engines
            if len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
            found = engines.get(prompt.engine_id)
        if found is None:
            raise BootstrapError("the bootstrap server does not know the engine: was it restarted?", final=True)
        return found

    def forget(self, prompt: RoutedPrompt) -> None:
        """The endpoint does not work: the next call asks again."""
        if prompt.bootstrap is not None:
            self._known.pop(prompt.bootstrap, None)

    async def _ask(self, server: str) -> dict[str, tuple[str, str]]:
        limits, timeout = httpx.Limits(max_connections=1), httpx.Timeout(self._timeout_s)
        try:
            with anyio.fail_after(self._timeout_s):
                async with open_client(limits, timeout) as client, client.stream("GET", f"{server}/query") as response:
                    status, body = response.status_code, await read_at_most(response, _MAX_ANSWER_BYTES)
        except HTTP_FAILURES as error:
            raise BootstrapError(f"the prefill host's bootstrap server does not answer: {describe(error)}") from error
        if status != 200:
            raise BootstrapError(f"the prefill host's bootstrap server answered {status}")
        return self._engines(body)

    def _engines(self, body: bytes) -> dict[str, tuple[str, str]]:
        """Returns endpoint and id of the start, by engine id. Leaves out engines of other connectors."""
        try:
            answer = msgspec.json.decode(body, type=dict[str, _Engine])
        except UNREADABLE as error:
            raise BootstrapError("the prefill host's bootstrap server sent no list of engines") from error
        engines, refused = {}, None
        for engine in answer.values():
            try:
                endpoint = endpoint_of(engine.worker_addr.get("0", {}).get("0"), self._hosts)
            except PromptNameError as error:
                refused = error
                continue
            engines[engine.engine_id] = (endpoint, engine.started_as or engine.engine_id)
        if refused is not None and not engines:
            raise BootstrapError(str(refused), final=True)
        return engines
