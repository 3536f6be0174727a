# SPDX-License-Identifier: Apache-2.0
"""Checks the network between NPUs by `/etc/hccn.conf` and `hccn_tool`: links, addresses, other nodes.

Formats, from vllm-ascend's and CANN's guides: `-link -g` prints `link status: UP`; `-net_health -g` prints `net health
status: Success` (`Init` where no address to probe is set, `Fault` and others); `-ip -g` prints `ipaddr:A` and
`netmask:M`; `-ping -g address A` prints a line for each packet and `3 packets transmitted, 3 received, 0.00% packet
loss`. If the file has another address for a device than the device itself, others cannot reach the NPU, and errors do
not name the cause (vllm-ascend's pull request 16847).
"""

from __future__ import annotations

import ipaddress
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import anyio

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.tools.doctor.finding import Finding, error, note, ok, warning
from vllm_ascend_pd.tools.doctor.tools import Ran, run_tool
from vllm_ascend_pd.transport import ascend

TIMEOUT_S = 20.0
"""Timeout of one call. Three unanswered packets take some seconds."""

_AT_ONCE = 8
_MAX_CONF_BYTES = 1 << 20
_CHARS = 200
_ADDRESS = re.compile(r"^(?:IPv6)?address_(\d{1,4})=(.*)$", re.MULTILINE)
_LINK = re.compile(r"^\s*link status:\s*(\S{1,40})", re.MULTILINE | re.IGNORECASE)
_HEALTH = re.compile(r"^\s*net health status:\s*(\S.{0,39})", re.MULTILINE | re.IGNORECASE)
_IP = re.compile(r"^\s*ipaddr:\s*([0-9.]{1,15})", re.MULTILINE)
_LOSS = re.compile(r"(\d{1,9}) packets transmitted,\s*(\d{1,9}) received")


@dataclass(frozen=True)
class Ping:
    sent: int
    received: int


def parse_conf(text: str) -> dict[int, list[str]]:
    """Returns the addresses in hccn.conf by device."""
    found: dict[int, list[str]] = {}
    for device, address in _ADDRESS.findall(text):
        found.setdefault(int(device), []).append(address)
    return found


def parse_link(text: str) -> str | None:
    """Returns the link's state, such as UP or DOWN, or None if `text` does not have it."""
    found = _LINK.search(text)
    return found[1].upper() if found else None


def parse_health(text: str) -> str | None:
    """Returns the network's health, such as Success or Fault, or None if `text` does not have it."""
    found = _HEALTH.search(text)
    return found[1].strip() if found else None


def parse_addresses(text: str) -> tuple[str, ...]:
    return tuple(_IP.findall(text))


def parse_ping(text: str) -> Ping | None:
    found = _LOSS.search(text)
    return Ping(int(found[1]), int(found[2])) if found else None


def judge_conf(conf: Path, devices: Sequence[int], has_tool: bool) -> tuple[list[Finding], dict[int, list[str]]]:
    """Returns the findings about the file for these devices, and the addresses in it."""
    findings = []
    for device in devices:
        for wrong in ascend.check_address(conf, device, has_tool):
            action = "correct it: an NPU without an address has no RoCE, and reaches others only over HCCS"
            findings.append((error if wrong.fatal else warning)(f"hccn.conf.{device}", wrong.message, action))
    try:
        with conf.open(errors="replace") as file:
            found = parse_conf(file.read(_MAX_CONF_BYTES))
    except OSError:
        found = {}
    if not findings:
        text = f"{conf} has the addresses of all {len(devices)} devices" if found else f"no {conf}: hccn_tool is asked"
        findings.append(ok("hccn.conf", text))
    return [*findings, *_twice(found)], found


def _twice(conf: Mapping[int, list[str]]) -> Iterable[Finding]:
    owners: dict[str, list[int]] = {}
    for device, addresses in conf.items():
        for address in addresses:
            owners.setdefault(_normal(address), []).append(device)
    for address, devices in owners.items():
        if address and len(devices) > 1:
            listed = ", ".join(map(str, devices))
            action = "give each device an address of its own: hccn_tool -i DEVICE -ip -s address ADDRESS netmask MASK"
            yield error("hccn.conf.unique", f"devices {listed} all have the address {one_line(address, 60)}", action)


def tool() -> str | None:
    """Returns the path of `hccn_tool`."""
    return shutil.which("hccn_tool") or (str(ascend.HCCN_TOOL) if ascend.HCCN_TOOL.exists() else None)


