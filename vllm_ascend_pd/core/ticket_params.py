# SPDX-License-Identifier: Apache-2.0
"""The keys of a request's `kv_transfer_params` that are not the ticket's own, and what a request asks for by them."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from vllm_ascend_pd.core.text import is_name

WANTS_TOKEN_IDS = "wants_token_ids"
"""Key in the `kv_transfer_params` of a request to decode. Our proxy asks for `Ticket.token_ids` by it."""

# Keys that our proxy adds to the `kv_transfer_params` of a request to decode. All are optional. Decode checks their
# types, because a client that knows the engine may send anything.

WHO_COMPUTES = "who_computes"
"""Who is asked to compute the prompt: `BY_DECODE` or `BY_PREFILL`."""

BY_DECODE, BY_PREFILL = "decode", "prefill"

PREFILL_AVAILABLE = "prefill_available"
"""False if no prefill engine is well."""

PREFILL_WAIT_S = "prefill_wait_s"
"""How many seconds the prompt would wait in prefill's queue, as the proxy estimates it."""

PREFILL_FIRST_TOKENS = "prefill_first_tokens"
"""Prompts of which prefill computes more tokens than this may be computed before decode gives them blocks: all prefill
engines that may get them hold prompts. A missing key means that none may."""

_A_DAY_S = 86400.0
"""A longer time is not believed."""

METASERVER_SIGNATURE = "metaserver_signature"
"""The signature of the metaserver's URL (`core/signed_addresses.py`)."""

# Keys in the `kv_transfer_params` of prefill's answer to a router that asks prefill first. The router hands them to
# decode as they are.

TRANSFER_ID = "transfer_id"
"""Names the prompt that prefill has computed. Routers of Mooncake's kind choose it and send it to both engines."""

TICKET_HOST = "ticket_host"
"""The host where prefill takes decode's ticket (`OfferTicket`)."""

TICKET_PORT = "ticket_port"
"""The port where prefill takes decode's ticket."""

TICKET_LISTENER_SIGNATURE = "ticket_listener_signature"
"""Prefill's signature of these three and of its engine id (`core/signed_addresses.py`)."""

HOLD_S = "hold_timeout_s"
"""How many seconds prefill holds the prompt after decode has last asked about its ticket. Versions that do not send it
hold prompts for 480 s unless they are told otherwise."""

MAX_TRANSFER_ID_CHARS = 128
"""The longest `TRANSFER_ID`."""

BOOTSTRAP_ADDRESS = "remote_bootstrap_addr"
"""Instead of `TICKET_HOST` and `TICKET_PORT`: URL of a server that knows them (`decode/bootstrap.py`). Mooncake's
routers send it."""


def is_transfer_id(value: object) -> TypeGuard[str]:
    """Returns whether `value`, from outside, may be a `TRANSFER_ID`: a short printable text."""
    return isinstance(value, str) and 0 < len(value) <= MAX_TRANSFER_ID_CHARS and is_name(value)


def wants_ticket(params: Mapping[str, Any] | None) -> bool:
    """Returns whether a request on decode asks for its prompt's KV to be pushed.

    If several connectors serve one engine, each sees all requests. A request for a connector that pulls names the
    engine to pull from: vLLM's and vllm-ascend's call it `remote_engine_id`. A router that asked prefill first names
    it, too, and with it where this engine's ticket can go.
    """
    if not isinstance(params, Mapping):  # vLLM checks the type of `kv_transfer_params`, but not in `vllm_xargs`
        return False
    if not params.get("do_remote_prefill"):
        return False
    return params.get("remote_engine_id") is None or names_prefill(params)


def is_pulled(params: object) -> bool:
    """Returns whether a request on decode is for a connector that pulls its KV."""
    return isinstance(params, Mapping) and params.get("remote_engine_id") is not None and not wants_ticket(params)


def names_prefill(params: Mapping[str, Any]) -> bool:
    """Returns whether a request on decode names a prefill engine that waits for its ticket."""
    if params.get(TRANSFER_ID) is None:
        return False
    return params.get(TICKET_HOST) is not None or params.get(BOOTSTRAP_ADDRESS) is not None


def hold_s(params: Mapping[str, Any]) -> float | None:
    """Returns `HOLD_S` of what prefill answers; None if it says nothing that makes sense."""
    value = params.get(HOLD_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _A_DAY_S:
        return None
    return float(value)


def wants_token_ids(params: Mapping[str, Any]) -> bool:
    """Returns whether the request's metaserver wants `Ticket.token_ids`."""
    return params.get(WANTS_TOKEN_IDS) is True


def prefill_wait_s(params: Mapping[str, Any]) -> float:
    """Returns `PREFILL_WAIT_S` of a request on decode; 0 if it has none, or none that makes sense."""
    wait_s = params.get(PREFILL_WAIT_S)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= _A_DAY_S:
        return 0.0
    return float(wait_s)


def prefill_first_tokens(params: Mapping[str, Any] | None) -> int | None:
    """Returns `PREFILL_FIRST_TOKENS` of a request on decode; None if it has none, or none that makes sense."""
    value = params.get(PREFILL_FIRST_TOKENS) if isinstance(params, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


TICKET_FOLLOWS = "ticket_follows"
"""True in an intent (`core/ticket.py`), which is no ticket."""


def carries_ticket(params: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Returns whether a request on prefill has a ticket. A request for a connector that pulls names no blocks, nor does
    an intent."""
    if not isinstance(params, Mapping) or not params.get("do_remote_decode") or params.get(TICKET_FOLLOWS) is True:
        return False
    return any(params.get(name) is not None for name in ("ticket_id", "remote_block_ids"))


def expects_ticket(params: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Returns whether a request on prefill comes before decode's ticket: from a router that asks prefill first, or for
    an intent."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode")) and not carries_ticket(params)
