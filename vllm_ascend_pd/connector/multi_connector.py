# SPDX-License-Identifier: Apache-2.0
"""A warning for decode engines whose MultiConnector asks other connectors before this one.

vLLM takes the first connector that has any token of a prompt. If a pool before this connector has 1 % of a prompt,
decode computes the other 99 % itself, and prefill is not asked.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

CONNECTOR = "LayerwisePushConnector"


def is_being_built() -> bool:
    """Whether a MultiConnector's constructor is running in this thread, so that other connectors may be beside ours.

    vLLM tells a scheduler's connector nothing of the others.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not MultiConnector.__init__.__code__:
        frame = frame.f_back
    return frame is not None


def asked_before(kv_connector: str | None, extra_config: Mapping[str, Any]) -> list[str]:
    """Returns the names of the connectors before this one. `extra_config`: of the MultiConnector."""
    if kv_connector != "MultiConnector":
        return []
    entries = extra_config.get("connectors")
    if not isinstance(entries, list):
        return []
    names = [str(entry.get("kv_connector")) if isinstance(entry, Mapping) else "?" for entry in entries]
    return names[: names.index(CONNECTOR)] if CONNECTOR in names else []


def warning(before: Sequence[str]) -> str:
    """Returns the warning for a decode engine. `before`: names of the connectors before this one."""
    return (
        f"the MultiConnector asks {', '.join(before)} before {CONNECTOR}: if they have a part of a "
        f"prompt, decode computes the rest, and prefill computes nothing. Put {CONNECTOR} first in `connectors` on "
        "decode"
    )


def warn_if_asked_later() -> None:
    """Logs the warning if it applies, once per engine.

    Call it while vLLM builds a decode engine's worker. Only then can a connector read the whole engine's configuration,
    with the MultiConnector's.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.kv_transfer_config
    if config is None or transfer is None or config.parallel_config.rank != 0:
        return
    if before := asked_before(transfer.kv_connector, transfer.kv_connector_extra_config):
        logger.warning("%s", warning(before))
