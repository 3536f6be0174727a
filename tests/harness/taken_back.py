# SPDX-License-Identifier: Apache-2.0
"""A prefill engine's scheduler beside a pool whose loads fail, and ranks that know which tokens' KV is right.

A token's KV is right if it was loaded whole, or computed when the KV of all tokens before it was right.
"""

import math
import secrets
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from harness.engines import Role
from harness.real_scheduler import BLOCK, TOKEN, RealScheduler
from harness.tickets import ticket_with
from vllm_ascend_pd.core.step import PrefillStep


class Pool(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side of a pool. It has the first `has[request id]` tokens of a prompt."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.has: dict[str, int] = {}
        self.in_background = False
        # By request: the tokens to load, from when it was allocated until the ranks have them.
        self.loads: dict[str, tuple[range, tuple[list[int], ...]]] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = max(0, self.has.get(request.request_id, 0) - num_computed_tokens)
        return tokens, self.in_background and tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            stop = self.has.pop(request.request_id)
            self.loads[request.request_id] = range(stop - num_external_tokens, stop), blocks.get_block_ids()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        return False, None

    # In a worker, which there is none of.

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


POOL = {"kv_connector": "Pool", "kv_connector_module_path": __name__}


class Ranks:
    """What the ranks' caches have, what has been sent of it, and what decode has been told. One cache group."""

    def __init__(self) -> None:
        # Places, as (block, offset), whose KV is right.
        self.right: set[tuple[int, int]] = set()
        self._tables: dict[str, list[int]] = {}
        # Each request's prompt on decode, by token: whether it is right. Missing: it was not sent.
        self.decode: dict[str, dict[int, bool]] = {}
        # By request: None, or why its KV was not delivered.
        self.told: dict[str, str | None] = {}

    def run(self, output: SchedulerOutput, step: PrefillStep, pool: Pool, failing: set[int]) -> KVConnectorOutput:
        """Runs a step. `failing`: numbers of the blocks of prompts that cannot be loaded."""
        for request_id, reason in step.finished.items():
            self._tell(request_id, reason)
        self._take_tables(output)
        told = KVConnectorOutput(finished_recving=set())
        for request_id, (tokens, (blocks, *_)) in list(pool.loads.items()):
            if pool.in_background or request_id in output.num_scheduled_tokens:
                del pool.loads[request_id]
                for token in tokens:
                    self._fill(blocks, token, token // BLOCK not in failing)
                told.invalid_block_ids |= {blocks[number] for number in failing if number * BLOCK in tokens}
                if pool.in_background:
                    told.finished_recving.add(request_id)
        self._compute(output)
        for send in step.sends:
            mine = self.decode.setdefault(send.request_id, {})
            first = send.start - send.start % BLOCK
            for token in range(send.start, send.stop):
                place = send.blocks[0][(token - first) // BLOCK], token % BLOCK
                mine[token] = place in self.right
        for send in step.sends:
            if send.last and send.confirmed:
                self._tell(send.request_id, None)
        return told

    def _take_tables(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = []
            self._tables[request_id] += blocks[0] if blocks else []

    def _compute(self, output: SchedulerOutput) -> None:
        """All requests' tokens are written before any is read, so those of others of this step count."""
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed = [
            (token, request_id)
            for request_id, start in starts.items()
            for token in range(start, start + output.num_scheduled_tokens[request_id])
        ]
        for token, request_id in sorted(computed):
            table = self._tables[request_id]
            before = all((table[t // BLOCK], t % BLOCK) in self.right for t in range(token))
            self._fill(table, token, before)

    def _fill(self, table: list[int], token: int, right: bool) -> None:
        place = table[token // BLOCK], token % BLOCK
        self.right.discard(place)
        if right:
            self.right.add(place)

    def _tell(self, request_id: str, reason: str | None) -> None:
        """Decode is told once. Success needs right KV (R1)."""
        if request_id not in self.told:
            self.told[request_id] = reason
            if reason is None:
                wrong = [token for token, right in self.decode[request_id].items() if not right]
                assert wrong == [], f"decode was told of success, and tokens {wrong} of {request_id} are wrong"


class PrefillBesidePool(RealScheduler):
    """A prefill engine's scheduler with this connector and a pool, and its ranks. `of`: as for `RealScheduler`."""

    def __init__(self, model: Path, policy: str = "recompute", **of: Any) -> None:
        of = {"beside": POOL, "extra": {}} | of
        super().__init__(Role.PREFILL, model, load_failure_policy=policy, **of)
        alone = SimpleNamespace(has={}, loads={}, in_background=False)
        self.pool_connector: Any = getattr(self.connector, "_connectors", [self.ours, alone])[1]
        self.ranks = Ranks()
        self.groups = len(self.vllm.kv_cache_config.kv_cache_groups)
        self.failing: set[int] = set()
        # Steps in flight: with the requests that get a token.
        self.in_flight: list[tuple[SchedulerOutput, set[str]]] = []

    def ask(
        self, request_id: str, prompt: Iterable[int], has: int = 0, max_tokens: int = 1, cached: int = 0
    ) -> Request:
        """Adds a request with a ticket. `has`: how many of its tokens the pool has. `cached`: decode has these."""
        prompt = list(prompt)
        ticket = ticket_with(
            ticket_id=secrets.token_hex(16),
            request_id=request_id,
            remote_block_ids=self.groups * [list(range(1, 1 + math.ceil(len(prompt) / BLOCK)))],
            remote_block_size=self.groups * [BLOCK],
            remote_cached_tokens=cached,
            num_tokens=len(prompt),
        )
        if has:
            self.pool_connector.has[request_id] = has
        return self.add(request_id, prompt, msgspec.to_builtins(ticket), max_tokens)

    def begin(self) -> SchedulerOutput:
        """Schedules a step, whose output is not seen before `see`."""
        output = self.schedule()
        requests = [self.vllm.requests[name] for name in output.num_scheduled_tokens]
        self.in_flight.append((output, {each.request_id for each in requests if not each.is_prefill_chunk}))
        return output

    def see(self) -> list[Any]:
        """The ranks run the oldest step in flight, and vLLM sees its output. Returns the outputs."""
        output, sampled = self.in_flight.pop(0)
        step = self.step_of(output)
        told = self.ranks.run(output, step, self.pool_connector, self.failing)
        prompts = self.ours._role._prompts
        told.finished_sending = {name for name, prompt in prompts.items() if prompt.ended and name in self.ranks.told}
        return self.end_step(output, [[TOKEN] if n in sampled else [] for n in output.num_scheduled_tokens], told)

    def step_of(self, output: SchedulerOutput) -> PrefillStep:
        metadata: Any = output.kv_connector_metadata
        step: PrefillStep = getattr(metadata, "metadata", (metadata,))[0].step
        return step

    def run(self, depth: int = 1, steps: int = 30) -> list[Any]:
        """Runs until nothing is left to do, with `depth` steps in flight. Returns all outputs."""
        outputs = []
        for _ in range(steps):
            if not self.vllm.has_requests() and not self.in_flight:
                return outputs
            if self.vllm.has_requests():
                self.begin()
            if len(self.in_flight) == depth or not self.vllm.has_requests():
                outputs += self.see()
        raise AssertionError(f"requests are left after {steps} steps: {list(self.vllm.requests)}")
