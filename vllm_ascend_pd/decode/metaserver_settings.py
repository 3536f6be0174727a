# SPDX-License-Identifier: Apache-2.0
"""How to reach the metaserver."""

from __future__ import annotations

import msgspec


class MetaserverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach the metaserver. Times in seconds."""

    allowlist: tuple[str, ...] = ()
    """`scheme://host[:port][/path-prefix]`; without a port the scheme's own, without a path `/v1/metaserver`
    alone. Empty: `/v1/metaserver` on any port of this host's loopback addresses and own address."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float | None = None
    """None: as long as the post may last, since the answer is held back until prefill has ended."""
    write_timeout_s: float = 10.0
    pool_timeout_s: float = 10.0
    deadline_s: float = 300.0
    """For a post, from `post` to its outcome, with waiting and retries. Begins anew each time that the metaserver says
    that the ticket still waits for prefill."""
    longest_s: float = 3900.0
    """For a post all in all, whatever the metaserver says."""
    ask_every_s: float = 30.0
    """How often the metaserver is asked which tickets wait. Less where `deadline_s` is short."""
    max_connections: int = 256
    """Posts under way at once; others wait."""
    max_pending: int = 4096
    """Posts without an outcome; further ones fail at once."""
    retries: int = 5
    """With the pauses below they last 1.5 to 3.1 s: a proxy that restarts is not noticed."""
    backoff_base_s: float = 0.1
    backoff_max_s: float = 2.0
    ca_file: str | None = None
    """Certificate authorities to trust instead of the system's."""
    cert_file: str | None = None
    """This engine's certificate, for mutual TLS."""
    key_file: str | None = None
    key_password: str | None = None
    token_file: str | None = None
    """Its content is sent as bearer token."""
    recomputes: bool = False
    """What the metaserver is told of `kv_load_failure_policy`: whether this engine computes what does not come."""

    def __post_init__(self) -> None:
        positive = {
            "connect_timeout_s": self.connect_timeout_s,
            "write_timeout_s": self.write_timeout_s,
            "pool_timeout_s": self.pool_timeout_s,
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
