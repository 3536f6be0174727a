# SPDX-License-Identifier: Apache-2.0
"""The Python part of vLLM 0.23's CPU backend runs with the compiled part of the installed vLLM 0.30.

Its own is compiled for another torch. Two operators that it calls have one more argument in 0.30, and the one for
attention takes a window's whole size.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import _custom_ops
from vllm.platforms import current_platform


def use_installed_kernels() -> None:
    own = Path(vllm.__file__).parents[1]
    installed = PathFinder.find_spec("vllm", [path for path in sys.path if Path(path) != own])
    assert installed is not None
    vllm.__path__.extend(installed.submodule_search_locations or ())
    current_platform.import_kernels()
    del vllm.__path__[1:]
    _custom_ops.cpu_attn_get_scheduler_metadata = _plan
    _custom_ops.cpu_attention_with_kv_cache = _attend


def _plan(**arguments: Any) -> torch.Tensor:
    planned: torch.Tensor = torch.ops._C.get_scheduler_metadata(*arguments.values(), dynamic_causal=None)
    return planned


def _attend(sliding_window: tuple[int, int], **arguments: Any) -> None:
    to_the_left = sliding_window[0]
    size = -1 if to_the_left == -1 else to_the_left + 1
    torch.ops._C.cpu_attention_with_kv_cache(**arguments, sliding_window_size=size, dynamic_causal=None)
