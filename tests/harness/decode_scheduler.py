# SPDX-License-Identifier: Apache-2.0
"""A decode engine's scheduler: vLLM's own with this connector's scheduler side, over few blocks.

Ranks, prefill and the metaserver are simulated: a transfer ends when the test says so.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

import vllm_ascend_pd
from harness.ports import reserve_port
from harness.real_scheduler import BLOCK, VllmScheduler
from harness.scheduling import make_request, remembered
from vllm_ascend_pd.connector import build as build_scheduler
from vllm_ascend_pd.connector.caches import lost_blocks_say_all
from vllm_ascend_pd.connector.metrics import ReportMetadata
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS
from vllm_ascend_pd.core.step import WorkerReport
from vllm_ascend_pd.core.ticket_params import PREFILL_FIRST_TOKENS, WANTS_TOKEN_IDS
from vllm_ascend_pd.decode.ticket_client import PostOutcome

MAX_MODEL_LEN = 128
LONGEST = MAX_MODEL_LEN // BLOCK
"""Blocks of the longest request."""
DRAFTS = 3
"""Tokens that are drafted for a step, where some are."""
MOST_TOKENS_OF_A_STEP = 2
"""Of a request on an engine that computes no prompts: the last token, and with windows the one before it."""
METASERVER = "http://127.0.0.1:9/v1/metaserver"


class SilentMetaserver:
    """Takes all tickets, and answers only those of `EngineScheduler.prefill_fails`. `posted`: what it took."""

    retried = 0
    admitted = "all hosts"

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.outcomes: list[PostOutcome] = []
        self.posted: list[dict[str, Any]] = []
        self.cancelled: list[str] = []

    def check(self, *args: object) -> None: ...

    def post(self, key: str, url: str, body: dict[str, Any], *args: object) -> None:
        self.posted.append(body)

    def cancel(self, key: str) -> None:
        self.cancelled.append(key)

    def report_failure(self, *args: object) -> None: ...

    def poll(self) -> list[PostOutcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def close(self) -> None: ...


def decode_config(
    engine_config: VllmConfig,
    policy: str = "fail",
    who_computes: str = "prefill",
    prefill_first: int | str | None = "auto",
) -> VllmConfig:
    """Returns `engine_config` as a decode engine's. `policy`: its `kv_load_failure_policy`. `prefill_first`: its
    `prefill_first_tokens`."""
    vllm_ascend_pd.register()
    engine_config.kv_transfer_config = KVTransferConfig(
        kv_connector="LayerwisePushConnector",
        kv_role="kv_consumer",
        kv_port=reserve_port(),
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"who_computes": who_computes, "prefill_first_tokens": prefill_first},
    )
    return engine_config


class EngineScheduler(VllmScheduler):
    """The scheduler. `blocks`: the blocks for requests. `windowed`: there is a group of a sliding window beside full
    attention's. `states`: there is a group of cached states beside it. `pipelined`: two steps are under way, as with
    pipeline parallelism.
    """

    def __init__(
        self,
        config: VllmConfig,
        blocks: int,
        windowed: bool = False,
        states: bool = False,
        max_loras: int | None = None,
        scheduler_class: type[Scheduler] = Scheduler,
        seed: int = 0,
        pipelined: bool = False,
    ) -> None:
        drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
        windows = (2 * BLOCK,) if windowed else ()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build_scheduler, "MetaserverClient", SilentMetaserver)
            super().__init__(config, blocks + 1, windows, int(states), drafts, scheduler_class=scheduler_class)
        if max_loras is not None:
            self.vllm.lora_config = SimpleNamespace(max_loras=max_loras)
        self._steps_under_way = 1 if scheduler_class is Scheduler and not pipelined else 2
        self._random = random.Random(seed)
        self._outputs: deque[Any] = deque()
        self.expected: dict[str, Any] = {}
        """Requests whose transfer has begun, with what ranks were told of it."""
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self.all_free = self.free
        self.most_tokens = 0
        """The most tokens of a request that a step computed, drafts not counted."""
        self.tickets = 0
        self.begun: list[str] = []
        """Tickets whose KV a step reads first, as ranks were told."""
        self.overwritten: set[str] = set()
        """Requests whose KV ranks find overwritten in a step that computes them."""
        self.tokens_of: list[str] = []
        """Requests of which a step gave tokens to the client."""
        self.given_up: list[str] = []
        """Requests that ended with an error."""
        extra = config.kv_transfer_config.kv_connector_extra_config
        self._never = extra["who_computes"] == "never"
        self._asks_again = self._never and self.vllm.recompute_kv_load_failures

    @property
    def free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def add(
        self,
        name: str,
        tokens: int,
        generates: int = 4,
        *,
        grammar: bool = False,
        remote: bool = True,
        priority: int = 0,
        lora: int = 0,
        first: int = 0,
        first_tokens: int | None = None,
        **wants: Any,
    ) -> Request:
        """Adds a request whose prompt counts up from `first`.

        grammar: it waits for a grammar until `ready`.
        first_tokens: what the proxy says of prefill engines. None: nothing.
        wants: more of its `SamplingParams`.
        """
        params: dict[str, Any] | None = None
        if remote:
            params = {"do_remote_prefill": True, "metaserver": METASERVER, WANTS_TOKEN_IDS: True}
            params |= {} if first_tokens is None else {PREFILL_FIRST_TOKENS: first_tokens}
        fields = {
            "arrival_time": float(len(self.vllm.requests)),
            "priority": priority,
            "lora_request": LoRARequest(f"adapter-{lora}", lora, f"/adapters/{lora}") if lora else None,
            "block_hasher": self._hasher,
        }
        request = make_request(name, range(first, first + tokens), params, fields, max_tokens=generates, **wants)
        if grammar:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            request.structured_output_request = SimpleNamespace(grammar=None)
        return self.enter(request)

    def ready(self, request: Request) -> None:
        """Lets the request's grammar be ready."""
        request.structured_output_request = SimpleNamespace(grammar=object(), reasoning_ended=True)

    def arrives(self, *names: str) -> None:
        """Lets these requests' KV arrive in the next step."""
        self._ended.update(names)

    def fails(self, *names: str) -> None:
        self._ended.update(names)
        self._failed.update(names)

    def prefill_fails(self, name: str, may_follow: bool) -> None:
        """Has the metaserver answer in the next step that prefill failed. `may_follow`: another one may succeed."""
        outcome = PostOutcome(self.expected[name].ticket_id, False, "prefill failed, for a test", may_follow)
        self.connector._role._recipients._metaserver.outcomes.append(outcome)
        self.fails(name)

    @property
    def metaserver(self) -> Any:
        return self.connector._role._recipients._metaserver

    @property
    def intents(self) -> list[str]:
        """Requests whose intents were posted, in order."""
        return [body["request_id"] for body in self.metaserver.posted if body.get("ticket_follows")]

    def computed_first(self, *names: str, failure: str = "") -> None:
        """Has the metaserver answer in the next step that prefill holds these prompts, or why it has failed."""
        for body in self.metaserver.posted:
            if body.get("ticket_follows") and body["request_id"] in names:
                where = {"remote_engine_id": "p", "ticket_host": "127.0.0.1", "ticket_port": 9}
                held = {"transfer_id": body["transfer_id"], **where}
                self.metaserver.outcomes.append(PostOutcome(body["ticket_id"], not failure, failure, held=held))

    def abort(self, name: str) -> None:
        self.vllm.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def unfinished(self) -> list[str]:
        return [name for name, request in self.vllm.requests.items() if not request.is_finished()]

    def step(self) -> set[str]:
        """Takes a step. Returns the requests that it computes tokens of."""
        computed = self.begin_step()
        if len(self._outputs) >= self._steps_under_way:
            self._update(*self._outputs.popleft())
        return computed

    def begin_step(self) -> set[str]:
        """Schedules a step beside those under way. Returns as `step`."""
        scheduled = self.vllm.schedule()
        expects = scheduled.kv_connector_metadata.step.expects
        self.begun += scheduled.kv_connector_metadata.step.begun
        self.expected |= {expect.request_id: expect for expect in expects}
        self.tickets += len(expects)
        drafts = scheduled.scheduled_spec_decode_tokens
        counts = [tokens - len(drafts.get(name, ())) for name, tokens in scheduled.num_scheduled_tokens.items()]
        self.most_tokens = max(self.most_tokens, *counts, 0)
        self._outputs.append((scheduled, self._computed(scheduled)))
        return set(scheduled.num_scheduled_tokens)

    def settle(self) -> None:
        """Takes steps until all transfers in flight have ended."""
        while self._outputs:
            self._update(*self._outputs.popleft())

    def run(self, steps: int = 60) -> None:
        """Ends transfers as soon as they have begun, until all requests have ended."""
        for _ in range(steps):
            if not self.unfinished:
                break
            self.arrives(*self.expected)
            self.step()
        self.settle()
        assert not self.unfinished, self.state()

    def state(self) -> str:
        lines = [
            f"{name}: {request.status.name}, {request.num_computed_tokens} of {request.num_tokens} tokens, holds "
            f"{[len(ids) for ids in self.vllm.kv_cache_manager.get_block_ids(name)]}"
            for name, request in self.vllm.requests.items()
        ]
        return "\n".join([f"{self.free} of {self.all_free} blocks are free, {len(self.vllm.running)} run", *lines])

    def close(self) -> None:
        assert self.free == self.all_free, self.state()
        assert not self.vllm.requests
        assert not remembered(self.connector._role)
        if self._never:
            assert self.most_tokens <= MOST_TOKENS_OF_A_STEP
        self.connector.shutdown()

    def _computed(self, scheduled: Any) -> list[list[int]]:
        """Returns the tokens that the model answers with. It accepts any number of drafts."""
        tokens = []
        for name in scheduled.num_scheduled_tokens:
            request = self.vllm.requests[name]
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            ends = not request.is_prefill_chunk
            tokens.append([7] * (1 + self._random.randint(0, drafts)) if ends else [])
        return tokens

    def _update(self, scheduled: Any, tokens: list[list[int]]) -> None:
        names = list(scheduled.num_scheduled_tokens)
        ended = self._ended & set(self.expected)
        failed = ended & self._failed
        self._ended -= ended
        blocks = {name: self.vllm.kv_cache_manager.get_block_ids(name)[0] for name in self.overwritten & set(names)}
        self.overwritten -= set(blocks)
        report = WorkerReport(
            failed={self.expected[name].ticket_id: "it failed, for a test" for name in failed},
            overwritten={name: ("overwritten, for a test", ids) for name, ids in blocks.items()},
        )
        output = KVConnectorOutput(
            finished_recving=ended or None,
            kv_connector_worker_meta=ReportMetadata(report),
            **self._lost(failed),
        )
        for name in ended:
            del self.expected[name]
        said = self.end_step(scheduled, tokens, output)
        self.tokens_of += [each.request_id for each in said if each.new_token_ids]
        self.given_up += [each.request_id for each in said if each.finish_reason == FinishReason.ERROR]
        drafts = self.vllm.num_spec_tokens
        if drafts and self._steps_under_way == 1:
            self.vllm.update_draft_token_ids(DraftTokenIds(names, [[7] * drafts for _ in names]))

    def _lost(self, failed: set[str]) -> dict[str, Any]:
        """Tells vLLM of requests whose transfer has failed, as the connector does."""
        if HAS_TRANSFER_RESULTS and (self._asks_again or not lost_blocks_say_all(self.vllm.kv_cache_config)):
            return {"failed_recving": failed}
        return {"invalid_block_ids": {block for name in failed for block in self.expected[name].blocks}}


MakeScheduler = Callable[..., EngineScheduler]


def closed_schedulers(**of_all: Any) -> Any:
    """Returns a fixture that makes schedulers, and checks that nothing is left of their requests. `of_all`: arguments
    that all of them have."""

    @pytest.fixture
    def make(make_any: MakeScheduler) -> Iterator[MakeScheduler]:
        made: list[EngineScheduler] = []

        def make_scheduler(*args: Any, **of: Any) -> EngineScheduler:
            made.append(make_any(*args, **{**of_all, **of}))
            return made[-1]

        yield make_scheduler
        for decode in made:
            decode.close()

    return make
