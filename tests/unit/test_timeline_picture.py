# SPDX-License-Identifier: Apache-2.0
"""What a picture of a request says in words."""

import pytest

from vllm_ascend_pd.tools.timeline.picture import headline
from vllm_ascend_pd.tools.timeline.summary import Request


@pytest.mark.parametrize(("ready", "when"), [(9_400.0, "3.4 ms later"), (4_500.0, "1.5 ms earlier")])
def test_decode_may_be_ready_before_the_forward_pass_ends(ready: float, when: str) -> None:
    """It needs the last layer's KV, not what prefill computes from that."""
    request = Request("f00d", computed=[(1_000.0, 6_000.0)], bytes=200, bytes_before_end=150, ready=ready)
    assert headline(request) == (
        f"75% of the KV was in decode's cache when prefill's forward pass ended; decode was ready {when}"
    )
