# SPDX-License-Identifier: Apache-2.0
"""What vLLM's plugin loader runs in every process."""

import logging

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_ascend_pd.core.config import CONNECTOR


def register() -> None:
    """Makes the connector known to vLLM. May be called again."""
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "vllm_ascend_pd.connector.connector", CONNECTOR)
    log_as_vllm_does()


def log_as_vllm_does() -> None:
    """Gives this package's loggers the handlers of vLLM's, and lets warnings pass. May be called again.

    vLLM configures its own loggers alone. Others depend on the root logger, whose level some libraries raise: the
    engine core of vLLM 0.30 would drop warnings.
    """
    ours, of_vllm = logging.getLogger("vllm_ascend_pd"), logging.getLogger("vllm")
    if not ours.isEnabledFor(logging.WARNING):
        ours.setLevel(logging.WARNING)
    if not ours.handlers:
        for handler in of_vllm.handlers:
            if handler not in logging.root.handlers:  # which get our lines anyway
                ours.addHandler(handler)
