# SPDX-License-Identifier: Apache-2.0
"""How to reach the metaserver."""

from __future__ import annotations

import msgspec


class MetaserverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach the metaserver. Times in seconds."""

    allowlist: tuple[str, ...] = ()
    """Entries `scheme://host[:port][/path-prefix]`. Without a port, the scheme's own; without a path, `/v1/metaserver`
    alone. Empty: `/v1/metaserver` on any port of this host's loopback addresses and own address."""
    connect_timeout_s: float = 5.0
    """To open a connection, the TLS handshake included."""
    read_timeout_s: float | None = None
    """How long the metaserver may send nothing. None: until the post's deadline, since the answer comes only when
    prefill ends."""
    deadline_s: float = 300.0
    """From `post` to the outcome, with waiting and retries. Starts again each time the metaserver answers that the
    ticket still waits for prefill."""
    longest_s: float = 3900.0
    """From `post` to the outcome in any case."""
    ask_every_s: float = 30.0
    """Between two questions to the metaserver about waiting tickets. Shorter if `deadline_s` is short."""
    max_connections: int = 256
    """Posts that have a connection at a time. Further ones wait."""
    max_pending: int = 4096
    """Posts without an outcome. Further ones fail at once."""
    retries: int = 5
    """Attempts after the first one. With the pauses below, all attempts take 1.5 to 3.1 s, longer than a proxy's
    restart."""
    backoff_base_s: float = 0.1
    """The longest pause before the first retry. It doubles with each further one."""
    backoff_max_s: float = 2.0
    """The longest pause before any retry."""
    ca_file: str | None = None
    """Certificate authorities to trust instead of the system's."""
    cert_file: str | None = None
    """This engine's certificate, for mutual TLS."""
    key_file: str | None = None
    """The private key of that certificate."""
    key_password: str | None = None
    """The key's password."""
    token_file: str | None = None
    """The file with the bearer token to send. It is read once."""
    recomputes: bool = False
    """Whether `kv_load_failure_policy` is recompute: this engine computes a prompt whose KV does not arrive. Sent with
    each ticket."""

    def __post_init__(self) -> None:
        positive = {
            "connect_timeout_s": self.connect_timeout_s,
            "deadline_s": self.deadline_s,
            "longest_s": self.longest_s,
            "ask_every_s": self.ask_every_s,
            "max_connections": self.max_connections,
            "max_pending": self.max_pending,
        }
        for name, value in positive.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.retries < 0 or self.backoff_base_s < 0 or self.backoff_max_s < 0:
            raise ValueError("retries, backoff_base_s and backoff_max_s must not be negative")
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("key_file is set without cert_file")

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "key_password")
        return f"MetaserverSettings({', '.join(shown)})"
