# SPDX-License-Identifier: Apache-2.0
"""`--kv-transfer-config` from a few options: checked by the connector's own config before an engine starts."""

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
    """Options that make no sense together, in words for the operator."""


_KV_ROLES = {EngineSide.PREFILL: "kv_producer", EngineSide.DECODE: "kv_consumer"}


@dataclass(frozen=True)
class ConnectorOptions:
    """What an engine's connector is told. Empty or None: the connector's default, see `ConnectorConfig`."""

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
    """More of `kv_connector_extra_config`."""
    beside: dict[str, Any] | None = None
    """Another connector's entry below a MultiConnector, a KV pool's."""

    def config(self) -> dict[str, Any]:
        """The value of `--kv-transfer-config`. Raises TransferError."""
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
            raise ConnectorOptionsError(f"--extra {twice[0]}: there is an option for it")
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
        """Ours first: on decode the first connector with a handshake must be this one."""
        if beside.get("kv_connector") in (None, "LayerwisePushConnector", "MultiConnector"):
            raise ConnectorOptionsError("the other connector's file must be one JSON object with its kv_connector")
        other = {"kv_role": _KV_ROLES[self.role], **beside}
        whole: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": _KV_ROLES[self.role]}
        if self.engine_id is not None:
            whole["engine_id"] = self.engine_id
        return whole | {"kv_connector_extra_config": {"connectors": [ours, other]}}

    def _check_side(self) -> None:
        """Some options mean nothing on one of the sides, so whoever gives them there expects something else."""
        if self.role is EngineSide.PREFILL:
            given = {
                "--kv-port": self.kv_port,
                "--metaserver": self.metaservers,
                "--metaserver-token": self.metaserver_token_file,
                "--load-failure-policy": self.load_failure_policy,
            }
            reason = "prefill takes no connections and posts no tickets; it is decode's"
        else:
            given = {"--decode-host": self.decode_hosts}
            reason = "decode connects to no decode engine; it is prefill's"
        for option, value in given.items():
            if value:
                raise ConnectorOptionsError(f"{option}: {reason}")


def parse_extra(entries: list[str]) -> dict[str, Any]:
    """`KEY=VALUE` pairs, each value JSON or else a string. Raises TransferError."""
    extra = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals:
            raise ConnectorOptionsError(f"--extra {entry}: give KEY=VALUE")
        try:
            extra[key] = json.loads(value)
        except json.JSONDecodeError:
            extra[key] = value
    return extra
