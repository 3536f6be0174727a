# SPDX-License-Identifier: Apache-2.0
"""`/metrics` of vllm-ascend. Its vLLM asks the scheduler for metrics only if a rank has some."""

import pytest
from test_one_to_one import TP2_TO_TP1

from harness.client import Client
from harness.clusters import Cluster
from harness.metrics import requests_are_seen_everywhere

pytestmark = [
    pytest.mark.npu,
    pytest.mark.parametrize("cluster", [TP2_TO_TP1], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


def test_requests_are_seen_everywhere(cluster: Cluster, client: Client) -> None:
    requests_are_seen_everywhere(cluster, client)
