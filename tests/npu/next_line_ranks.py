# SPDX-License-Identifier: Apache-2.0
"""Ranks with sparse attention's caches of vllm-ascend 0.30: an index has a cache of its own (next_line_caches.py)."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.kv import Model, layer_name
from harness.rank_programs import DecodeRank, PrefillRank
from vllm_ascend_pd.core.layout import LayerSpec

VARIABLE = "CANN_ON_HOST_TEST_VLLM"
"""Ranks with this variable have a process that has imported no other vLLM."""


@dataclass(frozen=True)
class SparseModel(Model):
    """`main`, `keys`: names of the specs in next_line_caches.py."""

    main: str = "MAIN"
    keys: str = "KEYS"


class _SparseRank:
    """What both sides' ranks add to those of the harness."""

    def make(self: Any) -> tuple[dict[str, tuple[torch.Tensor, ...]], dict[str, LayerSpec]]:
        if (path := str(Path(sys.prefix, "vllm-0.30"))) not in sys.path:
            sys.path.insert(0, path)
        import next_line_caches as next_line
        from vllm_ascend_pd.connector.caches import caches_of_layers

        layers = [layer_name(layer) for layer in self.side.layers_of(self.pp_rank, self.model)]
        specs = next_line.of_layers(
            layers, *(getattr(next_line, which) for which in (self.model.main, self.model.keys))
        )
        _, caches, ours = next_line.made(specs, self.side.num_blocks, self.on)
        self.announced = caches_of_layers(ours)
        return caches, ours

    def __post_init__(self: Any) -> None:
        super().__post_init__()  # type: ignore[misc]
        # To the tests a layer has one tuple of tensors, as in vllm-ascend 0.23.
        parts = self.caches
        self.caches = {
            layer: tuple(part for name in self.announced.get(layer, [layer]) for part in parts[name])
            for layer in parts
            if layer.endswith(".attn")
        }


class SparsePrefillRank(_SparseRank, PrefillRank):
    def __post_init__(self) -> None:
        super().__post_init__()
        computed = self.worker.layer_computed

        def all_computed(layer: str) -> None:
            for name in self.announced.get(layer, [layer]):
                computed(name)

        self.worker.layer_computed = all_computed  # type: ignore[method-assign]


class SparseDecodeRank(_SparseRank, DecodeRank):
    pass
