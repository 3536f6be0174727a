# SPDX-License-Identifier: Apache-2.0
"""Checks that the connector's kernels run on an NPU and give the same bytes as torch's operators and the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.tools.doctor import child
from vllm_ascend_pd.tools.doctor.finding import Finding, error, ok, warning
from vllm_ascend_pd.tools.doctor.tools import Ran, run_tool

CHECK = "hardware.kernels"
ROWS = (2048, 1152, 40)
"""Bytes of a token in a rank's cache: 8 heads of 128 in bfloat16, MLA, and a size that is not a multiple of 32."""

_CHARS = 300
_BUILD = "load CANN's environment, then pip install -v --no-build-isolation -e . in vllm-ascend-pd: it says what fails"
_WITHOUT = "try again without vllm_ascend_pd/libvllm_ascend_pd_npu.so where it exists, and send us both reports"


class Compared(msgspec.Struct, frozen=True):
    """The comparison of one op with the CPU, for rows of one size."""

    op: str
    row_bytes: int
    num_bytes: int
    chip: str
    not_compiled: str
    """Why torch's operators replace the kernel; "" if there is a compiled kernel."""
    wrong: int
    """Number of bytes that differ from the CPU's."""
    fallback_wrong: int
    """The same for torch's operators."""
    seconds: float
    """Seconds of a call of the op."""
    fallback_seconds: float
    """Seconds of the same call with torch's operators."""


async def check(timeout_s: float) -> Finding:
    ran = await run_tool(child.command("kernels_process"), timeout_s)
    return judge(child.lines(ran.output, Compared), ran)


def judge(compared: Sequence[Compared], ran: Ran) -> Finding:
    for each in compared:
        wrong, which = (each.wrong, each.op) if each.wrong else (each.fallback_wrong, "torch's operators")
        if wrong:
            differ = f"{wrong} of {each.num_bytes} bytes of {which} differ from the CPU's"
            found = f"{each.op} on {each.chip} with rows of {each.row_bytes} bytes: {differ}"
            return error(CHECK, found, _WITHOUT, op=each.op, row_bytes=each.row_bytes)
    if ran.problem is not None or not compared:
        last = one_line(ran.errors[-_CHARS:], _CHARS) or "it wrote no error"
        found = f"the process {ran.problem or 'said nothing'}, after {len(compared)} ops: {last}"
        return error(CHECK, found, _WITHOUT)
    chip, not_compiled = compared[0].chip, compared[0].not_compiled
    widest = {each.op: each for each in compared if each.row_bytes == ROWS[0]}
    figures = {f"{op}_bytes_per_second": round(_speed(each.num_bytes, each.seconds)) for op, each in widest.items()}
    speeds = []
    for op, each in widest.items():
        theirs = _speed(each.num_bytes, each.fallback_seconds) / 1e9
        beside = "" if not_compiled else f" (torch's operators {theirs:.3g})"
        speeds.append(f"{op} {_speed(each.num_bytes, each.seconds) / 1e9:.3g} GB/s{beside}")
    same = f"the CPU's bytes in {len(compared)} cases on {chip}: {', '.join(speeds)}"
    if not_compiled:
        found = f"compiled kernels are not in use ({one_line(not_compiled, _CHARS)}); torch's operators give {same}"
        return warning(CHECK, found, _BUILD, compiled=False, **figures)
    return ok(CHECK, f"compiled kernels and torch's operators give {same}", compiled=True, **figures)


def _speed(num_bytes: int, seconds: float) -> float:
    return num_bytes / max(seconds, 1e-9)
