# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM on which this package's connector depends. `migrate` and `doctor` share them."""

from __future__ import annotations

from collections.abc import Mapping

KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""vLLM's name for each side."""
KV_PORT = 14579
"""vLLM's default (`vllm/config/kv_transfer.py`)."""
PLUGIN = "vllm_ascend_pd"
PLUGINS = "VLLM_PLUGINS"
REPLACES_CONNECTOR = "kv-offloading-size"
"""The option with which vLLM replaces every connector, without a word (`VllmConfig._post_init_kv_transfer_config`)."""


def plugins_with_ours(environment: Mapping[str, str]) -> str | None:
    """Returns what VLLM_PLUGINS must be, None if it is right: unset, or with this package's plugin."""
    given = environment.get(PLUGINS)
    if given is None or PLUGIN in given.split(","):
        return None
    return f"{given},{PLUGIN}" if given else PLUGIN
