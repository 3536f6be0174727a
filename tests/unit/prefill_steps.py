# SPDX-License-Identifier: Apache-2.0
"""Prefill's scheduler, requests with tickets, and the steps in which they run."""

import hashlib
import math

import msgspec
import pytest

from harness.schedulers import prefill_scheduler
from harness.scheduling import Scheduled, make_output, make_request
from harness.tickets import ticket_with
from vllm_ascend_pd.core.caches import TokenGroup

BLOCK = 4
PROMPT = 10
BLOCKS = ([7, 1, 5],)


def ticket(request_id="r", num_tokens=PROMPT, cached=0, block_sizes=(BLOCK,), dcp=1):
    return ticket_with(
        request_id=request_id,
        remote_block_ids=[[100 + n for n in range(math.ceil(num_tokens / size / dcp))] for size in block_sizes],
        remote_block_size=list(block_sizes),
        remote_tp_size=dcp,
        remote_dcp_size=dcp,
        remote_cached_tokens=cached,
        ticket_id=hashlib.md5(request_id.encode(), usedforsecurity=False).hexdigest(),
        num_tokens=num_tokens,
    )


def ticketed(request_id="r", num_tokens=PROMPT, **fields):
    """A request as the proxy sends it to prefill."""
    return make_request(request_id, num_tokens, msgspec.to_builtins(ticket(request_id, num_tokens, **fields)))


def starts(scheduler, request, tokens, blocks=BLOCKS, computed=0):
    """The step in which `request` runs for the first time."""
    scheduler.allocated(request, blocks)
    return scheduler.build_step(make_output(new=[Scheduled(request, blocks, computed, tokens)]))


def goes_on(scheduler, request, computed, tokens, blocks=None):
    return scheduler.build_step(make_output(running=[Scheduled(request, blocks, computed, tokens)]))


@pytest.fixture
def scheduler():
    return prefill_scheduler([TokenGroup(BLOCK)])
