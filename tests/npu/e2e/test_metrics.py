# SPDX-License-Identifier: Apache-2.0
"""`/metrics` of vllm-ascend. Its vLLM asks the scheduler for metrics only if a rank has some."""

import pytest
from test_parallel import PP2_TP2_TO_DP2

from harness.client import Client
from harness.clusters import Cluster
from harness.metrics import requests_are_seen_everywhere

pytestmark = [
    pytest.mark.npu,
    pytest.mark.parametrize("cluster", [PP2_TP2_TO_DP2], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


def test_requests_are_seen_everywhere(cluster: Cluster, client: Client) -> None:
    requests_are_seen_everywhere(cluster, client)
