# SPDX-License-Identifier: Apache-2.0
"""What a proxy says of its engines and of failed attempts, by `/health` and `/metrics`."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from harness.plain_http import PLAIN_HTTP

ROLES = ("prefill", "decode")
_SERVING = ("healthy", "failing")


def engine_states(proxy: str) -> dict[str, dict[str, str]]:
    """Returns the state of each engine with its reason, by role and URL."""
    health = httpx.get(f"{proxy}/health", timeout=10, **PLAIN_HTTP).json()
    return {role: health[role] for role in ROLES}


def withheld(proxy: str) -> dict[str, dict[str, str]]:
    """Returns those that get no requests, or get them only if no other is left."""
    return {
        role: {url: state for url, state in states.items() if not state.startswith(_SERVING)}
        for role, states in engine_states(proxy).items()
    }


def counted(proxy: str) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Returns the retries of each role, and the failed attempts by role and kind."""
    text = httpx.get(f"{proxy}/metrics", timeout=10, **PLAIN_HTTP).text
    retries, failures = dict.fromkeys(ROLES, 0), {role: dict[str, int]() for role in ROLES}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            role = sample.labels.get("role", "")
            if sample.name == "vllm:kv_pd_proxy_retries_total":
                retries[role] = int(sample.value)
            elif sample.name == "vllm:kv_pd_proxy_failures_total" and sample.value:
                failures[role][sample.labels["kind"].replace("_", " ")] = int(sample.value)
    return retries, failures
