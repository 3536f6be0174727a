# SPDX-License-Identifier: Apache-2.0
"""Checks the configuration of an engine on this machine, as given to `vllm serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_ascend_pd.connector.setup import asked_before
from vllm_ascend_pd.core.config import CONNECTOR, ConfigError, ConnectorConfig, parse_config
from vllm_ascend_pd.core.hosts import is_loopback
from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist
from vllm_ascend_pd.tools.doctor.report import Figure, Finding, error, note, ok, warning
from vllm_ascend_pd.tools.vllm_names import KV_PORT, KV_ROLES, PLUGIN, PLUGINS, plugins_with_ours
from vllm_ascend_pd.transport.secret_files import (
    SecretFileError,
    cluster_secret,
    default_secret_file,
    read_text_secret,
)

_ACTION = "correct --kv-transfer-config, here and where the engine starts"
_ONE_SECRET = (
    "make it once with `vllm-ascend-pd secret`, and copy the file to the same path on each host, owner: vLLM's user, "
    "mode 0600"
)


class KvTransferConfig(msgspec.Struct, frozen=True):
    """The fields of vLLM's `KVTransferConfig` that the doctor reads."""

    kv_connector: str = ""
    kv_role: str = ""
    kv_port: int = KV_PORT
    kv_connector_extra_config: dict[str, Any] = {}
    asked_before: tuple[str, ...] = ()
    """Connectors that a MultiConnector asks before this one. `read` sets it."""


def read(text: str) -> KvTransferConfig:
    """Parses `--kv-transfer-config`. Returns this connector's entry of a `MultiConnector`. Raises ValueError."""
    try:
        # Not strict: numbers may be strings of digits, as for vLLM.
        config = msgspec.json.decode(text, type=KvTransferConfig, strict=False)
        before = tuple(asked_before(config.kv_connector, config.kv_connector_extra_config))
        if config.kv_connector == "MultiConnector":
            entries = config.kv_connector_extra_config.get("connectors", [])
            entries = msgspec.convert(entries, list[KvTransferConfig], strict=False)
            config = next((entry for entry in entries if entry.kv_connector == CONNECTOR), config)
    except (*UNREADABLE, UnicodeEncodeError) as problem:
        raise ValueError(f"--kv-transfer-config: {problem}") from None
    if not 0 < config.kv_port < 65536:
        raise ValueError(f"--kv-transfer-config: kv_port is {config.kv_port}")
    return msgspec.structs.replace(config, asked_before=before)


def judge_plugins(environment: Mapping[str, str]) -> list[Finding]:
    """Returns an error if VLLM_PLUGINS leaves out the plugin that brings the connector."""
    if (plugins := plugins_with_ours(environment)) is None:
        return []
    found = f"{PLUGINS} is {environment[PLUGINS]!r}: without {PLUGIN}, vLLM has no {CONNECTOR}"
    return [error("config.plugins", found, f"set it to {plugins}, here and where the engine starts")]


def judge(config: KvTransferConfig | None, host: str) -> tuple[list[Finding], ConnectorConfig]:
    """Returns the findings, also about secret files, and the connector's configuration, or its defaults if invalid.

    `host`: this host's address as vLLM knows it, empty if it is not known.
    """
    check = "config.connector"
    if config is None:
        unseen = "no --kv-transfer-config given: defaults are assumed, and its ports are not checked"
        return [note(check, unseen), judge_secret(ConnectorConfig(), "")], ConnectorConfig()
    if config.kv_connector != CONNECTOR:
        found = f"kv_connector is {config.kv_connector!r}, which does not have {CONNECTOR}"
        return [error(check, found, _ACTION)], ConnectorConfig()
    try:
        if config.kv_role not in KV_ROLES.values():
            raise ConfigError(f"kv_role is {config.kv_role!r}: must be {' or '.join(KV_ROLES.values())}")
        extra = parse_config(config.kv_connector_extra_config)
        Allowlist(extra.peer_urls, "localhost")
    except (ConfigError, ValueError) as problem:
        return [error(check, str(problem), _ACTION)], ConnectorConfig()
    findings = [ok(check, f"{config.kv_role}, all keys of kv_connector_extra_config are valid")]
    if config.kv_role == "kv_consumer" and config.asked_before:
        found = (
            f"the MultiConnector asks {', '.join(config.asked_before)} before {CONNECTOR}: if they have a part of a "
            "prompt, decode computes the rest, and prefill computes nothing"
        )
        action = f"put {CONNECTOR} first in the MultiConnector's `connectors` on decode"
        findings.append(warning("config.order", found, action))
    return [*findings, judge_secret(extra, host), *_judge_token(extra)], extra


def judge_secret(extra: ConnectorConfig, host: str) -> Finding:
    """Judges the cluster's secret on this machine. Shows its fingerprint, by which two hosts are compared.

    `host`: where an engine would listen, empty if that is not known.
    """
    check, path = "config.secret", extra.secret_file or default_secret_file()
    try:
        secret = cluster_secret(extra.secret_file)
    except SecretFileError as problem:
        return error(check, str(problem), _ONE_SECRET)
    if secret is not None:
        first, *other = secret.fingerprints()
        both = f" in use, {other[0]} accepted" if other else ""
        return ok(check, f"{path}: fingerprint {first}{both}", fingerprint=first)
    found = f"there is no secret at {path}" if path else "there is no secret, and this user has no home folder for one"
    if extra.trust_network:
        return warning(check, f"{found}, and trust_network is set: whoever reaches an engine is trusted", _ONE_SECRET)
    if not host:
        return note(check, f"{found}: engines need one unless they listen on loopback")
    if is_loopback(host):
        return ok(check, f"{found}, and an engine on {host} needs none")
    return error(check, f"{found}, and others can reach an engine on {host}", _ONE_SECRET)


def _judge_token(extra: ConnectorConfig) -> list[Finding]:
    check, path = "config.metaserver_token_file", extra.metaserver_token_file
    if path is None:
        return []
    try:
        read_text_secret(path)
    except SecretFileError as problem:
        action = "give the token of the metaserver in a file, owner: vLLM's user, mode 0600"
        return [error(check, str(problem), action)]
    return [ok(check, f"{path} can be used")]


def judge_protocol(protocol: str, on_npu: bool, mooncake: Mapping[str, Figure]) -> Finding:
    """Judges whether the Mooncake that a process loads here has the engine's protocol.

    `mooncake`: the figures of `loading.mooncake`. What else keeps an engine from starting, the engine itself says.
    """
    check, leave_out = "config.protocol", "leave transfer_protocol out of kv_connector_extra_config"
    if (refusal := mooncake.get(f"no_{protocol}")) is not None:
        install = f"install the Mooncake of requirements/{'npu' if on_npu else 'cpu'}.txt"
        found = f"this Mooncake cannot move bytes by {protocol}: {refusal}"
        return error(check, found, f"{install}, or {leave_out}", protocol=protocol)
    if protocol not in ("ascend", "tcp", "rdma"):
        return error(check, f"transfer_protocol is {protocol!r}", "use ascend, tcp or rdma", protocol=protocol)
    if (protocol == "ascend") != on_npu:
        found = f"engines move bytes by {protocol}, but {'NPU memory needs ascend' if on_npu else 'ascend needs NPUs'}"
        return (warning if on_npu else error)(check, found, leave_out, protocol=protocol)
    return ok(check, f"engines move bytes by {protocol}", protocol=protocol)
