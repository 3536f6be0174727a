# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM 0.23 to 0.32: every model that is built has its loaded weights recorded (`core/weights.py`).

What is patched, and why there:
- `model_loader.utils.record_metadata_for_reloading`: `initialize_model` calls it with each new model, for any loader.
  The patch gives the model a `load_weights` of its own. All loads and updates in checkpoint format call that: the first
  load, `reload_weights`, weight transfer, and a trainer's own calls.
- `update_weights`, `reload_weights` and `reset_weights` of the worker: for updates that write to parameters directly.
  vLLM 0.32's `/weight_checker` resets weights to zero; vLLM 0.23 does not have it.

Trainers that write to parameters with their own code go unnoticed.
"""

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from vllm_ascend_pd.core.weights import LoadedWeights, NamedTensor

_LOADER = "vllm.model_executor.model_loader.utils"
_WORKERS = (("vllm.v1.worker.gpu_worker", "Worker"), ("vllm_ascend.worker.worker", "NPUWorker"))
_UPDATES = ("update_weights", "reload_weights", "reset_weights")
_SPLITTING_FORMATS = ("bitsandbytes",)
"""Load formats that cut tensors up for each tensor-parallel rank before `load_weights` is called."""

# Written by the thread that builds models, which is the model's.
_records: "WeakKeyDictionary[torch.nn.Module, LoadedWeights]" = WeakKeyDictionary()


def install() -> None:
    """Patches vLLM now, or as soon as it imports the module that builds models. May be called again.

    Processes without a model never import that module.
    """
    if _LOADER in sys.modules:
        _patch_loader(sys.modules[_LOADER])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def weights_of(layers: Collection[torch.nn.Module], load_format: str = "auto") -> LoadedWeights | None:
    """Returns the record of the model that these attention layers belong to.

    None if the plugin was not loaded, or vLLM has changed. `load_format`: as in vLLM's `LoadConfig`.
    """
    containing = [model for model in _records if not {*map(id, layers)} - {*map(id, model.modules())}]
    # A model may consist of models, each with a record.
    whole = max(containing, key=lambda model: sum(1 for _ in model.modules()), default=None)
    if whole is None or not layers:
        return None
    if load_format in _SPLITTING_FORMATS:
        _records[whole].stay_unknown()
    return _records[whole]


class _Finder(importlib.abc.MetaPathFinder):
    """Patches the loader's module when it is imported. Finds no modules itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LOADER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            _patch_loader(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _patch_loader(module: ModuleType) -> None:
    built: Callable[[torch.nn.Module], None] | None = getattr(module, "record_metadata_for_reloading", None)
    if built is None or hasattr(built, "_records_weights"):
        return

    @functools.wraps(built)
    def built_and_recorded(model: torch.nn.Module) -> None:
        built(model)
        record(model)
        _patch_workers()

    built_and_recorded._records_weights = True  # type: ignore[attr-defined]
    module.record_metadata_for_reloading = built_and_recorded  # type: ignore[attr-defined]


def record(model: torch.nn.Module) -> None:
    """Gives `model` a `load_weights` that records what it loads, if it has one to load with."""
    original = getattr(type(model), "load_weights", None)
    if original is None:
        return
    _records[model] = LoadedWeights()
    # A method, so that a copy of the model gets one that loads into the copy.
    model.load_weights = MethodType(_recorded(original), model)


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_weights(self: torch.nn.Module, weights: Iterable[NamedTensor], *args: Any, **kwargs: Any) -> Any:
        def into(noted: Iterable[NamedTensor]) -> Any:
            return type(self).load_weights(self, noted, *args, **kwargs)  # which others may have patched since

        loaded = _records.get(self)
        return into(weights) if loaded is None else loaded.load(weights, into)

    return load_weights


def _patch_workers() -> None:
    """The worker that builds a model has been imported by then."""
    for module, name in _WORKERS:
        worker = getattr(sys.modules.get(module), name, None)
        for update in _UPDATES:
            method = vars(worker).get(update) if worker is not None else None
            if method is not None and not hasattr(method, "_records_weights"):
                setattr(worker, update, _noticing(method))


def _noticing(update: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `update`, changed so that an update without a recorded load counts as one for every model."""

    @functools.wraps(update)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        before = {id(loaded): loaded.current.version for loaded in _records.values()}
        try:
            return update(*args, **kwargs)
        finally:
            loads = list(_records.values())
            if all(before.get(id(loaded)) == loaded.current.version for loaded in loads):
                for loaded in loads:
                    loaded.changed_unseen(update.__name__)

    noticed._records_weights = True  # type: ignore[attr-defined]
    return noticed
