# SPDX-License-Identifier: Apache-2.0
"""Virtual time, and simulated threads: greenlets of one real thread, which switch only where a thread would block.

Which of several threads runs next, and where a thread is interrupted while it reads the clock, is drawn from the seed.
"""

import asyncio
import heapq
import itertools
import random
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

BEGIN_S = 1000.0
"""When a run begins, in virtual seconds."""

# Wall clocks may be 30 s apart.
_WALL_OFFSET_S = 10.0
_LOOK_S = 0.01
# What waits for a stopped process happens so long after it has gone on, at most.
_LATE_S = 0.01
# More switches than any run needs. Threads that wake each other for ever do not stop by themselves.
_MOST_SWITCHES = 3_000_000


class Process:
    """A simulated process. Its threads run unless it is stopped or dead."""

    def __init__(self, name: str, offset_s: float) -> None:
        self.name = name
        # What its monotonic clock shows at the virtual time 0.
        self.offset_s = offset_s
        # How far its wall clock is off.
        self.wall_offset_s = 0.0
        self.stopped = False
        # How often it was stopped.
        self.stops = 0
        self.dead = False
        # Threads that may run once the process goes on, with what they were waiting for.
        self.held: list[tuple[Task, object]] = []
        # What else happens then, in this order, and since when the first of it waits.
        self.late: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.late_since = 0.0
        # Called when it dies.
        self.on_death: list[Callable[[], None]] = []

    @property
    def engine(self) -> str:
        """The engine that it belongs to: its name is `engine` or `engine/rank`."""
        return self.name.partition("/")[0]


class Task(greenlet):
    """A simulated thread."""

    def __init__(self, work: Callable[..., None], name: str, process: Process) -> None:
        super().__init__(work)
        self.name = name
        self.process = process
        # Counts its waits, so that the timeout of an earlier one wakes nothing.
        self.waits = 0
        self.is_parked = False
        self.has_ended = False
        self.joiners: list[Task] = []
        # asyncio keeps the running event loop per real thread, and Python what its generators call.
        self.event_loop: Any = None
        # What `threading.current_thread()` returns in it.
        self.thread: object = SimpleNamespace(name=name, ident=id(self))


class Livelock(AssertionError):
    """Threads wake each other for ever."""


