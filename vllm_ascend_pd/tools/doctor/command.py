# SPDX-License-Identifier: Apache-2.0
"""Turns the options of `vllm-ascend-pd doctor` into its report."""

from __future__ import annotations

import ipaddress
import os
import ssl
import sys
from collections.abc import Sequence

import anyio
import msgspec

from vllm_ascend_pd.connector.model import IDLE_RANKS_OVERWRITE_BLOCKS, overwrites_blocks
from vllm_ascend_pd.core.hosts import is_host
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.tools.doctor import (
    driver,
    engine_config,
    hccl,
    hccn,
    limits,
    loading,
    loopback,
    mooncake,
    mooncake_engine,
    npus,
    pair,
    ports,
    versions,
)
from vllm_ascend_pd.tools.doctor import hardware as hardware_steps
from vllm_ascend_pd.tools.doctor.engine_config import KvTransferConfig, UsageError
from vllm_ascend_pd.tools.doctor.finding import DoctorReport, DoctorTarget, Finding, make_report, note, warning
from vllm_ascend_pd.tools.doctor.http_get import root_url
from vllm_ascend_pd.tools.doctor.progress import Progress
from vllm_ascend_pd.tools.doctor.render import show
from vllm_ascend_pd.tools.doctor.stacks import NPU, stack_of
from vllm_ascend_pd.transport import ascend

MAX_PEERS = 64


class Machine(msgspec.Struct, frozen=True):
    """What is planned to run on this machine.

    peers: addresses of NPUs of other nodes.
    decode_hosts: hosts of decode engines that a prefill engine here must serve.
    """

    config: KvTransferConfig | None
    api_port: int | None
    data_parallel: int
    peers: tuple[str, ...]
    decode_hosts: tuple[str, ...] = ()
    hardware_step_s: float | None = None
    """Timeout in seconds of each step on NPUs. None: the NPUs are not tried."""


class Pair(msgspec.Struct, frozen=True):
    """Root URLs of running servers by role. `trusted`: file with CAs, None for well-known CAs."""

    urls: dict[str, tuple[str, ...]]
    trusted: ssl.SSLContext | None


def options(
    proxy: str | None,
    prefill: Sequence[str],
    decode: Sequence[str],
    ca_file: str | None,
    kv_transfer_config: str | None,
    port: int | None,
    data_parallel: int,
    peers: Sequence[str],
    decode_hosts: Sequence[str] = (),
    hardware: bool = False,
    step_timeout: float | None = None,
) -> Machine | Pair:
    """Returns what to check: a pair if URLs are given, else this machine. Raises UsageError."""
    if step_timeout is not None and not hardware:
        raise UsageError("--step-timeout is for the steps of --hardware: give that, too")
    if proxy is None and not prefill and not decode:
        if ca_file is not None:
            raise UsageError("--ca-file is for https:// URLs: give --proxy, --prefill or --decode")
        config = None if kv_transfer_config is None else engine_config.read(kv_transfer_config)
        if len(peers) > MAX_PEERS:
            raise UsageError(f"{len(peers)} addresses for --peer: at most {MAX_PEERS}")
        if (first := _kv_port(config)) is not None and first + data_parallel > 65536:
            raise UsageError(
                f"--data-parallel-size {data_parallel}: kv_port {first} leaves ports for {65536 - first} engines"
            )
        if len(decode_hosts) > MAX_PEERS:
            raise UsageError(f"{len(decode_hosts)} hosts for --decode-host: at most {MAX_PEERS}")
        if wrong := next((host for host in decode_hosts if not is_host(host)), None):
            raise UsageError(f"--decode-host {one_line(wrong, 80)!r} is no host")
        if decode_hosts and (config is None or config.kv_role != "kv_producer"):
            raise UsageError("--decode-host is for a prefill engine's --kv-transfer-config: give that, too")
        step_s = (step_timeout or hardware_steps.STEP_TIMEOUT_S) if hardware else None
        addresses = tuple(_address(peer) for peer in peers)
        return Machine(config, port, data_parallel, addresses, tuple(decode_hosts), step_s)
    if kv_transfer_config is not None or port is not None or data_parallel != 1 or peers or decode_hosts or hardware:
        raise UsageError(
            "--proxy, --prefill and --decode look at what runs; --kv-transfer-config, --port, --data-parallel-size, "
            "--peer, --decode-host and --hardware at this machine: give one kind"
        )
    try:
        pair.api_key(os.environ)
        given = {"proxy": () if proxy is None else (proxy,), "prefill": prefill, "decode": decode}
        urls = {role: tuple(map(root_url, each)) for role, each in given.items()}
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    try:
        trusted = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except OSError as problem:  # ssl.SSLError is an OSError
        raise UsageError(f"--ca-file {one_line(str(ca_file), 200)!r} cannot be used: {problem}") from None
    return Pair(urls, trusted)


