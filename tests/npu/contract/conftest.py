# SPDX-License-Identifier: Apache-2.0
"""What this connector relies on in vllm-ascend, checked against the wheel that is installed.

Real classes are run: the platform's own configuration, its layerwise connector's two ends of a ticket, its
MultiConnector. That it calls hooks in the order that is relied on, and with caches that are written, the engines of
../e2e show. Only what vllm-ascend reads or sets
is taken from its source, by parsing it. Its example proxy is not in the wheel: that a ticket is posted to
`/v1/metaserver` cannot be checked here, only that it is posted to the URL in the request, as it is.

Each assertion says what changed when it fails.
"""

import json
from pathlib import Path

import pytest
from vllm_ascend_contract import MLA_CONFIG

from harness.models import TINY, for_npu, make_model


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(for_npu(TINY), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def mla_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No weights: what it computes does not matter."""
    folder = tmp_path_factory.mktemp("models") / "deepseek"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MLA_CONFIG))
    return folder


@pytest.fixture(scope="module")
def plugins() -> None:
    """Both packages' entry points in this process, as vLLM loads them."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