class Kernel:
    """The clock and the threads of one run."""

    def __init__(self, seed: str, interrupts: float) -> None:
        """`interrupts`: the share of looks at the clock at which another thread runs."""
        self._seed = seed
        self._interrupts = interrupts
        self._order = random.Random(f"{seed}/order")
        self._streams: dict[str, random.Random] = {}
        self.now = BEGIN_S
        self._ready: list[tuple[Task, object]] = []
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._hub = getcurrent()
        self._tasks: dict[Task, None] = {}
        self.current: Task | None = None
        self._is_closed = False
        self.switches = 0
        # Time, thread, a sentence with gaps, what fills the gaps.
        self.history: list[tuple[float, str, str, tuple[object, ...]]] = []
        # What ended a thread: its name, and the traceback.
        self.crashes: list[tuple[str, str]] = []
        # Whether `run` must return.
        self.halted = False
        self.outside = Process("outside", 0.0)

    def draws(self, name: str) -> random.Random:
        """Returns the random numbers of one part of the world. Those of other parts do not depend on them."""
        if name not in self._streams:
            self._streams[name] = random.Random(f"{self._seed}/{name}")
        return self._streams[name]

    def new_number(self) -> int:
        return next(self._numbers)

    def process(self, name: str) -> Process:
        process = Process(name, self.draws("clocks").uniform(0, 1e5))
        process.wall_offset_s = self.draws("clocks").uniform(-_WALL_OFFSET_S, _WALL_OFFSET_S)
        return process

    def tell(self, sentence: str, *parts: object) -> None:
        """Adds to the history. `parts` fill the gaps of `sentence`, as in `str.format`."""
        self.history.append((self.now, self.current.name if self.current else "", sentence, parts))

    # Threads.

    def spawn(self, work: Callable[[], None], name: str, process: Process | None = None) -> Task:
        """Starts a thread, of the calling thread's process unless `process` is given."""
        process = process or self.this_process

        def run(_: object) -> None:
            try:
                work()
            except GreenletExit:
                pass
            except BaseException as error:  # noqa: BLE001 - the oracle reports it
                self.crashes.append((name, traceback.format_exc()))
                self.halted = True
                self.tell("the thread ends by {}", repr(error))
            finally:
                task.has_ended = True
                self._tasks.pop(task, None)
                for joiner in task.joiners:
                    self.wake(joiner)

        task = Task(run, name, process)
        task.parent = self._hub
        self._tasks[task] = None
        self._ready.append((task, None))
        return task

    @property
    def this_process(self) -> Process:
        return self.current.process if self.current else self.outside

    def park(self, timeout_s: float | None = None) -> bool:
        """Blocks the calling thread until `wake`. Returns False if `timeout_s` have passed first."""
        task = self.current
        if task is None:
            raise RuntimeError("what runs outside all threads cannot wait")
        if self._is_closed:
            raise GreenletExit
        task.waits += 1
        task.is_parked = True
        if timeout_s is not None:
            self.at(max(0.0, timeout_s), self._time_out, task, task.waits)
        woken = self._hub.switch()
        if self._is_closed:
            raise GreenletExit
        return bool(woken)

    def _time_out(self, task: Task, wait: int) -> None:
        if task.is_parked and task.waits == wait:
            self.wake(task, False)

    def wake(self, task: Task, value: object = True) -> None:
        """Lets a parked thread run. `value`: False if it has waited in vain."""
        if task.is_parked:
            task.is_parked = False
            self._ready.append((task, value))

    def clock(self) -> float:
        """Returns what the monotonic clock of the calling thread's process shows. Another thread may run first."""
        task = self.current
        if task is None:
            return self.now
        if self._interrupts and not self._is_closed and self._order.random() < self._interrupts:
            task.waits += 1
            self._ready.append((task, None))
            self._hub.switch()
            if self._is_closed:
                raise GreenletExit
        return self.now + task.process.offset_s

    # Events.

    def at(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Calls `action(*args)` in `delay_s` seconds, outside all threads."""
        heapq.heappush(self._timers, (self.now + delay_s, next(self._numbers), action, args))

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Lets threads run and time pass, until `done()` or `halted`, at which it looks every `_LOOK_S`.

        Returns False if it is `until`, or nothing can happen, before `done()`.
        """
        ready, timers, draw = self._ready, self._timers, self._order.random
        get_loop, set_loop = asyncio._get_running_loop, asyncio._set_running_loop
        look_at = self.now
        while not self.halted:
            if ready:
                chosen = int(draw() * len(ready)) if len(ready) > 1 else 0
                ready[chosen], ready[-1] = ready[-1], ready[chosen]
                task, value = ready.pop()
                process = task.process
                if process.dead:
                    continue
                if process.stopped:
                    process.held.append((task, value))
                    continue
                self.switches += 1
                if self.switches > _MOST_SWITCHES:
                    raise Livelock(f"after {self.switches} switches the run has not ended; thread {task.name} runs")
                self.current = task
                if (loop := task.event_loop) is not None:
                    sys.set_asyncgen_hooks(loop._asyncgen_firstiter_hook, loop._asyncgen_finalizer_hook)
                set_loop(loop)
                task.switch(value)
                task.event_loop = get_loop()
                self.current = None
                continue
            if self.now >= look_at:
                if done():
                    break
                look_at = self.now + _LOOK_S
            if not timers:
                break
            when, _, action, args = heapq.heappop(timers)
            if when > until:
                heapq.heappush(timers, (when, next(self._numbers), action, args))
                self.now = until
                break
            self.now = max(self.now, when)
            action(*args)
        set_loop(None)
        return not self.halted and done()

    # Processes.

    def stop(self, process: Process) -> None:
        process.stopped = True
        process.stops += 1

    def go_on(self, process: Process) -> None:
        process.stopped = False
        self._ready += process.held
        process.held = []
        late, process.late = process.late, []
        for action, args in late:
            self.at((process.late_since - self.now) % _LATE_S, action, *args)

    def after_stop(self, process: Process, action: Callable[..., None], *args: Any) -> None:
        """Calls `action(*args)` soon after a stopped process has gone on. Never if it is killed."""
        if not process.late:
            process.late_since = self.now
        process.late.append((action, args))

    def kill(self, process: Process) -> None:
        process.dead = True
        process.held.clear()
        process.late.clear()
        for each in process.on_death:
            each()

    def close(self) -> None:
        """Ends all threads."""
        self._is_closed = True
        for _ in range(3):  # some threads deliver what ends them, and wait once more
            for task in list(self._tasks):
                if not task.dead:
                    self.current = task
                    asyncio._set_running_loop(task.event_loop)
                    task.throw(GreenletExit)
        self.current = None
        asyncio._set_running_loop(None)


_running: list[Kernel] = []


def begin(seed: str, interrupts: float) -> Kernel:
    """Makes a kernel, which is the running one from now on."""
    _running[:] = [Kernel(seed, interrupts)]
    return _running[0]


def kernel() -> Kernel:
    """Returns the running kernel."""
    return _running[0]


def monotonic() -> float:
    """As `Kernel.clock`, in one call where nothing is interrupted: the product reads the clock all the time."""
    running = _running[0]
    if running._interrupts or running.current is None:
        return running.clock()
    return running.now + running.current.process.offset_s
