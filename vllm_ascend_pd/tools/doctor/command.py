# SPDX-License-Identifier: Apache-2.0
"""Checks the options of `vllm-ascend-pd doctor`, and runs the checks in their order."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from vllm_ascend_pd.core.protocol import TransportInfo
from vllm_ascend_pd.tools.doctor import configuration, hardware, loading, loopback, npus, pair, ports, versions
from vllm_ascend_pd.tools.doctor.configuration import KvTransferConfig
from vllm_ascend_pd.tools.doctor.report import DoctorReport, make_report, note, progress

Examination = Callable[[], DoctorReport]


def examine_machine(
    config: KvTransferConfig | None, api_port: int | None, data_parallel: int, on_hardware: bool
) -> DoctorReport:
    """Checks what is planned to run on this machine. `on_hardware`: whether its NPUs are tried, too."""
    installed = versions.installed_versions()
    for_npus = versions.stack_of(installed) is versions.NPU
    findings = versions.judge(installed)
    progress("loading torch, Mooncake, vLLM and the compiled ops")
    loaded = loading.check()
    figures = {finding.check: finding.figures for finding in loaded}
    host = str(figures.get("loading.host", {}).get("host", ""))
    seen = figures.get("loading.npus", {}).get("npus")
    npu_names = [name for name in str(seen or "").split(",") if name]
    mooncake = figures.get("loading.mooncake", {})
    findings += [*loaded, *configuration.judge_plugins(os.environ)]
    configured, extra = configuration.judge(config)
    protocol = extra.transfer_protocol or ("ascend" if for_npus else "tcp")
    findings += [*configured, configuration.judge_protocol(protocol, for_npus, mooncake)]
    progress("asking npu-smi")
    asked, driver, devices = npus.check_npus(for_npus, None if seen is None else npu_names)
    findings += asked
    if for_npus:
        cann = versions.installed_cann(os.environ)
        findings.append(versions.judge_cann(os.environ, cann))
        if "kind" in mooncake:
            transport = msgspec.convert(mooncake, TransportInfo)
            findings.append(versions.judge_engine(transport, driver, cann, os.environ))
    if devices:
        progress("asking hccn_tool")
        findings += npus.check_network(devices)
    first = configuration.listening_port(config)
    findings += ports.check_ports(first, data_parallel, host, api_port, devices, os.environ)
    if (reason := mooncake.get("no_tcp")) is None:
        progress("transferring from one Mooncake engine to another")
        findings += loopback.check(loopback.over_tcp(loopback.DESCRIPTOR_BYTES if on_hardware else ()))
    else:
        findings.append(note("transfer.loopback", f"not tried: {reason}"))
    if on_hardware:
        findings += hardware.check(npu_names, host or "127.0.0.1", for_npus or bool(devices))
    return make_report("machine", findings)


def read_machine(
    kv_transfer_config: str | None, api_port: int | None, data_parallel: int | None, on_hardware: bool
) -> Examination:
    """Returns what checks the machine. Raises ValueError with the wrong option."""
    config = None if kv_transfer_config is None else configuration.read(kv_transfer_config)
    first = configuration.listening_port(config)
    if data_parallel is not None and first is None:
        raise ValueError("--data-parallel-size is for a decode engine's --kv-transfer-config: give that, too")
    if data_parallel is not None and first is not None and first + data_parallel > 65536:
        raise ValueError(
            f"--data-parallel-size {data_parallel}: kv_port {first} leaves ports for {65536 - first} engines"
        )
    return partial(examine_machine, config, api_port, data_parallel or 1, on_hardware)


def examine_pair(urls: Mapping[str, Sequence[str]], api_key: str | None) -> DoctorReport:
    """Checks running servers. `urls`: their root URLs, by option."""
    progress("asking proxy and engines")
    # Trusts the CAs of this host, or those of SSL_CERT_FILE, which OpenSSL reads.
    answers = asyncio.run(pair.ask(urls, api_key, ssl.create_default_context()))
    return make_report("pair", pair.judge(answers))


def read_pair(given: Mapping[str, Sequence[str]]) -> Examination:
    """Returns what checks the servers. Raises ValueError with the wrong option, or for an API key in the environment
    that cannot be sent."""
    urls = {option: [_root_url(option, url) for url in each] for option, each in given.items()}
    return partial(examine_pair, urls, pair.api_key(os.environ))


def _root_url(option: str, url: str) -> str:
    try:
        return pair.root_url(url)
    except ValueError as problem:  # without the URL, which may hold a password
        raise ValueError(f"--{option}: {problem}") from None
