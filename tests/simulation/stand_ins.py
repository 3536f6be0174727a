# SPDX-License-Identifier: Apache-2.0
"""What the product imports from the standard library, on the kernel. `install` puts it into the product's modules."""

import asyncio
import queue as real_queue
import random as real_random
import secrets as real_secrets
import selectors
import sys
import threading as real_threading
import time as real_time
import uuid as real_uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as RealFuture
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio._backends._asyncio as anyio_loop
import zmq as real_zmq

from simulation.kernel import Task, kernel, monotonic


class Lock:
    """As `threading.Lock`."""

    is_reentrant = False

    def __init__(self) -> None:
        self.owner: object = None
        self.count = 0
        self._waiters: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = kernel().current
        while self.owner is not None and not (self.is_reentrant and self.owner is me):
            if not blocking:
                return False
            assert me is not None
            self._waiters.append(me)
            kernel().park()
        self.owner = me or self
        self.count += 1
        return True

    def release(self) -> None:
        self.count -= 1
        if self.count == 0:
            self.owner = None
            waiters, self._waiters = self._waiters, []
            for each in waiters:
                kernel().wake(each)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """As `threading.RLock`."""

    is_reentrant = True


class Condition:
    """As `threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiters: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me = kernel().current
        assert me is not None
        count, self._lock.count = self._lock.count, 1
        self._lock.release()
        self._waiters.append(me)
        woken = kernel().park(timeout)
        if me in self._waiters:
            self._waiters.remove(me)
        self._lock.acquire()
        self._lock.count = count
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else kernel().now + timeout
        while not (result := predicate()):
            if end is not None and kernel().now >= end:
                break
            self.wait(None if end is None else end - kernel().now)
        return result

    def notify(self, n: int = 1) -> None:
        woken, self._waiters = self._waiters[:n], self._waiters[n:]
        for each in woken:
            kernel().wake(each)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for each in waiters:
            kernel().wake(each)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else kernel().now + timeout
        while not self._is_set:
            if end is not None and kernel().now >= end:
                return False
            me = kernel().current
            assert me is not None
            self._waiters.append(me)
            kernel().park(None if end is None else end - kernel().now)
        return True


class Thread:
    """As `threading.Thread`."""

    def __init__(
        self,
        target: Callable[..., Any],
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._work = partial(target, *args, **(kwargs or {}))
        self.name = name
        self._task: Task | None = None
        self.ident: int | None = None

    def start(self) -> None:
        self._task = kernel().spawn(self._work, self.name)
        self._task.thread = self
        self.ident = id(self._task)

    def join(self, timeout: float | None = None) -> None:
        me = kernel().current
        if self._task is not None and not self._task.has_ended and me is not None:
            self._task.joiners.append(me)
            kernel().park(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.has_ended


_OUTSIDE = SimpleNamespace(name="outside", ident=0)


def get_ident() -> int:
    task = kernel().current
    return 0 if task is None else id(task)


def current_thread() -> Any:
    task = kernel().current
    return _OUTSIDE if task is None else task.thread


class SimpleQueue:
    """As `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters: list[Task] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiters:
            kernel().wake(self._waiters.pop(0))

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    def get_nowait(self) -> Any:
        if not self._items:
            raise real_queue.Empty
        return self._items.popleft()

    def get(self, timeout: float | None = None) -> Any:
        end = None if timeout is None else kernel().now + timeout
        while not self._items:
            if end is not None and kernel().now >= end:
                raise real_queue.Empty
            me = kernel().current
            assert me is not None
            self._waiters.append(me)
            kernel().park(None if end is None else end - kernel().now)
            if me in self._waiters:
                self._waiters.remove(me)
        return self._items.popleft()


class Future:
    """As `concurrent.futures.Future`, whose `result` blocks a simulated thread."""

    def __init__(self) -> None:
        self._done = Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def set_result(self, value: Any) -> None:
        self._value = value
        self._done.set()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value


class _Selector(selectors.BaseSelector):
    """Waits for wake-ups of other threads, and for time."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._is_woken = False

    def register(self, *_: Any) -> Any: ...
    def unregister(self, *_: Any) -> Any: ...
    def get_map(self) -> Any:
        return {}

    def select(self, timeout: float | None = None) -> list[Any]:
        if not self._is_woken and (timeout is None or timeout > 0):
            self._task = kernel().current
            kernel().park(timeout)
            self._task = None
        self._is_woken = False
        return []

    def wake(self) -> None:
        self._is_woken = True
        if self._task is not None:
            kernel().wake(self._task)


def number(cls: type) -> None:
    """Gives objects of a class hashes that do not depend on their addresses: asyncio and others iterate over sets."""

    def hash_of(self: Any) -> int:
        found: int | None = getattr(self, "_simulated_hash", None)
        if found is None:
            self._simulated_hash = found = kernel().new_number()
        return found

    cls.__hash__ = hash_of  # type: ignore[method-assign, assignment]


class _NumberedTask(asyncio.Task):  # type: ignore[type-arg]
    """A task, whose hash is the same in each process."""


number(_NumberedTask)


class _OrderedSet(dict[Any, None]):
    """As a set, in order of insertion."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def remove(self, item: Any) -> None:
        del self[item]


class CancelScope(anyio_loop.CancelScope):
    """anyio's, which has no room for a number."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._child_scopes = _OrderedSet()  # type: ignore[assignment]


class EventLoop(asyncio.BaseEventLoop):
    """An event loop of a simulated thread, without files and sockets."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Selector()
        self.set_task_factory(lambda loop, work, **options: _NumberedTask(work, loop=loop, **options))

    def time(self) -> float:
        return kernel().now + kernel().this_process.offset_s

    def _process_events(self, event_list: Any) -> None: ...
    def _write_to_self(self) -> None:
        self._selector.wake()


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


def _wall_clock() -> float:
    return 1_700_000_000.0 + kernel().now + kernel().this_process.wall_offset_s


def _secrets(bits: int) -> int:
    return kernel().draws("secrets").getrandbits(bits)


time = _module(
    "time",
    monotonic=monotonic,
    perf_counter=monotonic,
    time=_wall_clock,
    time_ns=lambda: int(_wall_clock() * 1e9),
    sleep=lambda seconds: kernel().park(seconds) and None,
)
threading = _module(
    "threading",
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Thread=Thread,
    get_ident=get_ident,
    current_thread=current_thread,
)
queue = _module("queue", SimpleQueue=SimpleQueue, Queue=SimpleQueue, Empty=real_queue.Empty)
secrets = _module(
    "secrets",
    token_hex=lambda nbytes=32: f"{_secrets(8 * nbytes):0{2 * nbytes}x}",
    token_bytes=lambda nbytes=32: _secrets(8 * nbytes).to_bytes(nbytes, "big"),
    token_urlsafe=lambda nbytes=32: f"{_secrets(8 * nbytes):x}",
    randbits=_secrets,
)
random = _module(
    "random",
    uniform=lambda a, b: kernel().draws("jitter").uniform(a, b),
    random=lambda: kernel().draws("jitter").random(),
)

uuid = _module("uuid", uuid4=lambda: real_uuid.UUID(int=_secrets(128), version=4))

# The clock and the threads of the product.
_STAND_INS: list[tuple[Any, Any]] = [
    (real_time, time),
    (real_threading, threading),
    (real_queue, queue),
    (real_secrets, secrets),
    (real_random, random),
    (real_uuid, uuid),
]


def _modules() -> list[ModuleType]:
    return [module for name, module in sorted(sys.modules.items()) if name.startswith("vllm_ascend_pd.")]


def install(zmq: ModuleType) -> None:
    """Puts the stand-ins and `zmq` into all loaded modules of the product. Import all that a run uses before."""
    from vllm_ascend_pd.transport import event_loop_thread, writer

    for module in _modules():
        for real, ours in [*_STAND_INS, (real_zmq, zmq)]:
            for name in [name for name, value in vars(module).items() if value is real]:
                setattr(module, name, ours)
    # Elsewhere, futures connect event loops and block nobody.
    assert writer.Future is RealFuture
    writer.Future = Future  # type: ignore[misc, assignment]
    event_loop_thread._Loop = EventLoop  # type: ignore[misc, assignment]
    anyio_loop.CancelScope = CancelScope  # type: ignore[misc]


def real_ones_left() -> list[str]:
    """Returns the names in the product's modules that refer to the real clock, threads or randomness."""
    real: list[Any] = [each for each, _ in _STAND_INS]
    functions = [value for module in real for value in vars(module).values() if callable(value)]
    found = []
    for module in _modules():
        for name, value in vars(module).items():
            is_one = any(value is each for each in real) or (
                not isinstance(value, type) and any(value is each for each in functions)
            )
            if is_one:
                found.append(f"{module.__name__}.{name}")
    return found
