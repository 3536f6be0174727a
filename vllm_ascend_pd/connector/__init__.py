# SPDX-License-Identifier: Apache-2.0
"""The only folder that imports vllm or vllm_ascend: the connector, and all that is read from or patched in vLLM.

`vllm_ascend_pd.connector` can be configured as `kv_connector_module_path`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports the connector, and vLLM with it, only when it is asked for: tools use other modules of this folder."""
    if name == "LayerwisePushConnector":
        from vllm_ascend_pd.connector.connector import LayerwisePushConnector

        return LayerwisePushConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
