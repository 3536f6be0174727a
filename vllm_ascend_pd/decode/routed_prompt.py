# SPDX-License-Identifier: Apache-2.0
"""A prompt that a prefill engine was asked for before decode, as a router's request to decode names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.core.hosts import HostList, authority, is_host
from vllm_ascend_pd.core.text import is_name
from vllm_ascend_pd.core.ticket import (
    BOOTSTRAP_ADDRESS,
    TICKET_HOST,
    TICKET_PORT,
    TRANSFER_ID,
    is_transfer_id,
)
from vllm_ascend_pd.transport.http_url import parse_url

_MAX_URL_CHARS = 512


class PromptNameError(ValueError):
    """A request names no prefill engine that this engine may send a ticket to."""


@dataclass(frozen=True)
class RoutedPrompt:
    """Names a prompt, and the prefill engine that holds it."""

    transfer_id: str
    # The prefill engine's id, as the router knows it.
    engine_id: str
    # Where that engine takes tickets: `tcp://host:port`. None: its `bootstrap` says where.
    endpoint: str | None = None
    # `http://host:port`, as Mooncake's routers name it.
    bootstrap: str | None = None

    def __str__(self) -> str:
        return f"prefill engine at {self.endpoint or self.bootstrap}"


def parse_routed_prompt(params: Mapping[str, Any], hosts: HostList) -> RoutedPrompt:
    """Reads a request's `kv_transfer_params`. `hosts`: those that may be connected to.

    Raises PromptNameError. The message does not quote addresses, since a client may read it.
    """
    transfer_id, engine_id = params.get(TRANSFER_ID), params.get("remote_engine_id")
    if not is_transfer_id(transfer_id):
        raise PromptNameError(f"{TRANSFER_ID} is not a short printable text")
    if not isinstance(engine_id, str) or not engine_id or not is_name(engine_id):
        raise PromptNameError("remote_engine_id is not a short printable text")
    if params.get(TICKET_HOST) is not None:
        host, port = params[TICKET_HOST], params.get(TICKET_PORT)
        endpoint = f"tcp://{_checked(host, port, hosts, TICKET_HOST)}"
        return RoutedPrompt(transfer_id, engine_id, endpoint=endpoint)
    return RoutedPrompt(transfer_id, engine_id, bootstrap=_bootstrap(params.get(BOOTSTRAP_ADDRESS), hosts))


def endpoint_of(address: object, hosts: HostList) -> str:
    """Returns the endpoint `tcp://host:port` of an address `host:port` that a bootstrap server names.

    Raises PromptNameError.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    return f"tcp://{_checked(host, number, hosts, 'the address in the bootstrap server' + chr(39) + 's answer')}"


def _bootstrap(url: object, hosts: HostList) -> str:
    if not isinstance(url, str) or len(url) > _MAX_URL_CHARS:
        raise PromptNameError(f"{BOOTSTRAP_ADDRESS} is not a URL")
    try:
        parsed = parse_url(url)
    except ValueError:
        raise PromptNameError(f"{BOOTSTRAP_ADDRESS} is not http://HOST:PORT") from None
    if parsed.scheme != "http" or parsed.path.strip("/"):
        raise PromptNameError(f"{BOOTSTRAP_ADDRESS} is not http://HOST:PORT")
    return f"http://{_checked(parsed.host, parsed.port, hosts, BOOTSTRAP_ADDRESS)}"


def _checked(host: object, port: object, hosts: HostList, name: str) -> str:
    """Returns `host:port`. `name`: of the value, for errors."""
    if not isinstance(host, str) or not is_host(host):
        raise PromptNameError(f"{name} has no valid host")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise PromptNameError(f"{name} has no valid port")
    if (reason := hosts.refusal(host)) is not None:
        raise PromptNameError(f"{name}: {reason}")
    return authority(host, port)
