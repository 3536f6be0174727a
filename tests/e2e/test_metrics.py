# SPDX-License-Identifier: Apache-2.0
"""`/metrics` of vLLM on its CPU backend."""

import pytest

from harness.client import Client
from harness.clusters import TRACED, Cluster
from harness.metrics import requests_are_seen_everywhere

pytestmark = [
    # One of test_one_to_one's.
    pytest.mark.parametrize("cluster", [TRACED], ids=str, indirect=True),
    pytest.mark.timeout(600),  # the first test of a cluster starts it
]


def test_requests_are_seen_everywhere(cluster: Cluster, client: Client) -> None:
    requests_are_seen_everywhere(cluster, client)
