# SPDX-License-Identifier: Apache-2.0
"""The connector, and everything that reads or patches vLLM. No other folder imports vllm or vllm_ascend.

`vllm_ascend_pd.connector` can be configured as `kv_connector_module_path`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports the connector when it is first used. Tools import other modules of this folder, without vLLM."""
    if name == "LayerwisePushConnector":
        from vllm_ascend_pd.connector.connector import LayerwisePushConnector

        return LayerwisePushConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
