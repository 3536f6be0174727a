# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler with our connector in it, and a simulated worker."""

import os
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from harness.engines import Role
from harness.metaserver import metaserver
from harness.models import TINY, make_model
from vllm_ascend_pd import register
from vllm_ascend_pd.connector.metrics import ReportMetadata
from vllm_ascend_pd.core.config import ConnectorConfig, parse_config
from vllm_ascend_pd.core.step import WorkerReport

BLOCK = 16
TOKEN = 7
"""What every step generates."""

_STRUCTURED = types.SimpleNamespace(
    should_advance=lambda request: False,
    grammar_bitmask=lambda *_: None,
    grammar_init=lambda request: None,
    should_fill_bitmask=lambda request: False,
    accept_tokens=lambda *_, **__: True,
)


def _parse_config(extra: dict[str, Any]) -> ConnectorConfig:
    """Steps that compute nothing hardly wait."""
    return msgspec.structs.replace(parse_config(extra), idle_wait_s=0.001)


class RealScheduler:
    """`windows`: how many tokens each further cache group sees; the first sees all. `states`: how many groups of
    states there are, cached in mode "align". `drafts`: for how many drafted tokens they have blocks. `dcp`: how many
    ranks of context parallelism share tokens. `extra`: the connector's keys."""

    def __init__(
        self,
        role: Role,
        model: Path,
        blocks: int = 200,
        *,
        step_tokens: int = 512,
        windows: Sequence[int] = (),
        states: int = 0,
        drafts: int = 0,
        dcp: int = 1,
        load_failure_policy: str = "fail",
        extra: Mapping[str, object] = MappingProxyType({"who_computes": "prefill"}),
    ) -> None:
        register()
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(model), tokenizer=str(model), skip_tokenizer_init=True, max_model_len=512, dtype="float32"
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=step_tokens,
                max_model_len=512,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="LayerwisePushConnector",
                kv_role=role.value,
                kv_load_failure_policy=load_failure_policy,
                kv_connector_extra_config={**extra},
            ),
        )
        config.cache_config.num_gpu_blocks = blocks
        config.parallel_config.tensor_parallel_size = config.parallel_config.decode_context_parallel_size = dcp
        config.parallel_config.cp_kv_cache_interleave_size = BLOCK
        shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
        specs: list[Any] = [
            FullAttentionSpec(**shape),
            *(SlidingWindowSpec(**shape, sliding_window=size) for size in windows),
        ]
        if states:
            config.cache_config.mamba_cache_mode = "align"
            state = MambaSpec(
                block_size=BLOCK,
                shapes=((2, 2),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_speculative_blocks=drafts,
            )
            specs += states * [state]
        groups = [KVCacheGroupSpec([f"layers.{index}.attn"], spec) for index, spec in enumerate(specs)]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        with mock.patch("vllm_ascend_pd.connector.setup.parse_config", _parse_config):
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
                structured_output_manager=_STRUCTURED,
                block_size=BLOCK * dcp,
                hash_block_size=BLOCK,
                log_stats=True,
            )
        if dcp > 1:  # hits end with blocks, as in vllm-ascend's own coordinator (`patch_kv_cache_coordinator.py`)
            coordinator = self.scheduler.kv_cache_manager.coordinator
            coordinator.enable_partial_hash_hits = False
            for manager in coordinator.single_type_managers:
                manager.cache_hit_alignment_tokens = coordinator.scheduler_block_size

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        params: object = None,
        max_tokens: int = 1,
        lora: LoRARequest | None = None,
        salt: str | None = None,
    ) -> Request:
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=0, extra_args={"kv_transfer_params": params}
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            lora_request=lora,
            cache_salt=salt,
        )
        self.scheduler.add_request(request)
        blocks = self.scheduler.connector._role._blocks
        while not blocks.is_ready(request):  # another thread reads its adapter
            blocks.take_adapters()
        return request

    def schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule()

    def end(self, step: SchedulerOutput, report: WorkerReport | None = None, **said: set[Any]) -> list[Any]:
        """Ends `step`: each request that has all its tokens gets one more. `said`: more of the `KVConnectorOutput`.
        Returns the outputs."""
        ids = list(step.num_scheduled_tokens)
        requests = [self.scheduler.requests[each] for each in ids]
        computed = {each.request_id: each.num_computed_tokens >= each.num_tokens for each in requests}
        metadata = None if report is None else ReportMetadata(report)
        told = KVConnectorOutput(kv_connector_worker_meta=metadata, **said)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: index for index, each in enumerate(ids)},
            sampled_token_ids=[[TOKEN] if computed[each] else [] for each in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=told if report is not None or said else None,
        )
        by_client = self.scheduler.update_from_output(step, output)
        return [each for outputs in by_client.values() for each in outputs.outputs]

    def step(self, report: WorkerReport | None = None, **said: set[Any]) -> tuple[SchedulerOutput, list[Any]]:
        step = self.schedule()
        return step, self.end(step, report, **said)

    def preempt(self, request: Request) -> None:
        """Takes a running request's blocks away, as where they run out. A step that was not ended is forgotten."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)
        request.num_output_placeholders = 0
        if hasattr(request, "num_in_flight_tokens"):
            request.num_in_flight_tokens = request.num_stale_output_tokens = 0
        self.scheduler.prev_step_scheduled_req_ids.clear()

    def evict(self, request: Request, block: int, group: int = 0) -> None:
        """Takes number `block` of a prompt out of the prefix cache, of one cache group."""
        [cached] = self.pool.get_cached_block(request.block_hashes[block], [group])
        self.pool._maybe_evict_cached_block(cached)

    def close(self) -> None:
        self.scheduler.connector.shutdown()


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
