# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4 without a model: vLLM's own block tables and our schedulers of both sides, over ranks' real transfers."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes

from harness.block_tables import BlockTables
from harness.compressed_ranks import CacheView, CompressedDecode, CompressedModel, CompressedPrefill, Rows
from harness.kv import Side
from harness.rank_programs import DRAFT
from harness.ranks import Pair
from harness.schedulers import prefill_scheduler
from vllm_ascend_pd.connector.caches import caches_of_layers, layer_specs
from vllm_ascend_pd.connector.vllm_requests import VllmRequests
from vllm_ascend_pd.core.caches import TokenGroup
from vllm_ascend_pd.core.layout import LayerSpec, Order
from vllm_ascend_pd.core.step import DecodeStep, PrefillStep
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.decode.tickets import EngineInfo, TicketIssuer

MAX_TOKENS = 16384


def assert_every_byte_arrives(cluster: "Cluster") -> None:
    """Prompts end at an entry's end, within one and before the first one; chunks end within entries."""
    chance = random.Random(1)
    for seed, (length, chunk) in enumerate([(601, 301), (258, 130), (3, 64), (129, 61), (256, 256)]):
        tokens = [chance.randrange(1000) for _ in range(length)]
        p_known, d_known, wrong = cluster.transfer(f"request-{seed}", tokens, chunk, seed)
        assert (p_known, d_known) == (0, 0)
        assert wrong == [], f"{length} tokens"
        cluster.pair.each(cluster.pair.d_ranks, "clear")


def assert_prefixes_are_hit(cluster: "Cluster", cached: int) -> None:
    """A prefix of `cached` tokens that prefill has, and then one that decode has, too."""
    chance = random.Random(2)
    tokens = [chance.randrange(1000) for _ in range(cached + 70)]
    cluster.warm_prefill([*tokens[:cached], *(1 for _ in range(70))], 256, seed=0)
    assert cluster.transfer("request-0", tokens, 256, 0) == (cached, 0, [])
    cluster.pair.each(cluster.pair.d_ranks, "clear")
    cluster.warm_decode([*tokens[:cached], *(2 for _ in range(70))], 256)
    assert cluster.transfer("request-1", tokens, 256, 0) == (cached, cached, [])


def config_of(fields: Mapping[str, Any], cache_config: Any, **others: Any) -> Any:
    """What vLLM's code reads of its configuration for a model with these fields in config.json. `others`: the rest."""
    text = SimpleNamespace(**fields)
    return SimpleNamespace(
        cache_config=cache_config,
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, hf_text_config=text, hf_config=text, get_total_num_kv_heads=lambda: 1
        ),
        **{"speculative_config": None, **others},
    )


def specs_of(
    vllm_config: Any, layers: Sequence[str], own: str, kinds: Callable[[str, int], tuple[type, dict[str, Any]]]
) -> dict[str, Any]:
    """Returns the specs of a model's caches, by name.

    layers: the names of its attention layers.
    own: what is appended to a layer's name for its compressed cache, if it has one.
    kinds: which class makes the spec of a layer's cache with entries for so many tokens, and of which of its fields.
    """
    found = {}
    for layer, ratio in zip(layers, vllm_config.model_config.hf_config.compress_ratios, strict=False):
        caches = [".swa_cache", own, ".compressor.state_cache", ".indexer.k_cache", ".indexer.compressor.state_cache"]
        for cache in caches if ratio == 4 else caches[: 3 if ratio > 1 else 1]:
            kind, fields = kinds(cache, ratio)
            module = kind.__new__(kind)
            torch.nn.Module.__init__(module)
            vars(module).update(fields)
            found[layer + cache] = module.get_kv_cache_spec(vllm_config)
    return found


@dataclass(frozen=True)
class Caches:
    """An engine's caches, as its own code makes them."""

    config: Any  # KVCacheConfig
    vllm_config: Any
    # By layer.
    tensors: Mapping[str, Any]
    # Whether tensors are `[num_blocks, heads, entries, width]`, and not `[num_blocks, entries, heads, width]`.
    heads_first: bool = False

    def model(self) -> CompressedModel:
        """Describes the tensors, so that ranks allocate their like."""
        memories: dict[int, int] = {}
        views = []
        for layer, tensors in self.tensors.items():
            for part, tensor in enumerate([tensors] if isinstance(tensors, torch.Tensor) else tensors):
                storage = tensor.untyped_storage()
                memory = list(memories).index(storage.data_ptr()) if storage.data_ptr() in memories else len(memories)
                memories[storage.data_ptr()] = storage.nbytes()
                offset = tensor.data_ptr() - storage.data_ptr()
                views.append(CacheView(layer, part, memory, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype))
        specs = layer_specs(self.config, self.vllm_config)
        drafts = [layer for layer, spec in specs.items() if spec.draft]
        specs |= {layer: replace(specs[layer], draft=DRAFT) for layer in drafts}
        return CompressedModel(
            order=Order.HEAD_MAJOR if self.heads_first else Order.TOKEN_MAJOR,
            drafts=len(drafts),
            memories=tuple(memories.values()),
            views=tuple(views),
            specs=tuple(specs.items()),
            announced=tuple(map(tuple, caches_of_layers(specs).values())),
        )


