# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM 0.23 to 0.33: the worker's own calls that change weights at run time are noticed (`core/weights.py`).

vLLM tells a connector of none of them. The patch goes when it does. Trainers that write to parameters with code of
their own, in a worker extension for example, go unnoticed.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

from vllm_ascend_pd.core.weights import LoadedWeights

_WORKERS = (("vllm.v1.worker.gpu_worker", "Worker"), ("vllm_ascend.worker.worker", "NPUWorker"))
UPDATES = ("reload_weights", "update_weights", "finish_weight_update", "reset_weights")
"""Methods of the worker. The last one comes with vLLM 0.32, whose `/weight_checker` calls it."""
_IN_SESSIONS = ("update_weights", "finish_weight_update")
"""Those of an update that the worker has been told to start."""

ReadFiles = Callable[[str | None], str]
"""Returns the fingerprint of the files in a folder; None for the folder of the model's configuration."""

# Models of this process. The model's thread uses it.
_followed: "WeakKeyDictionary[LoadedWeights, ReadFiles]" = WeakKeyDictionary()


def follow(loaded: LoadedWeights, read: ReadFiles) -> None:
    """Records updates of the weights from now on. The worker that has loaded them has been imported."""
    _followed[loaded] = read
    for module, name in _WORKERS:
        worker = getattr(sys.modules.get(module), name, None)
        for update in UPDATES:
            method = vars(worker).get(update) if worker is not None else None
            if method is not None and not hasattr(method, "_is_followed"):
                setattr(worker, update, _followed_by(method))


def _followed_by(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def update(*args: Any, **kwargs: Any) -> Any:
        # From 0.30 on, such an update may be of the layers that draft alone.
        if method.__name__ in _IN_SESSIONS and getattr(args[0], "_weight_update_is_draft", False):
            return method(*args, **kwargs)
        with ExitStack() as changing:
            for loaded, read in list(_followed.items()):
                changing.enter_context(loaded.changing(method.__name__, _files(method.__name__, read, args, kwargs)))
            return method(*args, **kwargs)

    update._is_followed = True  # type: ignore[attr-defined]
    return update


def _files(name: str, read: ReadFiles, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], str] | None:
    """Returns what reads the files that an update loads all weights from; None if it takes them from elsewhere."""
    from_elsewhere = len(args) > 1 or kwargs.get("weights_iterator") is not None
    if name != "reload_weights" or from_elsewhere or not kwargs.get("is_checkpoint_format", True):
        return None
    return functools.partial(read, kwargs.get("weights_path"))
