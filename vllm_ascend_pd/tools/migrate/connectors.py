# SPDX-License-Identifier: Apache-2.0
"""Turns vllm-ascend's `--kv-transfer-config` into this connector's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.connector.setup import asked_before
from vllm_ascend_pd.core.config import CONNECTOR, ConfigError, parse_config
from vllm_ascend_pd.tools.migrate.changes import Change, ChangeKind
from vllm_ascend_pd.tools.migrate.command import CommandError

LAYERWISE = "MooncakeLayerwiseConnector"
PULLING = (
    "MooncakeConnectorV1",
    "MooncakeConnector",
    "MooncakeHybridConnector",
    # From vllm-ascend 0.30 on.
    "MooncakeConnectorV2",
    "MooncakePullConnector",
)
REPLACED = (LAYERWISE, *PULLING)
_MULTI = "MultiConnector"

# Kinds of connectors without a counterpart here, and what they are.
_OTHERS = {
    "AscendStoreConnector": "a KV pool",
    "MooncakeConnectorStoreV1": "a KV pool",
    "UCMConnector": "a KV pool",
    "LMCacheAscendConnector": "a KV pool",
    "OffloadingConnector": "offloading to host memory",
    "SimpleCPUOffloadConnector": "offloading to host memory",
    "CPUOffloadingConnector": "offloading to host memory",
    "RecomputeCPUOffloadConnector": "offloading of preempted requests to host memory",
    "PreemptOffloadConnector": "offloading of preempted requests to host memory",
    "MooncakeD2RHConnectorV1": "KV of prompts in decode's host memory",
    "SfaRemoteD2HConnector": "KV of prompts in decode's host memory",
}

# Keys beside kv_connector_extra_config that are not needed, and why.
_TOP_LEFT_OUT = {
    "kv_connector_module_path": "the package registers its connector itself",
    "engine_id": "vLLM makes a new one at every start, so that a restarted engine is not taken for the old one",
    "kv_rank": "nothing reads it",
    "kv_ip": "nothing reads it: engines listen on VLLM_HOST_IP",
    "kv_parallel_size": "nothing reads it",
    "kv_buffer_device": "nothing reads it",
    "kv_buffer_size": "nothing reads it",
}
_EXTRA_LEFT_OUT = {
    "use_ascend_direct": "on NPUs Mooncake's protocol is `ascend` anyway",
    "prefill": "the other side's sizes are discovered at first contact",
    "decode": "the other side's sizes are discovered at first contact",
}
_EXTRA_KEPT = ("tls_config", "ascend_local_comm_res_path")


@dataclass(frozen=True)
class Translated:
    """Ours for a `--kv-transfer-config`."""

    was: tuple[str, ...]
    # This connector's entry. Empty if no connector of the given configuration has a counterpart.
    ours: dict[str, Any]
    # The MultiConnector that it is in.
    multi: dict[str, Any] | None
    changes: tuple[Change, ...]

    def whole(self, ours: dict[str, Any]) -> dict[str, Any]:
        """Returns the new configuration with this entry."""
        if self.multi is None:
            return ours
        extra = self.multi["kv_connector_extra_config"]
        listed = [ours if entry.get("kv_connector") == CONNECTOR else entry for entry in extra["connectors"]]
        return {**self.multi, "kv_connector_extra_config": {**extra, "connectors": listed}}


def translate(old: Mapping[str, Any]) -> Translated:
    """Raises CommandError."""
    names, entries = connectors(old)
    replaced = [entry for entry in entries if entry.get("kv_connector") in REPLACED]
    if not replaced:
        return Translated(names, {}, None, (_nothing_replaced(names),))
    changes: list[Change] = []
    ours = _entry(replaced[0], changes)
    if len(replaced) > 1:
        found = " and ".join(str(entry["kv_connector"]) for entry in replaced)
        changes.append(Change(ChangeKind.STOPS, _MULTI, f"it has {found}: which one transfers prompts?"))
    multi = _multi(old, entries, ours, changes) if old.get("kv_connector") == _MULTI else None
    return Translated(names, ours, multi, tuple(changes))


def connectors(old: Mapping[str, Any]) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Returns the names and the entries of a configuration's connectors, in order. Raises CommandError."""
    entries, extra = [dict(old)], old.get("kv_connector_extra_config")
    if old.get("kv_connector") == _MULTI and isinstance(extra, dict):
        listed = extra.get("connectors") or []
        entries = [dict(entry) for entry in listed if isinstance(entry, dict)]
    if wrong := [each for each in entries if not isinstance(each.get("kv_connector_extra_config") or {}, dict)]:
        raise CommandError(f"kv_connector_extra_config of {wrong[0].get('kv_connector')} is no JSON object")
    return tuple(str(entry.get("kv_connector")) for entry in entries), entries


