# SPDX-License-Identifier: Apache-2.0
"""What was computed with old weights, of a model or a LoRA adapter, is found in the prefix cache no more.

With vLLM's own scheduler and block pool.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from harness.engines import Role
from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import BLOCK, TOKEN, RealScheduler
from harness.scheduling import make_request
from vllm_ascend_pd.connector import weights
from vllm_ascend_pd.connector.vllm_blocks import VllmBlocks, salt_of_client
from vllm_ascend_pd.connector.vllm_requests import VllmRequests
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


def run(engine: RealScheduler, name: str, extra: int = 0, **fields: Any) -> int:
    """Serves a request of the same prompt, with `extra` tokens more. Returns its cached tokens."""
    request = engine.add(name, [*range(PROMPT), *range(extra)], **fields)
    step = engine.schedule()
    cached = int(request.prefill_stats.num_cached_tokens)
    engine.end(step)
    while name in engine.vllm.requests:
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
    while "a" in engine.vllm.requests:
        engine.step()
    assert cached_blocks(engine) > 0, "under hashes of its own"
    engine.add("b", range(64))
    while "b" in engine.vllm.requests:
        engine.step()
    assert run(engine, "c") == 64, "of the request after the update, and none of the one before"


def test_a_short_request_that_runs_during_the_update_does_not_either(engine: RealScheduler) -> None:
    """Its first block fills up after the update."""
    engine.add("a", range(BLOCK - 1), max_tokens=BLOCK)
    engine.step(updated(rank=2))
    while "a" in engine.vllm.requests:
        engine.step()
    assert cached_blocks(engine) > 0, "under hashes of its own"
    request = engine.add("b", [*range(BLOCK - 1), *[TOKEN] * BLOCK])
    step = engine.schedule()
    assert request.prefill_stats.num_cached_tokens == 0
    engine.end(step)


HIT = FULL * BLOCK


class Adapter:
    """A LoRA adapter that is loaded again and again under one name. Each load has another id, as in vLLM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loads = 0

    def load(self, content: str, folder: str = "sql") -> LoRARequest:
        path = self.folder / folder
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.bin").write_text(content)
        self._loads += 1
        return LoRARequest("sql", self._loads, str(path))


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    monkeypatch.setattr(weights, "_first_contents", {})
    monkeypatch.setattr(weights, "_loaded", weights._Recent())
    return Adapter(tmp_path)


@pytest.mark.parametrize("folder", ["sql", "elsewhere"])
def test_an_adapter_with_new_files_finds_nothing_of_the_old_ones(
    engine: RealScheduler, adapter: Adapter, folder: str
) -> None:
    first = adapter.load("one")
    assert [run(engine, name, lora=first) for name in "ab"] == [0, HIT]
    second = adapter.load("another", folder)
    assert [run(engine, name, lora=second) for name in "cd"] == [0, HIT], "what is new is cached"
    assert [run(engine, name, lora=adapter.load("another", folder)) for name in "ef"] == [HIT, HIT], "loaded again"
    assert [run(engine, name, lora=adapter.load("a third", folder)) for name in "gh"] == [0, HIT]
    assert run(engine, "i", lora=adapter.load("one")) == HIT, "files that are back find their KV"


def test_other_requests_keep_what_is_cached(engine: RealScheduler, adapter: Adapter) -> None:
    other = LoRARequest("other", 77, str(adapter.folder / "none"))  # cannot be read
    first = adapter.load("one")
    assert [run(engine, name, lora=lora) for name, lora in (("a", None), ("b", other), ("c", first))] == [0, 0, 0]
    assert run(engine, "d", lora=adapter.load("another")) == 0
    assert [run(engine, name, lora=lora) for name, lora in (("e", None), ("f", other))] == [HIT, HIT]


