# SPDX-License-Identifier: Apache-2.0
"""No kernel of linear attention is emulated: a model that needs one ends with its name."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"fla_npu.ops.ascendc.{name} is not emulated")

    return kernel
