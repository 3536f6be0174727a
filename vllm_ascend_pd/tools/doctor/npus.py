# SPDX-License-Identifier: Apache-2.0
"""Checks NPUs and their driver by `npu-smi info`.

Its table has two lines for each chip: `NPU Name | Health | Power Temp Hugepages`, then
`Chip [Phy-ID] | Bus-Id | AICore Memory HBM`. A second table has the processes.

The driver and `hccn_tool` number chips by `Phy-ID` if an NPU has several chips (Atlas A3; some headers call it Device).
Without that column, the NPU's own number is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.tools.doctor.finding import Finding, error, note, ok, warning
from vllm_ascend_pd.tools.doctor.tools import Ran, run_tool

CHECK = "npu.devices"
TIMEOUT_S = 30.0

_HEADER = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S{1,40})")
_CHIP = re.compile(r"(\d{1,4})(?:\s+(\d{1,4}))?")
_NPU = re.compile(r"(\d{1,4})\s+(\S.{0,40})")
_USED = re.compile(r"(\d{1,9})\s*/\s*(\d{1,9})")
_PROCESS = re.compile(r"(\d{1,4})\s+(\d{1,4})")
_CHARS = 300

_DRIVER = "install the Ascend driver and firmware; `npu-smi info` must list this machine's NPUs"
_INIT = (
    "in a container, give it /dev/davinci<N>, davinci_manager, devmm_svm and hisi_hdc, mount the driver's folder, and "
    "check that no other container holds the NPU; on the host, restart after an update of driver or firmware, and "
    "check that this user may use the NPUs"
)


@dataclass(frozen=True)
class Chip:
    """One chip of an NPU. `device` is its number on the machine. The memory is HBM if the chip has some."""

    npu: int
    chip: int
    device: int
    name: str
    health: str
    used_mib: int
    total_mib: int


@dataclass(frozen=True)
class Npus:
    """The output of `npu-smi info`. `processes` has (npu, chip) of each process that uses a chip."""

    version: str
    chips: tuple[Chip, ...]
    processes: tuple[tuple[int, int], ...]


def parse(text: str) -> Npus | None:
    """Parses the output of `npu-smi info`. Returns None for other output."""
    header = _HEADER.search(text)
    if header is None:
        return None
    chips: list[Chip] = []
    processes: list[tuple[int, int]] = []
    npu: tuple[int, str, str] | None = None
    in_processes = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "Process id" in line:
            in_processes = True
        if not line.lstrip().startswith("|") or len(cells) < 3:
            continue
        if in_processes:
            numbers = _PROCESS.fullmatch(cells[0])
            if numbers is not None and cells[1].isdecimal():
                processes.append((int(numbers[1]), int(numbers[2])))
        elif npu is not None and (second := _CHIP.fullmatch(cells[0])) is not None:
            used = _USED.findall(cells[2])
            chip = int(second[1])
            device = npu[0] if second[2] is None else int(second[2])
            used_mib, total_mib = (int(number) for number in used[-1]) if used else (0, 0)
            chips.append(Chip(npu[0], chip, device, npu[1], npu[2], used_mib, total_mib))
            npu = None
        elif (first := _NPU.fullmatch(cells[0])) is not None:
            npu = (int(first[1]), first[2], cells[1])
    return Npus(header[1], tuple(chips), tuple(processes))


async def look() -> Ran:
    return await run_tool(["npu-smi", "info"], TIMEOUT_S)


def judge(ran: Ran, wanted: bool, seen: Sequence[int] | None) -> tuple[list[Finding], list[Chip]]:
    """Returns the findings, and the chips that engines may use.

    ran: the call of `npu-smi info`.
    wanted: whether the machine's software is for NPUs.
    seen: the machine's numbers of the NPUs that processes see, as ACL says; None if unknown.
    """
    found = parse(ran.output)
    if ran.problem is not None and ran.problem.startswith("cannot be started"):
        if not wanted:
            return [note(CHECK, "no npu-smi: a machine without NPUs")], []
        return [error(CHECK, f"npu-smi {ran.problem}: no Ascend driver, or its tools are not on PATH", _DRIVER)], []
    if ran.problem is not None or found is None:
        said = one_line(ran.said[-_CHARS:], _CHARS)
        reason = ran.problem or "printed no table of NPUs"
        return [error(CHECK, f"npu-smi info {reason}: {said or 'nothing else'}", _INIT)], []
    if not found.chips:
        return [error(CHECK, f"npu-smi {found.version} lists no NPU", _INIT)], []
    names = ", ".join(dict.fromkeys(chip.name for chip in found.chips))
    summary = ok(
        CHECK,
        f"{len(found.chips)} chips ({names}), driver {found.version}",
        chips=len(found.chips),
        names=names,
        driver=found.version,
    )
    unseen, chips = _seen(found.chips, seen)
    if not wanted:
        action = "to run engines on the NPUs, install what requirements/npu.txt names"
        unseen = [
            warning("npu.software", "the installed software is not for NPUs: engines run on the CPU", action),
            *unseen,
        ]
    return [summary, *unseen, *_health(chips), *_in_use(chips, found.processes)], chips


def _seen(chips: Sequence[Chip], seen: Sequence[int] | None) -> tuple[list[Finding], list[Chip]]:
    if seen is None:
        return [], list(chips)
    check = "npu.visible"
    if not seen:
        found = "processes started here see none of the NPUs"
        return [error(check, found, "correct ASCEND_RT_VISIBLE_DEVICES, or unset it")], []
    listed = ", ".join(map(str, seen))
    missing = set(seen) - {chip.device for chip in chips}
    if missing:
        found = f"processes started here see {listed}, and npu-smi lists {', '.join(str(c.device) for c in chips)}"
        return [warning(check, found, "update the driver, so that both number the NPUs alike")], list(chips)
    if len(seen) == len(chips):
        return [], list(chips)
    chosen = [chip for chip in chips if chip.device in seen]
    return [ok(check, f"processes started here see {len(chosen)} of the NPUs: {listed}", chips=len(chosen))], chosen


def _health(chips: Sequence[Chip]) -> list[Finding]:
    findings = []
    for chip in chips:
        if chip.health == "OK":
            continue
        level = warning if chip.health == "Warning" else error
        findings.append(
            level(
                f"npu.health.{chip.device}",
                f"NPU {chip.npu} chip {chip.chip} has health {one_line(chip.health, 40)}",
                f"`npu-smi info -t health -i {chip.npu}` says why; reset or replace it, or leave it out with "
                "ASCEND_RT_VISIBLE_DEVICES",
            )
        )
    return findings or [ok("npu.health", "all chips have health OK")]


def _in_use(chips: Sequence[Chip], processes: Sequence[tuple[int, int]]) -> list[Finding]:
    busy = [chip for chip in chips if (chip.npu, chip.chip) in processes]
    if not busy:
        return [ok("npu.use", "no process uses the NPUs")]
    listed = ", ".join(f"{chip.device} ({chip.used_mib} of {chip.total_mib} MiB)" for chip in busy)
    action = "end processes that should not run there, or choose other NPUs with ASCEND_RT_VISIBLE_DEVICES"
    return [note("npu.use", f"in use: {listed}", action, chips=len(busy))]
