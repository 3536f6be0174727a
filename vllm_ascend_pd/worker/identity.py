# SPDX-License-Identifier: Apache-2.0
"""Who a worker is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """One rank of one engine. `host` is the address peers reach it at; `model` a summary both sides compare;
    `tp_ranks` are the ranks of its tensor-parallel group in torch's default world, in order."""

    engine_id: str
    model: str
    host: str
    tp_rank: int
    tp: int
    pp_rank: int
    pp: int
    tp_ranks: tuple[int, ...]
