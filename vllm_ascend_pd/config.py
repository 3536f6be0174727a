# SPDX-License-Identifier: Apache-2.0
"""`kv_connector_extra_config`, parsed and checked once.

Every key has a default that works; an unknown key or a value of the wrong type is an error that says so.
"""

import difflib
import math
from typing import Any

import msgspec


class ConfigError(ValueError):
    """A `kv_transfer_config` this connector cannot work with."""


class PeerParallel(msgspec.Struct, frozen=True):
    """Parallel sizes of an engine as vllm-ascend's connector wants them declared. Here they are found out at
    first contact; declared ones are only checked."""

    tp_size: int | None = None
    dp_size: int | None = None
    pp_size: int | None = None


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The connection to the metaserver, with vllm-ascend's names. Paths of PEM files: own certificate and key for
    mutual TLS, and the authority that signed the metaserver's certificate. Used only with `ssl_enable`."""

    ssl_enable: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None

    def __post_init__(self) -> None:
        if not self.ssl_enable and (self.ssl_certfile or self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("`tls_config` names files, but `ssl_enable` is not true")


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times are seconds, sizes bytes.

    transfer_timeout_s: from issuing a ticket until its KV must have arrived, prefill's queue included.
    settle_timeout_s: after prefill ended, how long a ticket nobody is writing for may stay open.
    lease_s: how long a grant lasts unless renewed; bounds how long a dead prefill engine holds D's blocks.
    write_timeout_s: longest time one batch of the transfer engine may take.
    grant_timeout_s: how long a prefill rank asks for a grant before it gives the ticket up.
    control_timeout_s: longest wait for an answer on the side channel.
    collective_timeout_s: longest time of one all-to-all.
    idle_wait_s: with nothing to compute, a step waits this long for transfers before it returns.
    max_batch_descriptors, max_batch_bytes: limits of one batch of the transfer engine.
    staging_slots: layers that may be in regrouped form at once, each of one step's tokens.
    push_queue_size: layers waiting to be sent to one decode engine; more make the step wait.
    metaserver_allowlist: `scheme://host[:port][/path]` a ticket may be posted to; empty: this host only.
    metaserver_token_file: file with the bearer token sent to the metaserver.
    max_pending_tickets: tickets waiting for the metaserver's answer; more are refused at once.
    """

    transfer_timeout_s: float = 480.0
    settle_timeout_s: float = 30.0
    lease_s: float = 20.0
    write_timeout_s: float = 10.0
    grant_timeout_s: float = 20.0
    control_timeout_s: float = 5.0
    collective_timeout_s: float = 60.0
    idle_wait_s: float = 0.002
    max_batch_descriptors: int = 512
    max_batch_bytes: int = 64 << 20
    staging_slots: int = 4
    push_queue_size: int = 4096
    metaserver_allowlist: tuple[str, ...] = ()
    metaserver_connect_timeout_s: float = 5.0
    metaserver_max_connections: int = 256
    metaserver_retries: int = 3
    metaserver_token_file: str | None = None
    max_pending_tickets: int = 4096
    transfer_protocol: str | None = None
    prefill: PeerParallel | None = None
    decode: PeerParallel | None = None
    tls_config: TlsConfig | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not 0 < value < math.inf and name != "metaserver_retries":
                raise ValueError(f"`{name}` must be positive and finite, not {value}")
        if self.metaserver_retries < 0:
            raise ValueError(f"`metaserver_retries` must not be negative, not {self.metaserver_retries}")
        # Upper bounds: what the messages that carry these times (or multiples of them) allow.
        if not 1.0 <= self.lease_s <= 86400.0:
            raise ValueError(f"`lease_s` must be from 1 second to a day, not {self.lease_s}")
        if self.write_timeout_s > 600.0:
            raise ValueError(f"`write_timeout_s` must be at most 600 seconds, not {self.write_timeout_s}")


def parse_config(extra: dict[str, Any]) -> ConnectorConfig:
    """Raises ConfigError naming the key, and for an unknown one the nearest known key."""
    known = ConnectorConfig.__struct_fields__
    for key in extra:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(f"kv_connector_extra_config: unknown key `{key}`; did you mean `{near[0]}`?")
    try:
        return msgspec.convert(extra, ConnectorConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
