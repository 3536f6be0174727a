# SPDX-License-Identifier: Apache-2.0
"""Checks NPUs, their driver, links and addresses, by `npu-smi`, `hccn_tool` and `/etc/hccn.conf`.

Formats, from vllm-ascend's and CANN's guides and published outputs:

- `npu-smi info` prints a table with two lines for each chip: `NPU Name | Health | Power Temp Hugepages`, then
  `Chip [Phy-ID] | Bus-Id | AICore Memory HBM`. Its `Version:` is the driver's. The driver and `hccn_tool` number chips
  by `Phy-ID` if an NPU has several (Atlas A3; some headers call it Device), else by the NPU's own number.
- `hccn_tool -link -g` prints `link status: UP`; `-ip -g` prints `ipaddr:A`.
- If hccn.conf has another address for a device than the device itself, others cannot reach the NPU, and errors do not
  name the cause (vllm-ascend's pull request 16847).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_pd.core.hosts import normal_host
from vllm_ascend_pd.core.protocol import EngineKind
from vllm_ascend_pd.tools.doctor.report import Finding, error, note, ok, warning
from vllm_ascend_pd.tools.programs import NOT_STARTED, Ran, run_all
from vllm_ascend_pd.transport import ascend

SMI_TIMEOUT_S = 30.0
HCCN_TIMEOUT_S = 20.0
"""Timeout of one call."""

_AT_ONCE = 8
_LAST_CHARS = 300

_HEADER = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S{1,40})")
_NPU = re.compile(r"\|\s*(\d{1,4})\s+([^|\s][^|]{0,40}?)\s*\|\s*([^|]{1,40}?)\s*\|")
_CHIP = re.compile(r"\|\s*\d{1,4}(?:\s+(\d{1,4}))?\s*\|")

_DRIVER = "install the Ascend driver and firmware; `npu-smi info` must list this machine's NPUs"
_ADDRESS = "without it the client/server engine does not start, and the comm engine reaches others only over HCCS"
_INIT = (
    "in a container, give it /dev/davinci<N>, davinci_manager, devmm_svm and hisi_hdc, mount the driver's folder, and "
    "check that no other container holds the NPU; on the host, restart after an update of driver or firmware, and "
    "check that this user may use the NPUs"
)


@dataclass(frozen=True)
class Chip:
    """One chip of an NPU. `device` is its number on the machine."""

    npu: int
    device: int
    name: str
    health: str


def parse(text: str) -> tuple[str, list[Chip]] | None:
    """Returns the driver's version and the chips in the output of `npu-smi info`, None for other output."""
    header = _HEADER.search(text)
    if header is None:
        return None
    chips: list[Chip] = []
    npu: re.Match[str] | None = None
    for line in text.partition("Process id")[0].splitlines():
        second = _CHIP.match(line)
        if npu is not None and second is not None:
            chips.append(Chip(int(npu[1]), int(second[1] or npu[1]), npu[2], npu[3]))
            npu = None
        else:
            npu = _NPU.match(line)
    return header[1], chips


def judge(ran: Ran, wanted: bool, seen: Sequence[str] | None) -> tuple[list[Finding], str | None, list[int]]:
    """Returns the findings, the driver's version, and the devices that engines may use.

    ran: the call of `npu-smi info`.
    wanted: whether the machine's software is for NPUs.
    seen: the machine's numbers of the NPUs that processes see, "?" for one that ACL does not tell; None if unknown.
    """
    check, found = "npu.devices", parse(ran.output)
    if ran.problem is not None and ran.problem.startswith(NOT_STARTED):
        if not wanted:
            return [note(check, "no npu-smi: a machine without NPUs")], None, []
        problem = f"npu-smi {ran.problem}: no Ascend driver, or its tools are not on PATH"
        return [error(check, problem, _DRIVER)], None, []
    if ran.problem is not None or found is None or not found[1]:
        problem = f"npu-smi info {ran.problem or 'lists no NPU'}: {ran.said[-_LAST_CHARS:] or 'it says nothing'}"
        return [error(check, problem, _INIT)], None, []
    driver, chips = found
    names = ", ".join(dict.fromkeys(chip.name for chip in chips))
    text = f"{len(chips)} chips ({names}), driver {driver}"
    findings = [ok(check, text, chips=len(chips), names=names, driver=driver)]
    if not wanted:
        action = "to run engines on the NPUs, install what requirements/npu.txt names"
        text = "the installed software is not for NPUs: engines run on the CPU"
        findings.append(warning("npu.software", text, action))
    if seen is not None:
        listed = ", ".join(str(chip.device) for chip in chips)
        chips = [chip for chip in chips if "?" in seen or str(chip.device) in seen]
        if not chips:
            found_none = f"processes started here see {', '.join(seen) or 'none'} of the NPUs {listed}"
            action = "correct ASCEND_RT_VISIBLE_DEVICES, or unset it; if it is right, update the driver"
            findings.append(error("npu.visible", found_none, action))
    for chip in chips:
        if chip.health != "OK":
            level = warning if chip.health == "Warning" else error
            action = (
                f"`npu-smi info -t health -i {chip.npu}` says why; reset or replace it, or leave it out with "
                "ASCEND_RT_VISIBLE_DEVICES"
            )
            findings.append(level(f"npu.health.{chip.device}", f"NPU {chip.npu} has health {chip.health}", action))
    return findings, driver, [chip.device for chip in chips]


