# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM, each in a file named for the versions that it is for, with a function `install`.

Each is installed when an engine builds the connector that needs it, not in `register()`: vLLM loads plugins in every
process, also those of engines with other connectors, which must stay as they are.
"""

from collections.abc import Callable, Iterator
from typing import Any

from vllm_ascend_pd.core.config import ConfigError

Method = Callable[..., Any]

# Methods that were replaced: class, name, and the module that did it.
_replaced: set[tuple[type, str, str]] = set()


def replace_in_schedulers(name: str, made: Callable[[Method], Method]) -> None:
    """Replaces a method in all schedulers that are loaded. `made`: returns the new method, from the one before. May be
    called again.

    vllm-ascend puts subclasses in Scheduler's place. Some call the method that they override, and some do not. So a
    call may run the new method twice.
    """
    from vllm.v1.core.sched.interface import SchedulerInterface

    for scheduler in _subclasses(SchedulerInterface):
        which = scheduler, name, made.__module__
        if name in vars(scheduler) and which not in _replaced:
            _replaced.add(which)
            setattr(scheduler, name, made(vars(scheduler)[name]))


def _subclasses(of: Any) -> Iterator[Any]:
    for each in of.__subclasses__():
        yield each
        yield from _subclasses(each)


def install_for_decode_scheduler() -> None:
    """Installs the patches that a decode engine's scheduler needs in the installed vLLM. May be called again.

    What vLLM's scheduler has decides whether the patch of its queues fits, not a version number. Raises `ConfigError`
    if it does not: requests could wait forever there.
    """
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_ascend_pd.connector.patches import (
        vllm_0_23_and_0_30_pause,
        vllm_0_23_and_0_30_refusals,
        vllm_0_23_and_0_30_scheduler,
        vllm_0_23_cached_blocks,
        vllm_0_23_lost_blocks,
        vllm_0_23_stale_outputs,
    )

    if not vllm_0_23_and_0_30_scheduler.fits(Scheduler):
        raise ConfigError(
            f"vLLM {vllm.__version__} schedules requests in a way that this connector has no patch for, so requests "
            "could wait forever on a decode engine. docs/versions.md lists the versions that work"
        )
    for patch in (
        vllm_0_23_lost_blocks,
        vllm_0_23_cached_blocks,
        vllm_0_23_stale_outputs,
        vllm_0_23_and_0_30_scheduler,
        vllm_0_23_and_0_30_pause,
        vllm_0_23_and_0_30_refusals,
    ):
        patch.install()
