# SPDX-License-Identifier: Apache-2.0
"""What was computed with old weights is found in the prefix cache no more, with vLLM's own scheduler and block pool."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.engines import Role
from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import BLOCK, TOKEN, RealScheduler
from vllm_ascend_pd.core.step import WorkerReport

PROMPT = 100
"""Six blocks of 16 and a part of one."""
FULL = PROMPT // BLOCK


@pytest.fixture(params=[Role.PREFILL, Role.DECODE], ids=["prefill", "decode"])
def engine(request: pytest.FixtureRequest, scheduled_model: Path) -> Iterator[RealScheduler]:
    scheduler = RealScheduler(request.param, scheduled_model, step_tokens=64)
    free = scheduler.pool.get_num_free_blocks()
    yield scheduler
    assert scheduler.pool.get_num_free_blocks() == free
    scheduler.close()


def run(engine: RealScheduler, name: str, extra: int = 0) -> int:
    """Serves a request of the same prompt, with `extra` tokens more. Returns its cached tokens."""
    request = engine.add(name, [*range(PROMPT), *range(extra)])
    step = engine.schedule()
    cached = int(request.prefill_stats.num_cached_tokens)
    engine.end(step)
    while name in engine.scheduler.requests:
        engine.step()
    return cached


def updated(**ranks: int) -> WorkerReport:
    return WorkerReport(weight_updates=ranks)


def report(engine: RealScheduler, said: WorkerReport) -> None:
    """In a step that computes nothing."""
    engine.step(said)


def cached_blocks(engine: RealScheduler) -> int:
    return sum(block.block_hash is not None for block in engine.pool.blocks)


def known(engine: RealScheduler) -> dict[str, int]:
    step: Any = engine.step()[0].kv_connector_metadata.step
    updates: dict[str, int] = step.weight_updates
    return updates


def test_an_update_of_the_weights_empties_the_prefix_cache(engine: RealScheduler) -> None:
    run(engine, "a")
    assert (run(engine, "b", 40), known(engine)) == (FULL * BLOCK, {})
    report(engine, updated(rank=2))
    assert (cached_blocks(engine), known(engine)) == (0, {"rank": 2})
    assert run(engine, "c", 40) == 0
    assert run(engine, "d", 40) == (PROMPT + 39) // BLOCK * BLOCK, "what is new is cached again"


def test_nothing_is_dropped_without_an_update_that_is_new(engine: RealScheduler) -> None:
    report(engine, updated(rank=2).merge(updated(other=2)))
    run(engine, "a")
    before = cached_blocks(engine)
    for said in (WorkerReport(), updated(rank=2), updated(other=2, rank=2), WorkerReport(failed={"x": "it failed"})):
        report(engine, said)
    assert cached_blocks(engine) == before >= FULL
    report(engine, updated(other=4))
    assert (cached_blocks(engine), known(engine)) == (0, {"rank": 2, "other": 4})


def test_a_request_that_runs_during_the_update_leaves_nothing_in_the_cache(engine: RealScheduler) -> None:
    """Its later blocks are computed with new weights, and see its first ones, which were not."""
    engine.add("a", range(PROMPT))
    engine.step(updated(rank=2))  # 64 tokens of it
    while "a" in engine.scheduler.requests:
        engine.step()
    assert cached_blocks(engine) > 0, "under hashes of its own"
    engine.add("b", range(64))
    while "b" in engine.scheduler.requests:
        engine.step()
    assert run(engine, "c") == 64, "of the request after the update, and none of the one before"


def test_a_short_request_that_runs_during_the_update_does_not_either(engine: RealScheduler) -> None:
    """Its first block fills up after the update."""
    engine.add("a", range(BLOCK - 1), max_tokens=BLOCK)
    engine.step(updated(rank=2))
    while "a" in engine.scheduler.requests:
        engine.step()
    assert cached_blocks(engine) > 0, "under hashes of its own"
    request = engine.add("b", [*range(BLOCK - 1), *[TOKEN] * BLOCK])
    step = engine.schedule()
    assert request.prefill_stats.num_cached_tokens == 0
    engine.end(step)
