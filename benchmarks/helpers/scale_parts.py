# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/scale.py: the parts that both of its sides consist of, and how they are measured."""

import copy
import gc
import pickle
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from helpers.vllm_ascend_producer import NoTransfer

HOST = "127.0.0.1"
BLOCK, HEADS, PARTS = 128, 1, 2  # K and V; no byte moves, so what a block has does not matter
BLOCKS, STEPS = 8, 4  # of a prompt, and in how many steps it is prefilled
TOKENS = BLOCKS * BLOCK
TIMEOUT_S = 60.0
SCHEDULER = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
)
"""The calls that vLLM's scheduler makes."""


class Meter:
    """What one engine has cost: CPU seconds by call, bytes by kind."""

    def __init__(self, *threads: str) -> None:
        """`threads`: begins of names of those among the threads that are started in `owning`."""
        self.cpu: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._names = threads
        self._threads: dict[str, list[threading.Thread]] = {name: [] for name in threads}
        self._before: dict[str, float] = {}
        self._empty: list[float] = []

    @contextmanager
    def owning(self) -> Iterator[None]:
        before = set(threading.enumerate())
        yield
        for thread in set(threading.enumerate()) - before:
            for name in self._names:
                if thread.name.startswith(name):
                    self._threads[name].append(thread)

    def begin(self) -> None:
        self.cpu.clear()
        self.bytes.clear()
        self._empty = []
        self._before = self._read()

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        begun = time.thread_time()
        result = call(*args)
        self.cpu[name] += time.thread_time() - begun
        return result

    def carried(self, kind: str, message: Any) -> Any:
        """Returns the object as vLLM's executor carries it to another process."""
        if message is None:
            return None
        encoded = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self.bytes[kind] += len(encoded)
        return pickle.loads(encoded)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A step with nothing in it: what it costs is kept apart."""
        cpu, sizes = self.cpu.copy(), self.bytes.copy()
        yield
        self._empty.append(sum((self.cpu - cpu).values()))
        self.cpu, self.bytes = cpu, sizes

    def costs(self) -> dict[str, Any]:
        """Returns seconds and bytes since `begin`."""
        threads = {name: now - self._before[name] for name, now in self._read().items()}
        empty = sorted(self._empty)
        return {
            "scheduler": sum(self.cpu[name] for name in SCHEDULER),
            "rank": self.cpu["rank"],
            "threads": threads,
            "bytes": dict(self.bytes),
            "empty_step": empty[len(empty) // 2] if empty else 0.0,
        }

    def _read(self) -> dict[str, float]:
        return {
            name: sum(time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in found if t.ident)
            for name, found in self._threads.items()
        }


class Configs:
    """vLLM's configuration of an engine, and what the connector's scheduler and ranks are made of."""

    def __init__(self, model: str, layers: int, num_blocks: int) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from harness.kv import layer_name
        from vllm_ascend_pd.core.caches import describe
        from vllm_ascend_pd.core.layout import LayerSpec

        self._config = EngineArgs(model=model, enforce_eager=True, max_model_len=2 * TOKENS).create_engine_config()
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=1, dtype=torch.bfloat16)
        names = [layer_name(i) for i in range(layers)]
        self._groups = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(names, spec)])
        # Never touched, so it takes no memory.
        caches = {
            name: tuple(torch.empty((num_blocks, BLOCK, HEADS, 1), dtype=torch.bfloat16) for _ in range(PARTS))
            for name in names
        }
        specs = dict.fromkeys(names, LayerSpec(0, BLOCK, HEADS, HEADS))
        self.caches = describe(caches, specs, heads_first=False)

    def scheduler(self, role: str, engine_id: str, port: int) -> Any:
        """The connector of an engine's scheduler."""
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from vllm_ascend_pd.connector.connector import LayerwisePushConnector

        config = copy.copy(self._config)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="LayerwisePushConnector",
            kv_role=role,
            engine_id=engine_id,
            kv_port=port,
            kv_connector_extra_config={"who_computes": "prefill"},
        )
        return LayerwisePushConnector(config, KVConnectorRole.SCHEDULER, self._groups)

    def rank_info(self, engine_id: str) -> Any:
        from vllm_ascend_pd.connector.model import model_summary
        from vllm_ascend_pd.core.topology import RankInfo, sharding

        return RankInfo(engine_id, model_summary(self._config), HOST, 0, sharding(1), 0, 1, (0,))

    def engine(self) -> Any:
        """Mooncake's is one that does nothing, at Mooncake's interface."""
        from vllm_ascend_pd.transport.batches import TransferLimits
        from vllm_ascend_pd.transport.engine import TransferEngine

        with mock.patch("mooncake.engine.TransferEngine", return_value=NoTransfer()):
            return TransferEngine(HOST, "rdma", TransferLimits.over("ascend"))  # not slept on


class Blocks:
    """The part of vLLM's KVCacheBlocks that a connector uses."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self.ids),)


def blocks_of(i: int, blocks: int = BLOCKS) -> list[int]:
    """Returns the blocks of a wave's i-th request. Block 0 belongs to no request."""
    return list(range(1 + i * BLOCKS, 1 + i * BLOCKS + blocks))


class Memory:
    """Measures the bytes of Python's objects since `begin`. It slows everything down while it runs."""

    def begin(self) -> None:
        gc.collect()
        tracemalloc.start()

    def end(self) -> int:
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held
