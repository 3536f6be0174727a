# SPDX-License-Identifier: Apache-2.0
"""Prefill/decode KV connector for vLLM on Ascend NPUs: prefill pushes KV layer by layer into decode's cache."""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of `vllm.general_plugins`: makes `LayerwisePushConnector` known to vLLM, and patches what it needs
    before models are built. Safe to call twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_32_weight_loading import install

    if "LayerwisePushConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "LayerwisePushConnector", "vllm_ascend_pd.connector.connector", "LayerwisePushConnector"
        )
    install()
