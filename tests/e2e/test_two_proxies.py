# SPDX-License-Identifier: Apache-2.0
"""A second proxy on the same engines, without anything shared: right tokens through both, and none lost by the other's
end."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from harness.client import Client, random_prompt
from harness.clusters import TP2_TO_TP1, Cluster, Proxy
from harness.engines import wait_ready
from harness.failures import wait_all_blocks_free
from harness.pool import Reference
from harness.waiting import wait_until

pytestmark = [
    pytest.mark.parametrize("cluster", [TP2_TO_TP1], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


@pytest.fixture
def second(cluster: Cluster, tmp_path: Path) -> Iterator[Proxy]:
    proxy = Proxy(cluster.prefill, cluster.decode, tmp_path)
    wait_ready([proxy])
    yield proxy
    proxy.stop()


def test_both_at_once_and_one_killed(cluster: Cluster, client: Client, second: Proxy, reference: Reference) -> None:
    prompts = [random_prompt(300 + i, f"two proxies {i}") for i in range(8)]
    long = [random_prompt(2000 + i, f"two proxies, long {i}") for i in range(3)]
    with Client(second.url, model=client.model) as other, ThreadPoolExecutor(8) as pool:
        both = [pool.submit((client, other)[i % 2].complete, prompt) for i, prompt in enumerate(prompts)]
        assert [each.result().token_ids for each in both] == [reference.complete(prompt) for prompt in prompts]

        kept = [pool.submit(client.complete, prompt, stream=True) for prompt in long]
        # Answers that take much longer than it takes to see that one has begun.
        lost = [pool.submit(other.complete, random_prompt(700, f"lost {i}"), max_tokens=3000) for i in range(3)]
        wait_until(lambda: cluster.decode[0].metric("vllm:num_requests_running") > 0, 60)
        second.process.kill()
        for each in lost:
            with pytest.raises(httpx.TransportError):
                each.result()
        assert [each.result().token_ids for each in kept] == [reference.complete(prompt) for prompt in long]
    wait_all_blocks_free(cluster)
