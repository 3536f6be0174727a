# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM, each in a file named for the versions that it is for, with a function `install`.

Each is installed when an engine builds the connector that needs it, not in `register()`: vLLM loads plugins in every
process, also those of engines with other connectors, which must stay as they are.
"""


def install_for_decode_scheduler() -> None:
    """Installs the patches that a decode engine's scheduler needs, each in the versions that it is for.

    May be called again.
    """
    from vllm_ascend_pd.connector.patches import (
        vllm_0_23_cached_blocks,
        vllm_0_23_lost_blocks,
        vllm_0_23_scheduler,
        vllm_0_23_to_0_32_refusals,
        vllm_0_32_scheduler,
    )

    for patch in (
        vllm_0_23_lost_blocks,
        vllm_0_23_cached_blocks,
        vllm_0_23_scheduler,
        vllm_0_23_to_0_32_refusals,
        vllm_0_32_scheduler,
    ):
        patch.install()
