# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler with our connector in it, and a simulated worker.

No other file builds it. `RealScheduler` takes steps as a test says, `decode_scheduler.py` simulates transfers, and the
simulation adds ranks.
"""

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from harness.connectors import caches_of
from harness.engines import Role
from harness.metaserver import metaserver
from harness.models import TINY, make_model
from harness.scheduling import block_hasher, make_request, model_output
from vllm_ascend_pd import register
from vllm_ascend_pd.connector.metrics import ReportMetadata
from vllm_ascend_pd.connector.vllm_view import STEPS_IN_FLIGHT
from vllm_ascend_pd.core.step import WorkerReport
from vllm_ascend_pd.transport.wakeup import IdleWait

BLOCK = 16
TOKEN = 7
"""What every step generates."""

_OF_A_BLOCK: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
_STRUCTURED = types.SimpleNamespace(
    should_advance=lambda request: False,
    grammar_bitmask=lambda *_: None,
    grammar_init=lambda request: None,
    should_fill_bitmask=lambda request: False,
    accept_tokens=lambda *_, **__: True,
    validate_tokens=lambda request, tokens: tokens,
)
"""Grammars for requests that only wait for one."""


def model_config(model: Path, max_model_len: int) -> ModelConfig:
    """`model`: its folder."""
    return ModelConfig(
        model=str(model), tokenizer=str(model), skip_tokenizer_init=True, max_model_len=max_model_len, dtype="float32"
    )


def engine_config(model: ModelConfig, transfer: Mapping[str, Any], step_tokens: int) -> VllmConfig:
    """`transfer`: the `kv_transfer_config`. `step_tokens`: at most so many are computed in a step."""
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=step_tokens,
            max_model_len=model.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(**transfer),
    )


def cache_specs(windows: Sequence[int] = (), states: int = 0, drafts: int = 0) -> list[Any]:
    """Returns the kind of each cache group: all tokens, then `windows` of so many tokens, then `states` with blocks for
    so many `drafts`."""
    specs: list[Any] = [FullAttentionSpec(**_OF_A_BLOCK)]
    specs += [SlidingWindowSpec(**_OF_A_BLOCK, sliding_window=size) for size in windows]
    state: Any = {"block_size": BLOCK, "shapes": ((2, 2),), "dtypes": (torch.float32,)}
    return specs + states * [MambaSpec(**state, mamba_cache_mode="align", num_speculative_blocks=drafts)]


def make_scheduler(
    config: VllmConfig, caches: KVCacheConfig, of: type[Scheduler] = Scheduler, **sizes: int | bool
) -> Scheduler:
    """`of`: its class. `sizes`: more of its arguments."""
    return of(vllm_config=config, kv_cache_config=caches, structured_output_manager=_STRUCTURED, **sizes)


class VllmScheduler:
    """vLLM's own scheduler with this connector's scheduler side, whose steps do not wait.

    windows: how many tokens each further cache group sees; the first sees all.
    states: how many groups of states there are, cached in mode "align".
    drafts: for how many drafted tokens they have blocks.
    dcp: how many ranks of context parallelism share tokens.
    """

    def __init__(
        self,
        config: VllmConfig,
        blocks: int,
        windows: Sequence[int] = (),
        states: int = 0,
        drafts: int = 0,
        dcp: int = 1,
        scheduler_class: type[Scheduler] = Scheduler,
    ) -> None:
        config.cache_config.num_gpu_blocks = blocks
        if states:
            config.cache_config.mamba_cache_mode = "align"
        caches = caches_of(*cache_specs(windows, states, drafts), blocks=blocks)
        sizes = {"block_size": BLOCK * dcp, "hash_block_size": BLOCK, "log_stats": True}
        self._hasher = block_hasher(BLOCK)
        self.vllm = make_scheduler(config, caches, scheduler_class, **sizes)
        self.connector: Any = self.vllm.connector
        # Ours, the first one below a MultiConnector.
        self.ours = getattr(self.connector, "_connectors", [self.connector])[0]
        self.ours._role._idle.close()
        self.ours._role._idle = IdleWait(0.0, 1)

    @property
    def pool(self) -> Any:
        return self.vllm.kv_cache_manager.block_pool

    def enter(self, request: Request) -> Request:
        """Adds a request, once the files of its adapter were read, which another thread does."""
        self.vllm.add_request(request)
        blocks = self.ours._role._blocks
        while not blocks.is_ready(request):
            blocks.take_adapters()
        return request

    def end_step(
        self, scheduled: SchedulerOutput, tokens: list[list[int]], told: KVConnectorOutput | None
    ) -> list[Any]:
        """Ends a step in which the model answered with `tokens`. Returns the outputs."""
        by_client = self.vllm.update_from_output(scheduled, model_output(scheduled, tokens, told))
        return [each for outputs in by_client.values() for each in outputs.outputs]


class RealScheduler(VllmScheduler):
    """An engine's scheduler over a small model's configuration. `extra`: the connector's keys; `of`: more of
    `VllmScheduler`."""

    def __init__(
        self,
        role: Role,
        model: Path,
        blocks: int = 200,
        *,
        step_tokens: int = 512,
        max_model_len: int = 512,
        dcp: int = 1,
        load_failure_policy: str = "fail",
        extra: Mapping[str, object] = MappingProxyType({"who_computes": "prefill"}),
        beside: Mapping[str, object] | None = None,
        **of: Any,
    ) -> None:
        """`beside`: the configuration of another connector, which stands after ours below a MultiConnector."""
        register()
        transfer: dict[str, Any] = {
            "kv_connector": "LayerwisePushConnector",
            "kv_role": role.value,
            "kv_connector_extra_config": {**extra},
        }
        if beside is not None:
            connectors = {"connectors": [transfer, {"kv_role": role.value, **beside}]}
            transfer = transfer | {"kv_connector": "MultiConnector", "kv_connector_extra_config": connectors}
        transfer["kv_load_failure_policy"] = load_failure_policy
        config = engine_config(model_config(model, max_model_len), transfer, step_tokens)
        config.parallel_config.tensor_parallel_size = config.parallel_config.decode_context_parallel_size = dcp
        config.parallel_config.cp_kv_cache_interleave_size = BLOCK
        super().__init__(config, blocks, dcp=dcp, **of)
        if dcp > 1:  # hits end with blocks, as in vllm-ascend's own coordinator (`patch_kv_cache_coordinator.py`)
            coordinator = self.vllm.kv_cache_manager.coordinator
            coordinator.enable_partial_hash_hits = False
            for manager in coordinator.single_type_managers:
                manager.cache_hit_alignment_tokens = coordinator.scheduler_block_size

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        params: object = None,
        max_tokens: int = 1,
        lora: LoRARequest | None = None,
        salt: str | None = None,
    ) -> Request:
        fields = {"block_hasher": self._hasher, "lora_request": lora, "cache_salt": salt}
        return self.enter(make_request(request_id, prompt, params, fields, max_tokens=max_tokens))

    def schedule(self) -> SchedulerOutput:
        return self.vllm.schedule()

    def end(self, step: SchedulerOutput, report: WorkerReport | None = None, **said: set[Any]) -> list[Any]:
        """Ends `step`: each request that has all its tokens gets one more. `said`: more of the `KVConnectorOutput`.
        Returns the outputs."""
        requests = [self.vllm.requests[name] for name in step.num_scheduled_tokens]
        tokens = [[TOKEN] if each.num_computed_tokens >= each.num_tokens else [] for each in requests]
        metadata = None if report is None else ReportMetadata(report)
        told = KVConnectorOutput(kv_connector_worker_meta=metadata, **said)
        return self.end_step(step, tokens, told if report is not None or said else None)

    def step(self, report: WorkerReport | None = None, **said: set[Any]) -> tuple[SchedulerOutput, list[Any]]:
        step = self.schedule()
        return step, self.end(step, report, **said)

    def preempt(self, request: Request) -> None:
        """Takes a running request's blocks away, as where they run out. A step that was not ended is forgotten."""
        self.vllm.running.remove(request)
        self.vllm._preempt_request(request, 0.0)
        request.num_output_placeholders = 0
        if hasattr(request, "num_in_flight_tokens"):
            request.num_in_flight_tokens = request.num_stale_output_tokens = 0
        vars(request).pop(STEPS_IN_FLIGHT, None)
        self.vllm.prev_step_scheduled_req_ids.clear()

    def evict(self, request: Request, block: int, group: int = 0) -> None:
        """Takes number `block` of a prompt out of the prefix cache, of one cache group."""
        [cached] = self.pool.get_cached_block(request.block_hashes[block], [group])
        self.pool._maybe_evict_cached_block(cached)

    def close(self) -> None:
        self.connector.shutdown()


@pytest.fixture(scope="session")
def scheduled_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the model that schedulers are told of."""
    return make_model(TINY, tmp_path_factory.mktemp("models"))


@pytest.fixture
def decode(scheduled_model: Path) -> Iterator[RealScheduler]:
    scheduler = RealScheduler(Role.DECODE, scheduled_model)
    yield scheduler
    scheduler.close()


@pytest.fixture
def all_prefilled() -> Iterator[dict[str, Any]]:
    """`kv_transfer_params` as the proxy sends them to decode, with a metaserver where every prefill succeeds."""
    with metaserver(_succeed) as url:
        yield {"do_remote_prefill": True, "metaserver": url}


def _succeed(post: BaseHTTPRequestHandler, _: bytes) -> None:
    post.send_response(200)
    post.end_headers()
