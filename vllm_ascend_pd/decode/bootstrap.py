# SPDX-License-Identifier: Apache-2.0
"""Prefill engines that hold prompts: how requests name them, and where they listen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import anyio
import httpx
import msgspec

from vllm_ascend_pd.core.hosts import authority, is_host
from vllm_ascend_pd.core.secret import MAX_SIGNATURE_CHARS
from vllm_ascend_pd.core.signed_addresses import signature_in
from vllm_ascend_pd.core.text import UNREADABLE, is_name
from vllm_ascend_pd.core.ticket_params import (
    BOOTSTRAP_ADDRESS,
    TICKET_HOST,
    TICKET_LISTENER_SIGNATURE,
    TICKET_PORT,
    TRANSFER_ID,
    hold_s,
    is_transfer_id,
)
from vllm_ascend_pd.decode.prefill_admission import PrefillAdmission
from vllm_ascend_pd.decode.ticket_client import NoRecipientError
from vllm_ascend_pd.transport.http_client import HTTP_FAILURES, describe, open_client, parse_url, read_at_most

_MAX_URL_CHARS = 512


@dataclass(frozen=True)
class PromptHolder:
    """The prefill engine that holds a prompt, and the prompt's name there."""

    transfer_id: str
    # The prefill engine's id, as the router knows it.
    engine_id: str
    # Where that engine takes tickets: `tcp://host:port`. None: its `bootstrap` says where.
    endpoint: str | None = None
    # `http://host:port`, as Mooncake's routers name it.
    bootstrap: str | None = None
    # How many seconds the engine holds the prompt after a question about its ticket. None: it does not say.
    hold_s: float | None = None

    def __str__(self) -> str:
        return f"prefill engine at {self.endpoint or self.bootstrap}"


def parse_holder(params: Mapping[str, Any], admission: PrefillAdmission) -> PromptHolder:
    """Reads a request's `kv_transfer_params`. `admission`: decides which addresses may be connected to.

    Raises NoRecipientError. The message does not quote addresses, since a client may read it.
    """
    transfer_id, engine_id = params.get(TRANSFER_ID), params.get("remote_engine_id")
    if not is_transfer_id(transfer_id):
        raise NoRecipientError(f"{TRANSFER_ID} is not a short printable text")
    if not isinstance(engine_id, str) or not engine_id or not is_name(engine_id):
        raise NoRecipientError("remote_engine_id is not a short printable text")
    if params.get(TICKET_HOST) is None:
        return PromptHolder(transfer_id, engine_id, bootstrap=_bootstrap(params.get(BOOTSTRAP_ADDRESS), admission))
    host, port = _host_and_port(params[TICKET_HOST], params.get(TICKET_PORT), TICKET_HOST)
    signature = signature_in(params, TICKET_LISTENER_SIGNATURE)
    _refuse_if(admission.refusal_of_listener(engine_id, host, port, transfer_id, signature), TICKET_HOST)
    return PromptHolder(transfer_id, engine_id, endpoint=f"tcp://{authority(host, port)}", hold_s=hold_s(params))


def endpoint_of(engine: Engine, admission: PrefillAdmission) -> str:
    """Returns the endpoint `tcp://host:port` where tickets go, of an engine that a bootstrap server names.

    Raises NoRecipientError.
    """
    name = "the address in the bootstrap server's answer"
    address = engine.worker_addr.get("0", {}).get("0", "")
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    host, number = _host_and_port(host, number, name)
    _refuse_if(admission.refusal_of_listener(engine.engine_id, host, number, None, engine.signature), name)
    return f"tcp://{authority(host, number)}"


def _bootstrap(url: object, admission: PrefillAdmission) -> str:
    if not isinstance(url, str) or len(url) > _MAX_URL_CHARS:
        raise NoRecipientError(f"{BOOTSTRAP_ADDRESS} is not a URL")
    try:
        parsed = parse_url(url)
    except ValueError:
        raise NoRecipientError(f"{BOOTSTRAP_ADDRESS} is not http://HOST:PORT") from None
    if parsed.scheme != "http" or parsed.path.strip("/"):
        raise NoRecipientError(f"{BOOTSTRAP_ADDRESS} is not http://HOST:PORT")
    _refuse_if(admission.refusal_of_bootstrap(parsed.host, parsed.port), BOOTSTRAP_ADDRESS)
    return f"http://{authority(parsed.host, parsed.port)}"


