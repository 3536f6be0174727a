# SPDX-License-Identifier: Apache-2.0
"""What vLLM's plugin loader runs in every process."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "LayerwisePushConnector"
"""The connector's name in `kv_transfer_config`."""


def register() -> None:
    """Makes the connector known to vLLM. May be called again."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "vllm_ascend_pd.connector.connector", NAME)
