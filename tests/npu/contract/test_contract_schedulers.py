# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's schedulers with few blocks: with their own `schedule()`, too, all requests of a decode engine end.

Its scheduler for dynamic batches is left out: with vLLM 0.23 no engine starts with it.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus
from vllm_ascend_contract import engine_config

from harness.decode_scheduler import BLOCK, LONGEST, MAX_MODEL_LEN, EngineScheduler, decode_config

pytestmark = pytest.mark.npu

Make = Callable[..., EngineScheduler]


def default() -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return AsyncScheduler


def balancing() -> Any:
    from vllm_ascend.patch.platform.patch_balance_schedule import BalanceScheduler

    class Balancing(BalanceScheduler):
        """As with `balance_scheduling_enabled`."""

        def __init__(self, **of: Any) -> None:
            super().__init__(**of)
            self._balance_enabled = True
            self.balance_queue = [SimpleNamespace(item=lambda: 0)]

    return Balancing


def of_profiled_chunks() -> Any:
    from vllm_ascend.core.scheduler_profiling_chunk import ProfilingChunkScheduler

    return ProfilingChunkScheduler


def recomputing() -> Any:
    from vllm_ascend.core.recompute_scheduler import AsyncRecomputeScheduler

    return AsyncRecomputeScheduler


SCHEDULERS = [default, balancing, of_profiled_chunks, recomputing]


@pytest.fixture(params=SCHEDULERS, ids=lambda scheduler: scheduler.__name__)
def make(request: pytest.FixtureRequest, plugins: None, dense_model: Path) -> Iterator[Make]:
    made = []

    def make_scheduler(blocks: int, drafts: int = 0, who_computes: str = "prefill", **of: Any) -> EngineScheduler:
        engine = {"block_size": BLOCK, "dtype": "bfloat16", "max_num_batched_tokens": 512, "max_num_seqs": 16}
        config = decode_config(engine_config(dense_model, engine=engine), who_computes=who_computes)
        config.cache_config.block_size = BLOCK
        config.cache_config.enable_prefix_caching = False
        config.model_config.max_model_len = MAX_MODEL_LEN
        made.append(EngineScheduler(config, blocks, scheduler_class=request.param(), **of))
        made[-1].vllm.num_lookahead_tokens = drafts
        return made[-1]

    yield make_scheduler
    for decode in made:
        decode.close()


def test_no_engine_starts_with_dynamic_batches() -> None:
    """Once one does, it belongs to the schedulers above."""
    from vllm_ascend.core.scheduler_dynamic_batch import SchedulerDynamicBatch

    assert "hash_block_size" not in inspect.signature(SchedulerDynamicBatch.__init__).parameters
    assert "hash_block_size=" in inspect.getsource(EngineCore.__init__)


def test_drafts_of_requests_that_have_arrived(make: Make) -> None:
    """Two prompts fill all blocks, and each needs another one for what is drafted behind it."""
    decode = make(blocks=8, drafts=3)
    decode.add("a", 4 * BLOCK)
    decode.add("b", 4 * BLOCK)
    decode.run()


def test_a_last_token_that_is_left_to_decode(make: Make) -> None:
    """The transfer's tokens fill their blocks, and these all there are."""
    decode = make(blocks=2 * LONGEST + 1, windowed=True)
    for name in "abcd":
        decode.add(name, 2 * BLOCK + 1)
    decode.run()


def test_a_grammar_that_gets_ready(make: Make) -> None:
    """Its request is first in line and does not fit."""
    decode = make(blocks=LONGEST)
    guided = decode.add("guided", 6 * BLOCK, grammar=True)
    decode.add("plain", 4 * BLOCK)
    decode.step()
    assert set(decode.expected) == {"plain"}
    decode.ready(guided)
    decode.run()


def test_a_request_that_the_connector_refuses(make: Make) -> None:
    decode = make(blocks=LONGEST, who_computes="never")
    refused = decode.add("refused", 2 * BLOCK, remote=False)
    served = decode.add("served", 2 * BLOCK)
    decode.run()
    assert refused.status == RequestStatus.FINISHED_ERROR
    assert served.num_output_tokens == 4


def test_a_storm_on_an_engine_that_computes_no_prompts(make: Make) -> None:
    """Each request may grow to all blocks. None is ended for a proxy to send it again."""
    decode = make(blocks=LONGEST + 1, who_computes="never")
    requests = [
        decode.add(f"r{i}", 1 + 9 * i, generates=LONGEST * BLOCK - BLOCK - 9 * i, first=1000 * i) for i in range(6)
    ]
    decode.run(3000)
    assert [request.num_output_tokens for request in requests] == [request.max_tokens for request in requests]
    assert decode.given_up == []
    assert decode.tickets > len(requests)
    assert decode.most_tokens <= 2
