# SPDX-License-Identifier: Apache-2.0
"""The connector, and all modules that import or patch vLLM or vllm-ascend: import-linter allows no other folder to.

`vllm_ascend_pd.connector` can be configured as `kv_connector_module_path`. The modules that tools use import vLLM
within functions only, so they can be imported without it.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports the connector, and with it vLLM, when it is first used."""
    if name == "LayerwisePushConnector":
        from vllm_ascend_pd.connector.connector import LayerwisePushConnector

        return LayerwisePushConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
