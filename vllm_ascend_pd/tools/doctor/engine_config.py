# SPDX-License-Identifier: Apache-2.0
"""Checks the configuration of an engine on this machine, as given to `vllm serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vllm_ascend_pd.connector.setup import CONNECTOR, asked_before
from vllm_ascend_pd.connector.setup import warning as order_warning
from vllm_ascend_pd.core.config import ConfigError, ConnectorConfig, parse_config
from vllm_ascend_pd.core.hosts import decode_hosts, prefill_hosts
from vllm_ascend_pd.core.text import UNREADABLE, one_line
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist
from vllm_ascend_pd.tools.doctor.finding import Finding, error, note, ok, warning
from vllm_ascend_pd.tools.vllm_serve import PLUGIN, PLUGINS, plugins_with_ours
from vllm_ascend_pd.transport.keys import SecretFileError, load_keys, read_text_secret, read_ticket_secret
from vllm_ascend_pd.transport.own_networks import own_networks

DEFAULT_KV_PORT = 14579
"""vLLM's (`vllm/config/kv_transfer.py`)."""

_ROLES = ("kv_producer", "kv_consumer")
_ACTION = "correct --kv-transfer-config, here and where the engine starts"


class UsageError(ValueError):
    """An option is invalid."""


class KvTransferConfig(msgspec.Struct, frozen=True):
    """The fields of vLLM's `KVTransferConfig` that the doctor reads."""

    kv_connector: str = ""
    kv_role: str = ""
    kv_port: int = DEFAULT_KV_PORT
    kv_connector_extra_config: dict[str, Any] = {}
    asked_before: tuple[str, ...] = ()
    """Connectors that a MultiConnector asks before this one. `read` sets it."""


def read(text: str) -> KvTransferConfig:
    """Parses `--kv-transfer-config`. Returns this connector's entry of a `MultiConnector`. Raises UsageError."""
    try:
        # Not strict: numbers may be strings of digits, as for vLLM.
        config = msgspec.json.decode(text, type=KvTransferConfig, strict=False)
        before = tuple(asked_before(config.kv_connector, config.kv_connector_extra_config))
        if config.kv_connector == "MultiConnector":
            entries = config.kv_connector_extra_config.get("connectors", [])
            entries = msgspec.convert(entries, list[KvTransferConfig], strict=False)
            config = next((entry for entry in entries if entry.kv_connector == CONNECTOR), config)
    except (*UNREADABLE, UnicodeEncodeError) as problem:
        raise UsageError(f"--kv-transfer-config: {problem}") from None
    if not 0 < config.kv_port < 65536:
        raise UsageError(f"--kv-transfer-config: kv_port is {config.kv_port}")
    return msgspec.structs.replace(config, asked_before=before)


def judge_plugins(environment: Mapping[str, str]) -> list[Finding]:
    """Returns an error if VLLM_PLUGINS leaves out the plugin that brings the connector."""
    if (plugins := plugins_with_ours(environment)) is None:
        return []
    found = f"{PLUGINS} is {one_line(environment[PLUGINS], 200)!r}: without {PLUGIN}, vLLM has no {CONNECTOR}"
    return [error("config.plugins", found, f"set it to {one_line(plugins, 200)}, here and where the engine starts")]


def judge(config: KvTransferConfig | None, wanted: Sequence[str] = ()) -> tuple[list[Finding], ConnectorConfig]:
    """Returns the findings, also about secret files, and the connector's configuration, or its defaults if invalid.

    `wanted` are hosts of decode engines that a prefill engine must serve."""
    if config is None:
        unseen = "no --kv-transfer-config given: defaults are assumed, and its ports are not checked"
        return [note("config.connector", unseen)], ConnectorConfig()
    if config.kv_connector != CONNECTOR:
        found = f"kv_connector is {config.kv_connector!r}, which does not have {CONNECTOR}"
        return [error("config.connector", found, _ACTION)], ConnectorConfig()
    if config.kv_role not in _ROLES:
        found = f"kv_role is {config.kv_role!r}: must be {' or '.join(_ROLES)}"
        return [error("config.connector", found, _ACTION)], ConnectorConfig()
    try:
        extra = parse_config(config.kv_connector_extra_config)
    except ConfigError as problem:
        return [error("config.connector", " ".join(str(problem).split()), _ACTION)], ConnectorConfig()
    findings = [ok("config.connector", f"{config.kv_role}, all keys of kv_connector_extra_config are valid")]
    if config.kv_role == "kv_producer":
        admitted = decode_hosts(extra.decode_allowlist, "localhost", bool(extra.ticket_secret_file), own_networks())
        said = f"decode engines at {admitted.admitted} are served; tickets for other hosts are refused"
        refused = [host for host in wanted if admitted.refusal(host) is not None]
        if refused:
            action = "name them in decode_allowlist of prefill, or have tickets signed (ticket_secret_file)"
            findings.append(
                error("config.decode_hosts", f"{said}, including those for {one_line(', '.join(refused), 400)}", action)
            )
        else:
            findings.append(ok("config.decode_hosts", said))
    else:
        findings += _judge_ticket_routes(extra)
    if config.asked_before and config.kv_role == "kv_consumer":
        action = f"put {CONNECTOR} first in the MultiConnector's `connectors` on decode"
        findings.append(warning("config.order", order_warning(config.asked_before), action))
    return [*findings, *_secrets(extra)], extra


def _judge_ticket_routes(extra: ConnectorConfig) -> list[Finding]:
    """Where a decode engine's tickets may go."""
    try:
        proxies = Allowlist(extra.metaserver_allowlist, "localhost").admitted
    except ValueError as problem:
        return [error("config.metaservers", one_line(str(problem), 400), _ACTION)]
    engines = prefill_hosts(extra.prefill_allowlist, "localhost", own_networks()).admitted
    said = f"tickets are posted to proxies at: {proxies}; requests that name others are refused"
    action = "name the proxy's --metaserver-url in metaserver_allowlist if it runs on another host"
    return [
        ok("config.metaservers", said) if extra.metaserver_allowlist else note("config.metaservers", said, action),
        ok("config.prefill_hosts", f"tickets are offered to prefill engines at {engines}; no others are asked"),
    ]


def _secrets(config: ConnectorConfig) -> list[Finding]:
    findings = []
    for name, read_file in (
        ("side_channel_key_file", load_keys),
        ("ticket_secret_file", read_ticket_secret),
        ("metaserver_token_file", read_text_secret),
    ):
        path = getattr(config, name)
        if path is None:
            continue
        try:
            read_file(path)
        except SecretFileError as problem:
            action = "create it with `vllm-ascend-pd keygen`, copy it to all hosts, owner: vLLM's user, mode 0600"
            findings.append(error(f"config.{name}", str(problem), action))
        else:
            findings.append(ok(f"config.{name}", f"{path} can be used"))
    return findings
