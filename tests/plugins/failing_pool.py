# SPDX-License-Identifier: Apache-2.0
"""vLLM's ExampleConnector, which keeps KV in files, with loads that fail."""

from pathlib import Path
from typing import Any

from failing_loads import failing_in
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

FAILING = "failing"
"""A file in the folder of the KV: numbers of the blocks of a prompt that cannot be loaded. Missing: all can."""


class FailingPool(ExampleConnector):
    """Leaves other KV in blocks that it fails to load."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lost: set[int] = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        numbers = failing_in(Path(self._storage_path, FAILING))
        for request in self._get_connector_metadata().requests:
            if not request.is_store:
                blocks = (request.slot_mapping[:: self._block_size] // self._block_size).tolist()
                self._lost |= {blocks[number] for number in numbers if number < len(blocks)}
        for layer in forward_context.no_compile_layers.values():
            if self._lost and hasattr(layer, "kv_cache"):
                layer.kv_cache[sorted(self._lost)] = 0.5

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self._lost = self._lost, set()
        return lost