def print_report(chosen: Machine | Pair, as_json: bool) -> bool:
    """Prints the report and returns whether there is no error."""
    report = anyio.run(examine, chosen)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        show(report)
    return report.ok


async def examine(chosen: Machine | Pair) -> DoctorReport:
    if isinstance(chosen, Pair):
        return make_report(DoctorTarget.PAIR, await _examine_pair(chosen, Progress()))
    return make_report(DoctorTarget.MACHINE, await _examine_machine(chosen, Progress()))


async def _examine_pair(chosen: Pair, progress: Progress) -> list[Finding]:
    async with progress.step("asking proxy and engines"):
        servers = await pair.ask(chosen.urls, os.environ, chosen.trusted)
    return pair.judge(servers)


async def _examine_machine(chosen: Machine, progress: Progress) -> list[Finding]:
    on_npu = stack_of(versions.installed_versions()) is NPU
    findings = versions.check()
    async with progress.step("loading torch, Mooncake, vLLM and the compiled ops"):
        loaded, ran = await loading.load_all()
    findings += loading.judge(loaded, ran, on_npu)
    configured, extra = engine_config.judge(chosen.config, chosen.decode_hosts)
    library = mooncake_engine.read(loading.detail_of(loaded, "mooncake"))
    findings += engine_config.judge_plugins(os.environ)
    findings += [*configured, mooncake.judge(extra.transfer_protocol, on_npu, library)]
    findings += [mooncake.check_cann(os.environ)] if on_npu else []
    if on_npu and library is not None and library.ascend is not None:
        toolkit = mooncake.installed_toolkit(os.environ)
        findings.append(mooncake_engine.judge(library.ascend, driver.installed(), toolkit, os.environ))
    async with progress.step("asking npu-smi"):
        seen, chips = npus.judge(await npus.look(), on_npu, loading.npus_seen(loaded))
    findings += [*seen, *hccl.judge(chosen.config, on_npu)]
    if chips:
        findings += driver.judge(driver.installed())
    devices = [chip.device for chip in chips]
    if devices or chosen.peers:
        async with progress.step("asking hccn_tool"):
            findings += await _examine_network(devices, chosen.peers)
    findings += limits.check(mooncake.protocol_of(extra.transfer_protocol, on_npu))
    findings += ports.check(_ports(chosen, loading.detail_of(loaded, "host")), devices, os.environ)
    findings += judge_data_parallel(chosen)
    if (skipped := mooncake_engine.no_loopback(library)) is not None:
        findings.append(skipped)
    else:
        async with progress.step("transferring from one Mooncake engine to another"):
            findings.append(await loopback.check(loopback.over_tcp()))
    if chosen.hardware_step_s is not None:
        numbers = [number for number in (loading.detail_of(loaded, "npus") or "").split(",") if number]
        host = loading.detail_of(loaded, "host") or "127.0.0.1"
        findings += await hardware_steps.check(numbers, host, progress, chosen.hardware_step_s)
    return findings


async def _examine_network(devices: Sequence[int], peers: Sequence[str]) -> list[Finding]:
    has_tool = hccn.tool() is not None
    findings, addresses = hccn.judge_conf(ascend.HCCN_CONF, devices, has_tool) if devices else ([], {})
    return findings + await hccn.check_devices(devices, peers, addresses)


def _kv_port(config: KvTransferConfig | None) -> int | None:
    """Returns the first port that decode's engines listen on."""
    return config.kv_port if config is not None and config.kv_role == "kv_consumer" else None


def _ports(chosen: Machine, host: str | None) -> list[ports.Port]:
    return ports.needed(_kv_port(chosen.config), chosen.data_parallel, host or "", chosen.api_port)


def judge_data_parallel(chosen: Machine) -> list[Finding]:
    if _kv_port(chosen.config) is not None:
        if not overwrites_blocks(versions.installed_versions().get("vllm-ascend"), chosen.data_parallel):
            return []
        action = "install vllm-ascend==0.23.0.post1, which differs in nothing else that matters here"
        return [warning("versions.vllm-ascend-dp", IDLE_RANKS_OVERWRITE_BLOCKS, action)]
    if chosen.data_parallel == 1:
        return []
    found = f"--data-parallel-size {chosen.data_parallel} has no effect: it counts listeners of a decode engine"
    return [note("ports.data_parallel", found, "give its --kv-transfer-config too, of kv_role kv_consumer")]


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise UsageError(f"--peer {one_line(text, 80)!r} is not an address of an NPU") from None
