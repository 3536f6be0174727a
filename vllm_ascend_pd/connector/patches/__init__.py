# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM, each in a file named for the versions that it is for, with a function `install`.

Each is installed when an engine builds the connector that needs it, not in `register()`: vLLM loads plugins in every
process, also those of engines with other connectors, which must stay as they are.
"""

from vllm_ascend_pd.core.config import ConfigError


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
