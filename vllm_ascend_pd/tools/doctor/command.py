# SPDX-License-Identifier: Apache-2.0
"""Checks the options of `vllm-ascend-pd doctor`, and runs the checks in their order."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from vllm_ascend_pd.core.hosts import is_host
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.tools.doctor import configuration, hardware, loading, loopback, machine, npus, pair, versions
from vllm_ascend_pd.tools.doctor.configuration import KvTransferConfig
from vllm_ascend_pd.tools.doctor.loading import LoadedMooncake
from vllm_ascend_pd.tools.doctor.report import DoctorReport, Finding, make_report, note, step

MAX_PEERS = 64
STEP_TIMEOUT_S = 60.0
"""For each step of --hardware."""


@dataclass(frozen=True)
class Machine:
    """What is planned to run on this machine."""

    config: KvTransferConfig | None
    api_port: int | None
    data_parallel: int
    peers: tuple[str, ...]
    """Addresses of NPUs of other nodes."""
    decode_hosts: tuple[str, ...]
    """Hosts of decode engines that a prefill engine here must serve."""
    hardware_step_s: float | None
    """Timeout in seconds of each step on NPUs. None: the NPUs are not tried."""

    def examine(self) -> DoctorReport:
        installed = versions.installed_versions()
        on_npu = versions.stack_of(installed) is versions.NPU
        findings = versions.judge(installed)
        with step("loading torch, Mooncake, vLLM and the compiled ops"):
            loaded, ran = loading.load_all()
        details = loading.details(loaded)
        host, npu_names = details.get("host"), [name for name in details.get("npus", "").split(",") if name]
        mooncake = msgspec.json.decode(details["mooncake"], type=LoadedMooncake) if "mooncake" in details else None
        findings += [*loading.judge(loaded, ran, on_npu), *configuration.judge_plugins(os.environ)]
        configured, extra = configuration.judge(self.config, self.decode_hosts)
        protocol = extra.transfer_protocol or ("ascend" if on_npu else "tcp")
        findings += [*configured, configuration.judge_protocol(protocol, on_npu, mooncake)]
        findings += configuration.judge_data_parallel(self.config, self.data_parallel, installed.get("vllm-ascend"))
        with step("asking npu-smi"):
            seen, driver, devices = npus.check_npus(on_npu, npu_names if "npus" in details else None)
        findings += seen
        if on_npu:
            findings.append(versions.judge_cann(os.environ))
            if mooncake is not None and mooncake.ascend is not None:
                cann = versions.installed_cann(os.environ)
                findings.append(versions.judge_engine(mooncake.ascend, driver, cann, os.environ))
        if devices or self.peers:
            with step("asking hccn_tool"):
                findings += npus.check_network(devices, self.peers)
        findings += machine.check_limits()
        first = configuration.listening_port(self.config)
        ports = machine.needed_ports(first, self.data_parallel, host or "", self.api_port)
        findings += machine.check_ports(ports, devices, os.environ)
        findings += self._transfer(mooncake)
        if self.hardware_step_s is not None:
            findings += hardware.check(npu_names, host or "127.0.0.1", self.hardware_step_s, on_npu or bool(devices))
        return make_report("machine", findings)

    def _transfer(self, mooncake: LoadedMooncake | None) -> list[Finding]:
        if mooncake is not None and "tcp" in mooncake.refusals:
            return [note("transfer.loopback", f"not tried: {mooncake.refusals['tcp']}")]
        sizes = loopback.DESCRIPTOR_BYTES if self.hardware_step_s is not None else ()
        with step("transferring from one Mooncake engine to another"):
            return loopback.check(loopback.over_tcp(sizes))


@dataclass(frozen=True)
class Pair:
    """Root URLs of running servers."""

    urls: Mapping[str, tuple[str, ...]]
    api_key: str | None
    trusted: ssl.SSLContext

    def examine(self) -> DoctorReport:
        with step("asking proxy and engines"):
            servers = asyncio.run(pair.ask(self.urls, self.api_key, self.trusted))
        return make_report("pair", pair.judge(servers))


def read_machine(
    kv_transfer_config: str | None,
    api_port: int | None = None,
    data_parallel: int | None = None,
    peers: Sequence[str] = (),
    decode_hosts: Sequence[str] = (),
    hardware_step_s: float | None = None,
) -> Machine:
    """Raises ValueError with the wrong option."""
    config = None if kv_transfer_config is None else configuration.read(kv_transfer_config)
    first = configuration.listening_port(config)
    if data_parallel is not None and first is None:
        raise ValueError("--data-parallel-size is for a decode engine's --kv-transfer-config: give that, too")
    if data_parallel is not None and first is not None and first + data_parallel > 65536:
        raise ValueError(
            f"--data-parallel-size {data_parallel}: kv_port {first} leaves ports for {65536 - first} engines"
        )
    if decode_hosts and (config is None or config.kv_role != "kv_producer"):
        raise ValueError("--decode-host is for a prefill engine's --kv-transfer-config: give that, too")
    for option, values in (("--peer", peers), ("--decode-host", decode_hosts)):
        if len(values) > MAX_PEERS:
            raise ValueError(f"{len(values)} values of {option}: at most {MAX_PEERS}")
    if (wrong := next((host for host in decode_hosts if not is_host(host)), None)) is not None:
        raise ValueError(f"--decode-host {one_line(wrong, 80)!r} is no host")
    addresses = tuple(map(_address, peers))
    return Machine(config, api_port, data_parallel or 1, addresses, tuple(decode_hosts), hardware_step_s)


def _address(peer: str) -> str:
    try:
        return str(ipaddress.ip_address(peer))
    except ValueError:
        raise ValueError(f"--peer {one_line(peer, 80)!r} is not an address of an NPU") from None


def read_pair(proxies: Sequence[str], prefills: Sequence[str], decodes: Sequence[str], ca_file: str | None) -> Pair:
    """Raises ValueError with the wrong option, or for an API key in the environment that cannot be sent."""
    given = {"proxy": proxies, "prefill": prefills, "decode": decodes}
    urls = {option: tuple(_root_url(option, url) for url in each) for option, each in given.items()}
    try:
        trusted = ssl.create_default_context(cafile=ca_file)
    except OSError as problem:  # ssl.SSLError is an OSError
        raise ValueError(f"--ca-file {one_line(str(ca_file), 200)!r} cannot be used: {problem}") from None
    return Pair(urls, pair.api_key(os.environ), trusted)


def _root_url(option: str, url: str) -> str:
    try:
        return pair.root_url(url)
    except ValueError as problem:  # without the URL, which may hold a password
        raise ValueError(f"--{option}: {problem}") from None