def test_a_request_waits_for_its_adapter_to_be_read_and_no_step_does(
    engine: RealScheduler, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(engine, "a", lora=adapter.load("one"))
    may_read, lora = threading.Event(), adapter.load("another")
    read = weights.read_adapter
    with monkeypatch.context() as patch:
        patch.setattr(weights, "read_adapter", lambda each: may_read.wait(30) and read(each))
        patch.setattr(VllmBlocks, "is_ready", lambda *_: True)  # for `add`, which would wait
        engine.add("b", range(PROMPT), lora=lora)
        engine.add("c", range(PROMPT))
    step = engine.schedule()
    assert set(step.num_scheduled_tokens) == {"c"}
    engine.end(step)
    may_read.set()
    while engine.vllm.requests:
        engine.step()
    assert run(engine, "d", lora=lora) == HIT, "the request's KV is found under its adapter's content"


def test_an_adapter_on_a_file_system_that_hangs_holds_up_no_other(
    engine: RealScheduler, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own requests wait for a bounded time, and then it goes by its name."""
    answers, read = threading.Event(), weights.read_adapter
    hangs = LoRARequest("hangs", 7, "/mnt/hangs")
    monkeypatch.setattr(
        weights, "read_adapter", lambda each: read(each) if each is not hangs or answers.wait(30) else None
    )
    monkeypatch.setattr(weights, "_ADAPTER_READ_S", 0.05)
    assert run(engine, "a", lora=hangs) == 0
    assert run(engine, "b", lora=adapter.load("one")) == 0
    asked = engine.add("c", range(PROMPT), lora=hangs)
    assert VllmRequests().digest(asked, PROMPT, "0" * 32).adapter == "unread:hangs"
    answers.set()


def test_more_adapters_than_are_remembered_are_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MAX_CACHED", 2)
    monkeypatch.setattr(weights, "read_adapter", lambda each: each.lora_name)
    adapters = weights.Adapters()
    asked = [LoRARequest(name, number, f"/mnt/{name}") for number, name in enumerate("abc", start=1)]
    unread = [(lora, adapters.read(lora)) for lora in asked]
    until = time.monotonic() + 30
    while unread and time.monotonic() < until:
        unread = [(lora, known) for lora, known in unread if adapters.content(lora, known) is None]
    assert unread == []


def test_a_request_that_ends_before_its_adapter_was_read_waits_for_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt is named to the engine that holds it."""
    monkeypatch.setattr(weights, "read_adapter", lambda each: pytest.fail("on the scheduler's thread"))
    request = make_request("r", PROMPT, None)
    request.lora_request = LoRARequest("hangs", 8, "/mnt/hangs")
    assert VllmRequests().digest(request, PROMPT, "0" * 32).adapter == "unread:hangs"


def test_an_adapter_that_cannot_be_read_goes_by_its_load(engine: RealScheduler, adapter: Adapter) -> None:
    path = str(adapter.folder / "none")
    loads = [LoRARequest("sql", number, path) for number in (1, 1, 2, 2)]
    assert [run(engine, f"r{index}", lora=lora) for index, lora in enumerate(loads)] == [0, HIT, 0, HIT]


def test_salts_keep_prompts_of_a_replaced_adapter_apart(engine: RealScheduler, adapter: Adapter) -> None:
    run(engine, "a", lora=adapter.load("one"))
    second = adapter.load("another")
    cached = [run(engine, name, lora=second, salt=salt) for name, salt in zip("bcde", [*"xxy", None], strict=True)]
    assert cached == [0, HIT, 0, 0]
    request = engine.add("f", range(PROMPT), lora=second, salt="x")
    assert request.cache_salt != salt_of_client(request) == "x", "tickets compare the client's"
    while "f" in engine.vllm.requests:
        engine.step()


def test_names_beyond_the_bound_go_by_content(
    engine: RealScheduler, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_MAX_NAMES", 0)
    for content in ("one", "another"):
        assert [run(engine, f"{content} {i}", lora=adapter.load(content)) for i in range(2)] == [0, HIT]
    assert not weights._first_contents
