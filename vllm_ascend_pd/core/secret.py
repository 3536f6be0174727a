# SPDX-License-Identifier: Apache-2.0
"""The cluster's secret, and the keys that are derived from it.

All engines and proxies of a cluster have the same secret. Each use has a key of its own, so a signature made for one
use is worth nothing for another.

A secret is changed without a stop while each process knows two: the first is used to sign and by listeners, and
signatures of both are accepted.
"""

import hmac
from collections.abc import Sequence
from enum import Enum
from typing import Any

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

MIN_SECRET_BYTES = 32
"""The shortest secret: as long as the keys that are derived from it."""

MAX_SECRETS = 2
"""The secret in use, and the one that comes or goes."""

MAX_SIGNATURE_CHARS = 64
"""The longest signature: SHA-256 in hexadecimal digits."""

_KEY_BYTES = 32  # of SHA-256 and of CURVE


class Use(Enum):
    """What a key is for. The value is what HKDF calls `info`: changing one changes the key."""

    SIDE_CHANNEL_SERVER = b"vllm-ascend-pd side channel server 1"
    SIDE_CHANNEL_CLIENT = b"vllm-ascend-pd side channel client 1"
    TICKET = b"vllm-ascend-pd ticket 2"
    # Where prefill takes tickets. Routers carry it to decode.
    TICKET_LISTENER = b"vllm-ascend-pd ticket listener 1"
    # Where decode posts tickets. Our proxy sends it with a request.
    METASERVER = b"vllm-ascend-pd metaserver 1"
    # The bearer token that decode sends to a metaserver whose URL our proxy signed.
    METASERVER_TOKEN = b"vllm-ascend-pd metaserver token 1"
    # What an operator compares. It is shown, so it is used for nothing else.
    FINGERPRINT = b"vllm-ascend-pd fingerprint 1"


class Secret:
    """One or two secrets of a cluster, the one in use first. Neither `repr` nor pickling shows them."""

    __slots__ = ("_keys",)

    def __init__(self, lines: Sequence[bytes]) -> None:
        """Raises ValueError, without the content, for secrets that are too short, too many or the same."""
        if not 1 <= len(lines) <= MAX_SECRETS:
            raise ValueError(f"it holds {len(lines)} secrets: one, or two while the secret is changed")
        for line in lines:
            if len(line) < MIN_SECRET_BYTES:
                raise ValueError(f"{len(line)} bytes are too short for a secret: {MIN_SECRET_BYTES} at least")
        if len(set(lines)) < len(lines):
            raise ValueError("its two secrets are the same")
        self._keys = {use: [_derive(line, use) for line in lines] for use in Use}

    def keys(self, use: Use) -> list[bytes]:
        """Returns the keys of 32 bytes for `use`, one of each secret, that of the secret in use first."""
        return list(self._keys[use])

    def fingerprints(self) -> list[str]:
        """Returns 8 hexadecimal digits of each secret, that of the secret in use first. Hosts with the same secret
        have the same digits, which may be shown: they say nothing about a secret that is random."""
        return [key[:4].hex() for key in self._keys[Use.FINGERPRINT]]

    def sign(self, use: Use, content: bytes) -> str:
        """Returns the HMAC-SHA256 of `content` in hexadecimal digits, with the key of the secret in use."""
        return _signature(self._keys[use][0], content)

    def accepts(self, use: Use, content: bytes, signature: str) -> bool:
        """Returns whether `signature`, from outside, is that of `content` by one of the secrets."""
        given = signature.encode(errors="replace")
        return any(hmac.compare_digest(_signature(key, content).encode(), given) for key in self._keys[use])

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> Any:
        raise TypeError("a secret cannot be pickled")


def _signature(key: bytes, content: bytes) -> str:
    return hmac.digest(key, content, "sha256").hex()


def _derive(secret: bytes, use: Use) -> bytes:
    """RFC 5869, with SHA-256 and without a salt: the secret is random."""
    return HKDF(SHA256(), _KEY_BYTES, salt=None, info=use.value).derive(secret)
