# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM 0.23 to 0.33: an engine that sleeps (`/sleep`) tells its ranks, and hears from them when it is awake.

Before 0.33, vLLM's workers tell a connector nothing. From then on they call its `unregister_kv_caches` and
`restore_kv_caches`. No version asks ranks for their handshake again, although their memory is registered anew.
"""

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from vllm_ascend_pd.core.role import ConnectorRole

_WORKERS = (
    ("vllm.v1.worker.gpu_worker", "Worker"),
    ("vllm.v1.worker.cpu_worker", "CPUWorker"),
    ("vllm_ascend.worker.worker", "NPUWorker"),
)

# Roles of this process: of ranks, and of schedulers. The model's thread uses one, the scheduler's thread the other.
_ranks: "WeakSet[ConnectorRole]" = WeakSet()
_schedulers: "WeakSet[ConnectorRole]" = WeakSet()


def follow_worker(role: "ConnectorRole") -> None:
    """Has `role` sleep before this rank's worker frees memory, and wake when it has memory again."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return
    _ranks.add(role)
    for module, name in _WORKERS:
        worker = getattr(sys.modules.get(module), name, None)
        for method, made in (("sleep", _sleep), ("wake_up", _wake_up)):
            if worker is not None and method in vars(worker):
                _replace(worker, method, made)


def follow_engine(role: "ConnectorRole") -> None:
    """Has the scheduler's `role` take the ranks' handshakes again whenever this engine has been woken."""
    from vllm.v1.engine.core import EngineCore

    _schedulers.add(role)
    _replace(EngineCore, "wake_up", _wake_engine)


def _replace(owner: type, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    method = vars(owner)[name]
    if not hasattr(method, "_is_followed"):
        followed = functools.wraps(method)(made(method))
        followed._is_followed = True  # type: ignore[attr-defined]
        setattr(owner, name, followed)


def _sleep(method: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(*args: Any, **kwargs: Any) -> Any:
        for role in list(_ranks):
            role.sleep()
        return method(*args, **kwargs)

    return sleep


def _wake_up(method: Callable[..., Any]) -> Callable[..., Any]:
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        woken = method(self, tags)
        if tags is None or "kv_cache" in tags:
            for role in list(_ranks):
                role.wake()
        return woken

    return wake_up


def _wake_engine(method: Callable[..., Any]) -> Callable[..., Any]:
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        woken = method(self, tags)
        if not self.model_executor.is_sleeping:
            ranks: dict[tuple[int, int], Any] = {}
            for of_worker in self.model_executor.get_kv_connector_handshake_metadata():
                ranks |= of_worker or {}
            for role in list(_schedulers):
                role.take_handshakes(ranks)
        return woken

    return wake_up
