# SPDX-License-Identifier: Apache-2.0
"""Which connectors a MultiConnector asks before this one.

vLLM takes the first connector that has any token of a prompt. On a decode engine, a pool before this connector that has
1 % of a prompt makes decode compute the other 99 % itself, and prefill is not asked.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

CONNECTOR = "LayerwisePushConnector"


def asked_before(kv_connector: str | None, extra_config: Mapping[str, Any]) -> list[str]:
    """The names of the connectors before this one, from the MultiConnector's own configuration."""
    if kv_connector != "MultiConnector":
        return []
    entries = extra_config.get("connectors")
    if not isinstance(entries, list):
        return []
    names = [str(entry.get("kv_connector")) if isinstance(entry, Mapping) else "?" for entry in entries]
    return names[: names.index(CONNECTOR)] if CONNECTOR in names else []


def warning(before: Sequence[str]) -> str:
    """What is said of a decode engine where another connector is asked first."""
    return (
        f"the MultiConnector asks {', '.join(before)} before {CONNECTOR}: of a prompt that it has in part, "
        f"decode computes the rest, and prefill nothing. Put {CONNECTOR} first in `connectors` on decode"
    )


def warn_if_asked_later() -> None:
    """Logs the warning where it applies, once per engine. Call it while vLLM builds a decode engine's worker: only
    then is the configuration of the whole engine at hand, the MultiConnector's included."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.kv_transfer_config
    if config is None or transfer is None or config.parallel_config.rank != 0:
        return
    if before := asked_before(transfer.kv_connector, transfer.kv_connector_extra_config):
        logger.warning("%s", warning(before))
