# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/plan.py: a decode rank whose caches are as large as real ones, and take no memory."""

from typing import Any
from unittest import mock

import torch

from harness import rank_programs
from harness.kv import make_caches


class UntouchedDecodeRank(rank_programs.DecodeRank):
    def __post_init__(self) -> None:
        with mock.patch.object(rank_programs, "make_caches", _untouched_caches):
            super().__post_init__()


def _untouched_caches(*args: Any) -> Any:
    with mock.patch.object(torch.Tensor, "zero_", lambda tensor: tensor):  # zeros would be written
        return make_caches(*args)
