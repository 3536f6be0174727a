# SPDX-License-Identifier: Apache-2.0
"""Builds `--kv-transfer-config` from a few options, and checks it with the connector's own configuration."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_pd.core.config import ConfigError, parse_config
from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist


class EngineSide(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class ConnectorOptionsError(ValueError):
    """Options that contradict each other. The message is for the operator."""

    def __init__(self, message: str, key: str = "extra") -> None:
        super().__init__(message)
        self.key = key
        """The key of an engine in hosts.yaml that sets the option."""


_KV_ROLES = {EngineSide.PREFILL: "kv_producer", EngineSide.DECODE: "kv_consumer"}


@dataclass(frozen=True)
class ConnectorOptions:
    """The connector's options of one engine. Empty or None means the default of `ConnectorConfig`."""

    role: EngineSide
    kv_port: int | None = None
    engine_id: str | None = None
    load_failure_policy: str | None = None
    metaservers: tuple[str, ...] = ()
    decode_hosts: tuple[str, ...] = ()
    metaserver_token_file: str | None = None
    side_channel_key_file: str | None = None
    ticket_secret_file: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """More keys of `kv_connector_extra_config`."""
    beside: dict[str, Any] | None = None
    """The entry of another connector, such as a KV pool's, in a MultiConnector."""

    def config(self) -> dict[str, Any]:
        """The value of `--kv-transfer-config`. Raises ConnectorOptionsError."""
        self._check_side()
        extra = {
            "metaserver_allowlist": list(self.metaservers),
            "decode_allowlist": list(self.decode_hosts),
            "metaserver_token_file": self.metaserver_token_file,
            "side_channel_key_file": self.side_channel_key_file,
            "ticket_secret_file": self.ticket_secret_file,
        }
        extra = {name: value for name, value in extra.items() if value}
        if twice := sorted(extra.keys() & self.extra.keys()):
            raise ConnectorOptionsError(f"--extra {twice[0]}: use the script's own option for this key")
        extra |= self.extra
        try:
            Allowlist(parse_config(extra).metaserver_allowlist, "localhost")
            HostList(self.decode_hosts, "")
        except ConfigError as error:
            raise ConnectorOptionsError(str(error)) from None
        except ValueError as error:
            raise ConnectorOptionsError(str(error)) from None
        ours: dict[str, Any] = {"kv_connector": "LayerwisePushConnector", "kv_role": _KV_ROLES[self.role]}
        if self.kv_port is not None:
            ours["kv_port"] = self.kv_port
        if self.engine_id is not None:
            ours["engine_id"] = self.engine_id
        if extra:
            ours["kv_connector_extra_config"] = extra
        whole = ours if self.beside is None else self._multi(ours, self.beside)
        if self.load_failure_policy is not None:
            whole["kv_load_failure_policy"] = self.load_failure_policy
        return whole

    def _multi(self, ours: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
        """This connector comes first: on decode it must be the first one that has a handshake."""
        if beside.get("kv_connector") in (None, "LayerwisePushConnector", "MultiConnector"):
            raise ConnectorOptionsError("the other connector's file must be one JSON object with its kv_connector")
        other = {"kv_role": _KV_ROLES[self.role], **beside}
        whole: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": _KV_ROLES[self.role]}
        if self.engine_id is not None:
            whole["engine_id"] = self.engine_id
        return whole | {"kv_connector_extra_config": {"connectors": [ours, other]}}

    def _check_side(self) -> None:
        """Refuses options that have no meaning on this side."""
        if self.role is EngineSide.PREFILL:
            given = {
                "--kv-port": self.kv_port,
                "--metaserver": self.metaservers,
                "--metaserver-token": self.metaserver_token_file,
                "--load-failure-policy": self.load_failure_policy,
            }
            reason = "only for decode; prefill accepts no connections and posts no tickets"
        else:
            given = {"--decode-host": self.decode_hosts}
            reason = "only for prefill; decode connects to no decode engine"
        for option, value in given.items():
            if value:
                raise ConnectorOptionsError(f"{option}: {reason}", option.removeprefix("--").replace("-", "_"))


def parse_extra(entries: list[str]) -> dict[str, Any]:
    """Parses `KEY=VALUE` pairs. A value that is not JSON is a string. Raises ConnectorOptionsError."""
    extra = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals:
            raise ConnectorOptionsError(f"--extra {entry}: must be KEY=VALUE")
        try:
            extra[key] = json.loads(value)
        except json.JSONDecodeError:
            extra[key] = value
    return extra