def _nothing_replaced(names: tuple[str, ...]) -> Change:
    if CONNECTOR in names:
        return Change(ChangeKind.STOPS, CONNECTOR, "the command has this connector already")
    if not names or names == ("None",):
        return Change(ChangeKind.STOPS, "--kv-transfer-config", "the command has none, so nothing is to be replaced")
    kinds = ", ".join(f"{name} ({_OTHERS.get(name, 'not known to this command')})" for name in names)
    why = "it has no counterpart: this connector sends prompts from prefill to decode engines. Keep the command"
    return Change(ChangeKind.STOPS, kinds, why)


def _entry(old: Mapping[str, Any], changes: list[Change]) -> dict[str, Any]:
    name, role = str(old["kv_connector"]), str(old.get("kv_role"))
    ours: dict[str, Any] = {"kv_connector": CONNECTOR}
    changes.append(Change(ChangeKind.MEANING, name, _meaning(name)))
    for key, value in old.items():
        if key in _TOP_LEFT_OUT:
            changes.append(Change(ChangeKind.LEFT_OUT, key, _TOP_LEFT_OUT[key]))
        elif key == "kv_port" and role == "kv_producer":
            why = "prefill needs none: decode's is enough, and on one host both would want the same port"
            changes.append(Change(ChangeKind.LEFT_OUT, key, why))
        elif key not in ("kv_connector", "kv_connector_extra_config"):
            ours[key] = int(value) if key == "kv_port" and str(value).isdecimal() else value
    if role not in ("kv_producer", "kv_consumer"):
        why = f"is {role}: an engine prefills (kv_producer) or decodes (kv_consumer)"
        changes.append(Change(ChangeKind.STOPS, "kv_role", why))
    elif role == "kv_consumer":
        why = "decode listens on this port plus its data-parallel index, one port per engine instead of one per rank"
        changes.append(Change(ChangeKind.MEANING, "kv_port", why))
    extra = _extra(old.get("kv_connector_extra_config") or {}, changes)
    why = (
        "one file that engines and proxies share must lie on each host: make it once with `vllm-ascend-pd secret`, and "
        "copy it to the same path"
    )
    changes.append(Change(ChangeKind.CHECK, "secret", why))
    return {**ours, "kv_connector_extra_config": extra} if extra else ours


def _extra(old: Mapping[str, Any], changes: list[Change]) -> dict[str, Any]:
    extra = {}
    for key, value in old.items():
        if key in _EXTRA_KEPT:
            extra[key] = value
        else:
            why = _EXTRA_LEFT_OUT.get(key, "has no counterpart here (docs/configuration.md lists all keys)")
            changes.append(Change(ChangeKind.LEFT_OUT, key, why))
    try:
        parse_config(extra)
    except ConfigError as error:
        changes.append(Change(ChangeKind.STOPS, "kv_connector_extra_config", " ".join(str(error).split())))
    return extra


def _meaning(name: str) -> str:
    if name == LAYERWISE:
        return f"becomes {CONNECTOR}: pushes layers as before, but only with decode's leave; change both sides at once"
    return (
        f"becomes {CONNECTOR}: prefill pushes each layer while it computes, where decode pulled them all afterwards. "
        "Requests go to decode first; change both sides and the proxy at once"
    )


def _multi(
    old: Mapping[str, Any], entries: list[dict[str, Any]], ours: dict[str, Any], changes: list[Change]
) -> dict[str, Any]:
    others = [entry for entry in entries if entry.get("kv_connector") not in REPLACED]
    listed = [ours if entry.get("kv_connector") in REPLACED else entry for entry in entries]
    for other in others:
        name = str(other.get("kv_connector"))
        changes.append(Change(ChangeKind.CHECK, name, "stays as it is beside this connector"))
    extra = dict(old.get("kv_connector_extra_config") or {})
    if ours.get("kv_role") == "kv_consumer" and asked_before(_MULTI, {"connectors": listed}):
        listed = [ours, *others]
        why = f"{CONNECTOR} is first now: vLLM asks connectors in this order, and takes the first that has any token"
        changes.append(Change(ChangeKind.CHANGED, "connectors", why))
    return {**old, "kv_connector_extra_config": {**extra, "connectors": listed}}
