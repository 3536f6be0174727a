# SPDX-License-Identifier: Apache-2.0
"""Signs addresses that a router carries from one process of the cluster to another.

Routers cannot sign, and may hand on what a client wrote. So a process checks the signature before it connects: only
processes with the cluster's secret can have made it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_ascend_pd.core.secret import MAX_SIGNATURE_CHARS, Secret, Use


def signature_in(params: Mapping[str, Any], key: str) -> str:
    """Returns the signature that a request's `kv_transfer_params` carry; "" for anything that cannot be one."""
    value = params.get(key)
    return value if isinstance(value, str) and len(value) <= MAX_SIGNATURE_CHARS else ""


def sign_listener(secret: Secret, engine_id: str, host: str, port: int, transfer_id: str | None = None) -> str:
    """Signs where a prefill engine takes tickets. `transfer_id`: the prompt that they are for; None: any prompt."""
    return secret.sign(Use.TICKET_LISTENER, _listener(engine_id, host, port, transfer_id))


def is_signed_listener(
    secret: Secret, signature: str, engine_id: str, host: str, port: int, transfer_id: str | None = None
) -> bool:
    """Returns whether `sign_listener` made `signature` for the same values. The texts must be printable."""
    return secret.accepts(Use.TICKET_LISTENER, _listener(engine_id, host, port, transfer_id), signature)


def _listener(engine_id: str, host: str, port: int, transfer_id: str | None) -> bytes:
    return msgspec.msgpack.encode((engine_id, host, port, transfer_id))


def sign_metaserver(secret: Secret, url: str) -> str:
    """Signs the URL where a proxy takes tickets. `url`: in ASCII."""
    return secret.sign(Use.METASERVER, url.encode("ascii"))


def is_signed_metaserver(secret: Secret, signature: str, url: str) -> bool:
    """Returns whether `sign_metaserver` made `signature` for the same URL. `url`: in ASCII."""
    return secret.accepts(Use.METASERVER, url.encode("ascii"), signature)


def metaserver_tokens(secret: Secret) -> list[str]:
    """Returns the bearer tokens of a metaserver whose URL is signed, that of the secret in use first."""
    return [key.hex() for key in secret.keys(Use.METASERVER_TOKEN)]
