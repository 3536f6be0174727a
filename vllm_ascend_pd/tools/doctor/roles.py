# SPDX-License-Identifier: Apache-2.0
"""Finds out what serves at a URL: this package's proxy, an engine with its connector, or another engine.

Metrics say it before the first request: each role has its own (`observe/stats.py`,
`proxy/operate/metrics.py`), all there from the start.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection

from vllm_ascend_pd.observe.stats import DECODE_METRICS, PREFILL_METRICS, PREFIX
from vllm_ascend_pd.tools.doctor.finding import Finding, error, note, ok, warning
from vllm_ascend_pd.tools.vllm_serve import REPLACES_CONNECTOR

PROXY_PREFIX = PREFIX + "proxy_"

_OF_BOTH = {*PREFILL_METRICS} & {*DECODE_METRICS}
_NAMES = re.compile(rb"^(?:# TYPE )?(vllm:\w+)", re.MULTILINE)
_OFFLOADS = re.compile(rb'^vllm:cache_config_info\{.*\bkv_offloading_size="(?!None")', re.MULTILINE)
"""vLLM's metric with all settings of its KV cache as labels."""


class ServerKind(enum.Enum):
    """What a server is. The values of PROXY, PREFILL and DECODE are the options' names."""

    PROXY = "proxy"
    PREFILL = "prefill"
    DECODE = "decode"
    OTHER_ENGINE = "other"

    @property
    def named(self) -> str:
        return _NAMED[self]


_NAMED = {
    ServerKind.PROXY: "`vllm-ascend-pd proxy`",
    ServerKind.PREFILL: "a prefill engine",
    ServerKind.DECODE: "a decode engine",
    ServerKind.OTHER_ENGINE: "a vLLM engine without this package's connector",
}
_KV_ROLES = {ServerKind.PREFILL: "kv_producer", ServerKind.DECODE: "kv_consumer"}


def kinds(metrics: bytes) -> frozenset[ServerKind]:
    """Returns the kinds of servers that have such metrics, none if the metrics do not show it."""
    names = {name.decode() for name in _NAMES.findall(metrics)}
    found = {
        kind
        for kind, theirs in ((ServerKind.PREFILL, PREFILL_METRICS), (ServerKind.DECODE, DECODE_METRICS))
        if any(name.startswith(PREFIX + metric.name) for name in names for metric in theirs if metric not in _OF_BOTH)
    }
    if any(name.startswith(PROXY_PREFIX) for name in names):
        found.add(ServerKind.PROXY)
    if not any(name.startswith(PREFIX) for name in names) and names:
        found.add(ServerKind.OTHER_ENGINE)
    return frozenset(found)


def offloads(metrics: bytes) -> bool:
    """Whether a vLLM engine with such metrics was started with --kv-offloading-size."""
    return _OFFLOADS.search(metrics) is not None


def judge(
    check: str,
    url: str,
    given: ServerKind,
    found: Collection[ServerKind],
    why: str,
    used: Collection[ServerKind],
    replaced: bool = False,
) -> Finding:
    """Judges whether `url` is the server that it was given as.

    found: what it is, as far as its metrics show it.
    why: why they do not show it.
    used: the roles in which the given proxies use it.
    replaced: it was started with the option with which vLLM replaces the connector.
    """
    if given in found:
        return ok(check, f"{url} is {given.named}")
    if not found and (not used or given in used or given is ServerKind.PROXY):
        action = "engines started with --disable-log-stats have no metrics: else check that the URL is the right one"
        found_nothing = f"cannot tell whether {url} is {given.named}: {why}"
        return note(check, found_nothing, "" if given is ServerKind.PROXY else action)
    kind = next(each for each in ServerKind if each in (found or used))
    said = f"{url} is given as --{given.value}, and " + ("is " if found else "the proxy uses it as ") + kind.named
    if kind is not ServerKind.OTHER_ENGINE:
        action = f"give it as --{kind.value}, and the URL of {given.named} as --{given.value}"
        if kind in _KV_ROLES and given in _KV_ROLES:
            action += f"; if it is to be {given.named}, start it with kv_role {_KV_ROLES[given]}"
            if given in used:
                action += f"; the proxy takes it for {given.named} too: correct its --prefill and --decode"
    elif given in _KV_ROLES and replaced:
        said += f". It was started with --{REPLACES_CONNECTOR}, with which vLLM replaces its connector"
        action = "start it without; to offload, too, list OffloadingConnector beside this one in a MultiConnector"
    elif given in _KV_ROLES:
        action = (
            f"start it with this connector and kv_role {_KV_ROLES[given]} (--kv-transfer-config), or give another URL"
        )
        if given in used:  # which works as long as prefill and decode have the same
            return warning(check, said, f"{action}; none of it if both sides have vllm-ascend's layerwise connector")
    else:
        action = "give the URL of `vllm-ascend-pd proxy`"
    return error(check, said, action)


def judge_no_proxy(check: str, url: str) -> Finding:
    """Judges a server given as --proxy that answers, but not like the proxy."""
    found = f"{url} is given as --proxy, but its /health and /metrics are not those of `vllm-ascend-pd proxy`"
    return error(check, found, "give the URL of the proxy itself, not of a server in front of it")