def _host_and_port(host: object, port: object, name: str) -> tuple[str, int]:
    """Checks the types and the form of both. `name`: of the value, for errors."""
    if not isinstance(host, str) or not is_host(host):
        raise NoRecipientError(f"{name} has no valid host")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise NoRecipientError(f"{name} has no valid port")
    return host, port


def _refuse_if(reason: str | None, name: str) -> None:
    if reason is not None:
        raise NoRecipientError(f"{name}: {reason}")


_MAX_ANSWER_BYTES = 256 << 10
# Servers whose answers are remembered.
_MAX_REMEMBERED = 256

_Text = Annotated[str, msgspec.Meta(max_length=512)]
_Signature = Annotated[str, msgspec.Meta(max_length=MAX_SIGNATURE_CHARS)]


class BootstrapError(Exception):
    """A bootstrap server does not say where an engine takes tickets. `final`: asking again does not help."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class Engine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One data-parallel engine in the answer."""

    # The id that routers know it by. It outlives a restart if it is configured.
    engine_id: _Text
    # Tensor-parallel rank -> pipeline rank -> `host:port`. Ours names the listener that takes tickets as rank 0, 0.
    worker_addr: dict[_Text, dict[_Text, _Text]]
    # The id of this start of the engine, which tickets are offered to. None: `engine_id`.
    started_as: _Text | None = None
    # Of `worker_addr` and `engine_id`, by an engine with the cluster's secret (`core/signed_addresses.py`).
    signature: _Signature = ""


class PrefillAddresses:
    """Finds endpoints, and remembers them until `forget`. The thread of one event loop owns it."""

    def __init__(self, admission: PrefillAdmission, timeout_s: float) -> None:
        """`admission`: decides which addresses may be connected to. `timeout_s`: for one answer."""
        self._admission = admission
        self._timeout_s = timeout_s
        self._known: OrderedDict[str, dict[str, tuple[str, str]]] = OrderedDict()  # by server, then by engine id

    async def of(self, holder: PromptHolder) -> tuple[str, str]:
        """Returns the endpoint where the engine takes tickets, and the id of its start there.

        Raises BootstrapError.
        """
        if holder.endpoint is not None:
            return holder.endpoint, holder.engine_id
        assert holder.bootstrap is not None
        found = self._known.get(holder.bootstrap, {}).get(holder.engine_id)
        if found is None:
            engines = await self._ask(holder.bootstrap)
            self._known[holder.bootstrap] = engines
            if len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
            found = engines.get(holder.engine_id)
        if found is None:
            raise BootstrapError("the bootstrap server does not know the engine: was it restarted?", final=True)
        return found

    def forget(self, holder: PromptHolder) -> None:
        """The endpoint does not work: the next call asks again."""
        if holder.bootstrap is not None:
            self._known.pop(holder.bootstrap, None)

    async def _ask(self, server: str) -> dict[str, tuple[str, str]]:
        limits, timeout = httpx.Limits(max_connections=1), httpx.Timeout(self._timeout_s)
        try:
            with anyio.fail_after(self._timeout_s):
                async with (
                    open_client(limits, timeout, _MAX_ANSWER_BYTES) as client,
                    client.stream("GET", f"{server}/query") as response,
                ):
                    status, body = response.status_code, await read_at_most(response, _MAX_ANSWER_BYTES)
        except HTTP_FAILURES as error:
            raise BootstrapError(f"the prefill host's bootstrap server does not answer: {describe(error)}") from error
        if status != 200:
            raise BootstrapError(f"the prefill host's bootstrap server answered {status}")
        return self._engines(body)

    def _engines(self, body: bytes) -> dict[str, tuple[str, str]]:
        """Returns endpoint and id of the start, by engine id. Leaves out engines of other connectors."""
        try:
            answer = msgspec.json.decode(body, type=dict[str, Engine])
        except UNREADABLE as error:
            raise BootstrapError("the prefill host's bootstrap server sent no list of engines") from error
        engines, refused = {}, None
        for engine in answer.values():
            try:
                endpoint = endpoint_of(engine, self._admission)
            except NoRecipientError as error:
                refused = error
                continue
            engines[engine.engine_id] = (endpoint, engine.started_as or engine.engine_id)
        if refused is not None and not engines:
            raise BootstrapError(str(refused), final=True)
        return engines
