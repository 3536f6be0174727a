# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd doctor`: its options, and its checks in their order."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_ascend_pd.tools.command_line import USAGE_ERROR, Version, as_json

# The checks are imported where they run, so that other commands start faster.
if TYPE_CHECKING:
    from vllm_ascend_pd.core.secret import Secret
    from vllm_ascend_pd.tools.doctor.report import DoctorReport


def _option(text: str, metavar: str, **settings: Any) -> Any:
    return typer.Option(help=text, metavar=metavar, **settings)


def doctor(
    proxy: Annotated[str | None, _option("A running proxy.", "URL")] = None,
    prefill: Annotated[list[str] | None, _option("A running prefill engine. May be repeated.", "URL")] = None,
    decode: Annotated[list[str] | None, _option("A running decode engine. May be repeated.", "URL")] = None,
    kv_transfer_config: Annotated[
        str | None,
        _option("What `vllm serve` gets on this machine. Checks it and the files and ports it names.", "JSON"),
    ] = None,
    port: Annotated[int | None, _option("HTTP port of the engine on this machine.", "PORT", min=1, max=65535)] = None,
    data_parallel_size: Annotated[
        int | None,
        _option(
            "Number of data-parallel decode engines on this machine. Each has its own KV port.",
            "N",
            min=1,
            max=1024,
            show_default="1",
        ),
    ] = None,
    hardware: Annotated[
        bool,
        typer.Option(
            "--hardware",
            help="Also run kernels, transfers and collectives on this machine's NPUs, and measure descriptors.",
        ),
    ] = False,
    peer: Annotated[
        str | None,
        _option("With --hardware: try the way to another server instead, where the same command runs.", "HOST"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    version: Version = False,
) -> None:
    """Check this machine. With URLs, check running engines and their proxy instead.

    Each problem comes with what to do about it. The exit code is 1 if there is an error.
    """
    from vllm_ascend_pd.tools.doctor.report import show

    this_machine = (kv_transfer_config, port, data_parallel_size, hardware or None)
    if peer is not None and not hardware:
        raise USAGE_ERROR("--peer goes with --hardware")
    try:
        if proxy is None and not prefill and not decode:
            report = _examine_machine(kv_transfer_config, port, data_parallel_size, hardware, peer)
        elif any(value is not None for value in this_machine):
            raise USAGE_ERROR(
                "--proxy, --prefill and --decode look at what runs; --kv-transfer-config, --port, "
                "--data-parallel-size and --hardware at this machine: give one kind"
            )
        else:
            proxies = () if proxy is None else (proxy,)
            report = _examine_pair({"proxy": proxies, "prefill": prefill or (), "decode": decode or ()})
    except KeyboardInterrupt:
        print("vllm-ascend-pd: interrupted: nothing is left running, and there is no report", file=sys.stderr)
        raise typer.Exit(130) from None
    if json:
        print(as_json(report), end="")
    else:
        show(report)
    if not report.ok:
        raise typer.Exit(1)


def _examine_machine(
    kv_transfer_config: str | None,
    api_port: int | None,
    data_parallel: int | None,
    on_hardware: bool,
    other_host: str | None,
) -> DoctorReport:
    """Checks what is planned to run on this machine.

    `on_hardware`: whether its NPUs are tried, too. `other_host`: with what other server; None: with none.
    """
    import msgspec

    from vllm_ascend_pd.core.protocol import TransportInfo
    from vllm_ascend_pd.tools.doctor import configuration, hardware, loading, loopback, npus, peer, ports, versions
    from vllm_ascend_pd.tools.doctor.report import make_report, note, progress
    from vllm_ascend_pd.tools.programs import run

    try:
        config = None if kv_transfer_config is None else configuration.read(kv_transfer_config)
    except ValueError as problem:
        raise USAGE_ERROR(str(problem)) from None
    first = config.kv_port if config is not None and config.kv_role == "kv_consumer" else None  # port of decode
    if data_parallel is not None and first is None:
        raise USAGE_ERROR("--data-parallel-size is for a decode engine's --kv-transfer-config: give that, too")
    if data_parallel is not None and first is not None and first + data_parallel > 65536:
        raise USAGE_ERROR(
            f"--data-parallel-size {data_parallel}: kv_port {first} leaves ports for {65536 - first} engines"
        )
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
    configured, extra = configuration.judge(config, host)
    protocol = extra.transfer_protocol or ("ascend" if for_npus else "tcp")
    findings += [*configured, configuration.judge_protocol(protocol, for_npus, mooncake)]
    progress("asking npu-smi")
    printed = run(["npu-smi", "info"], npus.SMI_TIMEOUT_S)
    asked, driver, devices = npus.judge(printed, for_npus, None if seen is None else npu_names)
    findings += asked
    if for_npus:
        cann = versions.installed_cann(os.environ)
        findings.append(versions.judge_cann(os.environ, cann))
        if "kind" in mooncake:
            transport = msgspec.convert(mooncake, TransportInfo)
            findings.append(versions.judge_engine(transport, driver, cann, os.environ))
    if devices:
        progress("asking hccn_tool")
        findings += npus.check_network(devices, str(mooncake.get("kind", "")))
    findings += ports.check_ports(first, data_parallel or 1, host, api_port, devices, os.environ)
    if (reason := mooncake.get("no_tcp")) is None:
        progress("transferring from one Mooncake engine to another")
        findings += loopback.check(loopback.over_tcp())
    else:
        findings.append(note("transfer.loopback", f"not tried: {reason}"))
    if on_hardware and other_host is None:
        findings += hardware.check(npu_names, host or "127.0.0.1")
    if other_host is not None:
        between = peer.Between(host or "127.0.0.1", other_host, extra.secret_file)
        findings += peer.check(between, _secret(between.secret_file))
    return make_report("machine", findings)


def _secret(file: str | None) -> Secret | None:
    from vllm_ascend_pd.transport.secret_files import SecretFileError, cluster_secret

    try:
        return cluster_secret(file)
    except SecretFileError as problem:
        raise USAGE_ERROR(str(problem)) from None


def _examine_pair(given: Mapping[str, Sequence[str]]) -> DoctorReport:
    """Checks running servers. `given`: their root URLs, by option."""
    from vllm_ascend_pd.tools.doctor import pair
    from vllm_ascend_pd.tools.doctor.report import make_report, progress

    try:
        urls = {option: [pair.root_url(option, url) for url in each] for option, each in given.items()}
        key = pair.api_key(os.environ)
    except ValueError as problem:
        raise USAGE_ERROR(str(problem)) from None
    progress("asking proxy and engines")
    return make_report("pair", pair.judge(asyncio.run(pair.ask(urls, key))))
