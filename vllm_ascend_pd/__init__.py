# SPDX-License-Identifier: Apache-2.0
"""Prefill/decode KV connector for vLLM on Ascend NPUs: prefill pushes KV layer by layer into decode's cache."""

import importlib

__version__ = "0.1.0"


def register() -> None:
    """Entry point of `vllm.general_plugins`: registers the connector with vLLM. May be called again.

    The import is by name: parts of this package that run without vLLM import the package itself.
    """
    importlib.import_module("vllm_ascend_pd.connector.registration").register()
