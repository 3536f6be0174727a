# SPDX-License-Identifier: Apache-2.0
"""What writes cost on the user's own NPUs, as `vllm-ascend-pd doctor --hardware --json` has measured it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.tools.doctor.report import DoctorReport
from vllm_ascend_pd.tools.plan.model import PlanError
from vllm_ascend_pd.tools.write_costs import WriteCosts

_PREFIX = "descriptors."
"""Of the doctor's findings about descriptors. The way and the size follow."""
_EXCHANGE = "all_to_all_bytes_per_second"
"""The figure of `hardware.collectives`."""


def read_measured(path: Path) -> tuple[WriteCosts, ...]:
    """Returns what `doctor --hardware --json` has measured, for each way. Raises PlanError, and OSError."""
    try:
        findings = msgspec.json.decode(path.read_bytes(), type=DoctorReport).findings
        ways: dict[str, dict[int, float]] = {}
        exchange: float | None = None
        for each in findings:
            if _EXCHANGE in each.figures:
                exchange = float(each.figures[_EXCHANGE]) / 1e9
            if each.check.startswith(_PREFIX):
                size, seconds = int(each.figures["bytes"]), float(each.figures["seconds"])
                if size <= 0 or seconds <= 0:
                    raise ValueError(f"{each.check} has no positive bytes and seconds")
                ways.setdefault(each.check.removeprefix(_PREFIX).rpartition(".")[0], {})[size] = seconds
    except (*UNREADABLE, KeyError, ValueError) as error:
        raise PlanError(f"{path} is no report of doctor --hardware --json: {error}") from None
    if not ways:
        raise PlanError(f"{path} has no measured descriptors: doctor needs --hardware")
    return tuple(_measured(way, times, exchange) for way, times in ways.items())


def _measured(way: str, times: dict[int, float], exchange: float | None) -> WriteCosts:
    """`times`: what a descriptor of so many bytes takes, in seconds."""
    sizes = tuple(sorted(times))
    rates = tuple(size / times[size] / 1e9 for size in sizes)
    return WriteCosts("measured", way, "", rates, max(rates), exchange or None, sizes)