# The NPUs' network.


def check_network(devices: Sequence[int], kind: str) -> list[Finding]:
    """Asks `hccn_tool` about each device of the machine. `kind`: HIXL's engine that Mooncake starts here."""
    tool = shutil.which("hccn_tool") or (str(ascend.HCCN_TOOL) if ascend.HCCN_TOOL.exists() else None)
    findings = judge_conf(ascend.HCCN_CONF, devices, tool is not None, kind)
    if tool is None:
        action = f"in a container, mount the host's {ascend.HCCN_TOOL.parent}"
        return [*findings, note("hccn.tool", "no hccn_tool: links and addresses are not checked", action)]
    conf = ascend.HCCN_CONF.read_text(errors="replace") if os.access(ascend.HCCN_CONF, os.R_OK) else ""
    configured = {device: ascend.addresses(conf, device) for device in devices}
    asked = [(device, "-link") for device in devices]
    asked += [(device, "-ip") for device in devices]
    commands = [[tool, "-i", str(device), option, "-g"] for device, option in asked]
    some = (commands[first : first + _AT_ONCE] for first in range(0, len(commands), _AT_ONCE))
    answers = [ran for each in some for ran in run_all(each, HCCN_TIMEOUT_S)]
    for (device, option), ran in zip(asked, answers, strict=True):
        listed = configured[device]
        findings.append(judge_link(device, ran) if option == "-link" else judge_addresses(device, listed, ran, kind))
    return findings


def judge_conf(conf: Path, devices: Sequence[int], has_tool: bool, kind: str) -> list[Finding]:
    """Returns the findings about hccn.conf for these devices."""
    findings = []
    for device in devices:
        if (wrong := ascend.check_address(conf, device, has_tool)) is not None:
            level = error if kind in wrong.fatal_for or wrong.is_fatal else warning
            findings.append(level(f"hccn.conf.{device}", wrong.message, _ADDRESS))
    has_all = f"{conf} has the addresses of all {len(devices)} devices"
    return findings or [ok("hccn.conf", has_all if conf.exists() else f"no {conf}: hccn_tool is asked")]


def judge_link(device: int, ran: Ran) -> Finding:
    check, found = f"hccn.link.{device}", f"device {device}: {_said(ran)}"
    if re.search(r"link status:\s*UP\b", ran.said, re.IGNORECASE):
        return ok(check, found)
    action = (
        "check the cable, the optical module and the switch's port; within a server or a super node NPUs need no link, "
        "because they reach each other over HCCS"
    )
    return warning(check, found, action)


def judge_addresses(device: int, configured: Sequence[str], ran: Ran, kind: str) -> Finding:
    """Compares the device's IPv4 address with `configured`, the addresses of hccn.conf."""
    check, own = f"hccn.address.{device}", re.findall(r"ipaddr:\s*([0-9.]{1,15})", ran.said)
    repair = f"hccn_tool -i {device} -ip -s address ADDRESS netmask MASK"
    if not own:
        level = error if kind == EngineKind.CLIENT_SERVER and not configured else warning
        return level(check, f"device {device} has no address: {_said(ran)}", f"set it with {repair}")
    if configured and not {*map(normal_host, own)} & {*map(normal_host, configured)}:
        listed = ", ".join(configured)
        found = f"device {device} has the address {', '.join(own)}, and {ascend.HCCN_CONF} has {listed}"
        action = f"make both the same ({repair}), and start engines again: until then others cannot reach it"
        return error(check, found, action)
    return ok(check, f"device {device}: {', '.join(own)}", address=own[0])


def _said(ran: Ran) -> str:
    reason = f"hccn_tool {ran.problem}" if ran.problem else "hccn_tool says"
    return f"{reason}: {ran.said or 'nothing'}"
