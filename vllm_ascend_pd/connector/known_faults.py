# SPDX-License-Identifier: Apache-2.0
"""Faults of other packages' versions that make answers wrong, and what to install instead."""

import logging
from importlib.metadata import PackageNotFoundError, version

logger = logging.getLogger(__name__)

IDLE_RANKS_OVERWRITE_BLOCKS = (
    "vllm-ascend 0.23.0 with data parallelism on decode: dummy batches of idle data-parallel ranks overwrite KV blocks "
    "of running requests. Install vllm-ascend 0.23.0.post1"
)


def overwrites_blocks(vllm_ascend: str | None, data_parallel: int) -> bool:
    """Whether a decode engine has the fault `IDLE_RANKS_OVERWRITE_BLOCKS`.

    `vllm_ascend`: its version, None if it is not installed. `data_parallel`: the engine's data-parallel size.
    """
    return data_parallel > 1 and vllm_ascend is not None and vllm_ascend.partition("+")[0] == "0.23.0"


def warn_of_known_faults(data_parallel: int) -> None:
    """Logs the faults of a decode engine that starts here. `data_parallel`: its data-parallel size."""
    try:
        installed = version("vllm-ascend")
    except PackageNotFoundError:
        return
    if overwrites_blocks(installed, data_parallel):
        logger.warning("%s", IDLE_RANKS_OVERWRITE_BLOCKS)