async def check_devices(devices: Sequence[int], peers: Sequence[str], conf: Mapping[int, list[str]]) -> list[Finding]:
    """Runs `hccn_tool` for each device of the machine. `peers` are addresses of NPUs of other nodes."""
    path = tool()
    if path is None:
        action = f"in a container, mount the host's {ascend.HCCN_TOOL.parent}"
        if not peers:
            return [note("hccn.tool", "no hccn_tool: links and addresses are not checked", action)]
        return [error("hccn.tool", "no hccn_tool: other nodes' NPUs cannot be pinged", action)]
    if not devices:
        action = "check that npu-smi lists this machine's NPUs, or leave --peer out on a machine without NPUs"
        return [error("hccn.ping", "this machine has no NPU that could ping those of other nodes", action)]
    questions: list[tuple[list[str], Callable[[Ran], list[Finding]]]] = []
    for device in devices:
        questions.append((["-i", str(device), "-link", "-g"], partial(judge_link, device)))
        questions.append((["-i", str(device), "-net_health", "-g"], partial(judge_health, device)))
        configured = [address for address in conf.get(device, []) if ":" not in address]
        if configured or device not in conf:  # a device with only IPv6 is skipped
            own = partial(judge_addresses, device, configured=configured)
            questions.append((["-i", str(device), "-ip", "-g"], own))
    for device, peer in product(devices, peers):
        asked = ["-inet6", "-g", "ipv6_address"] if ":" in peer else ["-g", "address"]
        questions.append((["-i", str(device), "-ping", *asked, peer], partial(judge_ping, device, peer)))
    answers: list[list[Finding]] = [[] for _ in questions]
    limit = anyio.Semaphore(_AT_ONCE)

    async def ask(number: int) -> None:
        arguments, judge = questions[number]
        async with limit:
            answers[number] = judge(await run_tool([path, *arguments], TIMEOUT_S))

    async with anyio.create_task_group() as tasks:
        for number in range(len(questions)):
            tasks.start_soon(ask, number)
    return [finding for answer in answers for finding in answer]


def judge_link(device: int, ran: Ran) -> list[Finding]:
    check = f"hccn.link.{device}"
    link = parse_link(ran.said)
    if link == "UP":
        return [ok(check, f"device {device}: link up")]
    action = (
        "check the cable, the optical module and the switch's port; within a server or a super node NPUs need no link, "
        "because they reach each other over HCCS"
    )
    if link is not None:
        return [warning(check, f"device {device}: link {link.lower()}", action)]
    return [warning(check, f"device {device}: the link's state is unknown: {_said(ran)}", action)]


def judge_health(device: int, ran: Ran) -> list[Finding]:
    """Checks that the device reaches its detect address, which is its gateway or switch."""
    check = f"hccn.health.{device}"
    health = parse_health(ran.said)
    if health == "Success":
        return [ok(check, f"device {device}: network healthy")]
    if health == "Init":
        action = f"to set an address to probe: hccn_tool -i {device} -netdetect -s address GATEWAY"
        return [note(check, f"device {device} probes no address, so its network's health is unknown", action)]
    if health is None:
        found = f"device {device}: the network's health is unknown: {_said(ran)}"
        return [note(check, found, "check its link, and ping other nodes' NPUs with --peer")]
    action = f"check that hccn_tool -i {device} -netdetect -g names an address that it reaches"
    return [warning(check, f"device {device}: network health {one_line(health, _CHARS)}", action)]


def judge_addresses(device: int, ran: Ran, configured: Sequence[str]) -> list[Finding]:
    """Compares the device's address with hccn.conf."""
    check = f"hccn.address.{device}"
    own = parse_addresses(ran.said)
    repair = f"hccn_tool -i {device} -ip -s address ADDRESS netmask MASK"
    if not own:
        return [warning(check, f"device {device} has no address: {_said(ran)}", f"for RoCE, set it with {repair}")]
    shown = ", ".join(own)
    if configured and not {_normal(address) for address in own} & {_normal(address) for address in configured}:
        listed = one_line(", ".join(configured), _CHARS)
        found = f"device {device} has the address {shown}, and {listed} in {ascend.HCCN_CONF}: others cannot reach it"
        return [error(check, found, f"make both the same ({repair}), and start engines again")]
    return [ok(check, f"device {device}: {shown}", address=own[0])]


def judge_ping(device: int, peer: str, ran: Ran) -> list[Finding]:
    check = f"hccn.ping.{device}.{peer}"
    action = (
        "check that both addresses are in one network, or have a gateway, and netmasks, VLANs and TLS "
        "(`hccn_tool -i N -tls -g`) are the same on both nodes"
    )
    ping = parse_ping(ran.said)
    if ping is None or ping.sent == 0:
        return [error(check, f"device {device} to {peer}: no result: {_said(ran)}", action)]
    found = f"device {device} to {peer}: {ping.received} of {ping.sent} packets answered"
    if ping.received == 0:
        return [error(check, found, action, sent=ping.sent, received=0)]
    if ping.received < ping.sent:
        again = "ping again; if packets are lost again, check cables, optical modules and the switch's counters"
        return [warning(check, found, again, sent=ping.sent, received=ping.received)]
    return [ok(check, found, sent=ping.sent, received=ping.received)]


def _said(ran: Ran) -> str:
    reason = f"hccn_tool {ran.problem}" if ran.problem else "hccn_tool says"
    return f"{reason}: {one_line(ran.said, _CHARS) or 'nothing'}"


def _normal(address: str) -> str:
    try:
        return str(ipaddress.ip_address(address.strip()))
    except ValueError:
        return address.strip()
