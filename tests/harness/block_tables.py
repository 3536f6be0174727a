# SPDX-License-Identifier: Apache-2.0
"""vLLM's block tables of an engine without its scheduler: what is allocated and computed is the test's to say."""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from harness.scheduling import Scheduled, block_hasher, make_output, make_request
from vllm_ascend_pd.connector.caches import cache_groups
from vllm_ascend_pd.core.step import PrefillStep
from vllm_ascend_pd.prefill.scheduler import PrefillScheduler


class BlockTables:
    """`block`: tokens that the scheduler allocates at a time. `hash_block`: tokens of a hash of the prefix cache."""

    def __init__(
        self, config: KVCacheConfig, block: int, hash_block: int, max_model_len: int, caching: bool = True
    ) -> None:
        self.config = config
        self.groups = cache_groups(config)
        self.manager = KVCacheManager(
            config,
            max_model_len=max_model_len,
            scheduler_block_size=block,
            hash_block_size=hash_block,
            enable_caching=caching,
        )
        self._hasher = block_hasher(hash_block)

    @property
    def pool(self) -> Any:
        return self.manager.block_pool

    def request(self, name: str, prompt: int | Iterable[int], params: object = None) -> Request:
        return make_request(name, prompt, params, {"block_hasher": self._hasher})

    def blocks(self, name: str) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(name)

    def cached(self, request: Request) -> dict[str, Any]:
        """Returns what `allocate` gets of a request whose beginning is in the prefix cache."""
        blocks, tokens = self.manager.get_computed_blocks(request)[:2]
        return {"num_new_computed_tokens": tokens, "new_computed_blocks": blocks}

    def allocate(self, request: Request, tokens: int, **known: Any) -> tuple[list[int], ...]:
        """Returns the request's blocks. `known`: more of vLLM's `allocate_slots`."""
        assert self.manager.allocate_slots(request, tokens, **known) is not None
        return self.blocks(request.request_id)

    def compute(self, request: Request, chunk: int) -> Iterable[range]:
        """Computes a request by chunks, and leaves it in the prefix cache. Yields the tokens of each chunk."""
        for start in range(0, request.num_tokens, chunk):
            tokens = range(start, min(start + chunk, request.num_tokens))
            self.allocate(request, len(tokens))
            request.num_computed_tokens = tokens.stop
            yield tokens
        self.manager.free(request)

    def step(self, scheduler: PrefillScheduler, request: Request, tokens: int, **cached: Any) -> PrefillStep:
        """Computes so many more tokens of a request. Returns what prefill's ranks are told. `cached`: in the first
        step, as `cached` returns it."""
        computed = request.num_computed_tokens + cached.get("num_new_computed_tokens", 0)
        before = [len(ids) for ids in self.blocks(request.request_id)]
        blocks = self.allocate(request, tokens, **cached)
        part = Scheduled(request, tuple(ids[n:] for ids, n in zip(blocks, before, strict=True)), computed, tokens)
        if not any(before):
            scheduler.allocated(request, blocks)
        step = scheduler.build_step(make_output(**{"running" if any(before) else "new": [part]}))
        request.num_computed_tokens = computed + tokens
        return step
