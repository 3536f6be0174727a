# SPDX-License-Identifier: Apache-2.0
"""The HCCL communicators that prefill ranks exchange heads in: how HCCL runs them, and the memory they take. Pure."""

from collections.abc import Sequence

BUFFER_MB = 16
"""Of a communicator: about what a rank exchanges of one layer in a step. HCCL cuts what is larger into several rounds.
HCCL_BUFFSIZE, 200 MB by default, sizes the model's own communicators."""

_HOST, _AI_CPU = 1, 2
"""HCCL's values of `hcclOpExpansionMode` (its documentation of `HcclCommConfig`)."""


def hccl_config(ranks: Sequence[int], chip: str) -> dict[str, int | str]:
    """torch_npu's `ProcessGroupHCCL.Options.hccl_config` for a group of these global ranks on the chip of that name.

    The expansion mode is the chip's own default, which HCCL_OP_EXPANSION_MODE replaces in all other groups. That one is
    AIV for most engines. HCCL does not support two AIV communicators at a time, and this one runs beside the model's.
    On Atlas A2 the mode is HOST, because HCCL before CANN 9.1 ignores AI_CPU there. Elsewhere it is AI_CPU, because
    Atlas A3 has no HOST.
    """
    return {
        "hccl_op_expansion_mode": _HOST if chip.startswith("Ascend910B") else _AI_CPU,
        "hccl_buffer_size": BUFFER_MB,
        "group_name": f"pd-regroup-{ranks[0]}-{ranks[-1]}",  # at most 32 characters; errors of HCCL name it
    }


def communicator_bytes(groups: int) -> int:
    """Returns the NPU memory of a rank's communicators in that many groups: each has a send and a receive buffer."""
    return groups * 2 * BUFFER_MB * 1024 * 1024