class Engine(BlockTables):
    """One engine's block tables."""

    def __init__(self, caches: Caches) -> None:
        config = generate_scheduler_kv_cache_config([caches.config])
        sizes = resolve_kv_cache_block_sizes(config, caches.vllm_config)
        super().__init__(config, *sizes, max_model_len=MAX_TOKENS)
        self.spans = [group.span for group in self.groups if isinstance(group, TokenGroup)]
        specs = layer_specs(caches.config, caches.vllm_config).values()
        self.kinds = sorted({(spec.group, spec.tokens_per_entry) for spec in specs if isinstance(spec, LayerSpec)})

    def rows(self, name: str, seed: int, start: int, stop: int) -> Rows:
        """Returns where entries that become complete with tokens `[start, stop)` lie."""
        found: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        blocks = self.blocks(name)
        for index, ratio in self.kinds:
            per_block, ids = self.spans[index] // ratio, blocks[index]
            for entry in range(start // ratio, stop // ratio):
                block, place = divmod(entry, per_block)
                if ids[block]:
                    found.setdefault((index, ratio), []).append((ids[block], place, seed, entry))
        return found

    def warm(self, tokens: list[int], chunk: int, seed: int) -> Iterator[Rows]:
        """Computes a prompt that stays in the prefix cache. Yields what each step writes."""
        for computed in self.compute(self.request("before", tokens), chunk):
            yield self.rows("before", seed, computed.start, computed.stop)


class Cluster:
    """A prefill and a decode engine of one model, with ranks that move real bytes."""

    def __init__(self, p_caches: Caches, d_caches: Caches, p_tp: int, d_tp: int) -> None:
        p_side, d_side = (Side(tp, caches.config.num_blocks) for tp, caches in ((p_tp, p_caches), (d_tp, d_caches)))
        programs = (CompressedPrefill, CompressedDecode)
        self.p, self.d = Engine(p_caches), Engine(d_caches)
        self.pair = Pair(d_caches.model(), p_side, d_side, p_model=p_caches.model(), programs=programs)
        self.scheduler = prefill_scheduler(self.p.groups, pool=self.p.pool)
        draft = DRAFT if self.pair.model.drafts else ""
        info = EngineInfo(self.pair.decode_id, "127.0.0.1", self.pair.port, d_tp, draft=draft)
        self.issuer = TicketIssuer(info, self.d.groups, VllmRequests())

    def warm_prefill(self, tokens: list[int], chunk: int, seed: int) -> None:
        """Prefill computes a prompt for nobody, and caches it."""
        for rows in self.p.warm(tokens, chunk, seed):
            self.pair.each(self.pair.p_ranks, "write", rows)

    def warm_decode(self, tokens: list[int], chunk: int) -> None:
        """Decode's block tables cache a prompt. Its caches stay zero, so that nothing may be written there."""
        for _ in self.d.warm(tokens, chunk, 0):
            pass

    def transfer(self, name: str, tokens: list[int], chunk: int, seed: int) -> tuple[int, int, list[str]]:
        """Sends a prompt. Returns how many tokens prefill and decode had cached, and what is wrong on decode."""
        asked = self.d.request(name, tokens)
        cached = self.d.cached(asked)
        d_known = cached["num_new_computed_tokens"]
        external = self.issuer.num_tokens(asked) - d_known
        blocks = self.d.allocate(asked, 0, num_external_computed_tokens=external, delay_cache_blocks=True, **cached)
        ticket = self.issuer.issue(asked, blocks, external)
        self.pair._request_of[ticket.ticket_id] = name
        expect = self.issuer.expect(name, ticket, blocks)
        self.pair.each(self.pair.d_ranks, "step", DecodeStep([expect]))
        p_known = self._prefill(name, tokens, ticket, chunk, seed)
        received, failed = self.pair.wait_arrivals(1)
        assert failed == {}
        assert received == {name}
        assert self.pair.wait_sent(1) == {}
        self.scheduler.update(None, {name})
        rows = self.d.rows(name, seed, d_known, ticket.num_tokens)
        return p_known, d_known, [what for rank in self.pair.each(self.pair.d_ranks, "wrong", rows) for what in rank]

    def _prefill(self, name: str, tokens: list[int], ticket: Ticket, chunk: int, seed: int) -> int:
        request = self.p.request(name, tokens, msgspec.to_builtins(ticket))
        self.scheduler.add_request(request)
        cached = self.p.cached(request)
        known = cached["num_new_computed_tokens"]
        for start in range(known, len(tokens), chunk):
            stop = min(start + chunk, len(tokens))
            step = self.p.step(self.scheduler, request, stop - start, **(cached if start == known else {}))
            self.pair.each(self.pair.p_ranks, "computed", step, self.p.rows(name, seed, start, stop))
        self.scheduler.end_request(request)
        self.p.manager.free(request)
        self.pair.each(self.pair.p_ranks, "computed", PrefillStep(finished={name: None}), {})
        return known

    def close(self) -> None:
        assert self.pair.close() == []
