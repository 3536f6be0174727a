# SPDX-License-Identifier: Apache-2.0
"""`/metrics` of vllm-ascend. Its vLLM asks the scheduler for metrics only if a rank has some."""

import pytest

from harness.client import Client
from harness.clusters import Cluster
from harness.metrics import requests_are_seen_everywhere
from npu_engines import one_to_one

pytestmark = [
    pytest.mark.npu,
    # One of test_one_to_one's.
    pytest.mark.parametrize("cluster", [one_to_one("tp2-to-tp1", 2, 1)], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


def test_requests_are_seen_everywhere(cluster: Cluster, client: Client) -> None:
    requests_are_seen_everywhere(cluster, client)
