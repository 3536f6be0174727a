# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd doctor` and its options."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vllm_ascend_pd.tools.command_line import USAGE_ERROR, Version

Several = list[str] | None


def doctor(
    proxy: Annotated[str | None, typer.Option(help="URL of a running proxy.")] = None,
    prefill: Annotated[Several, typer.Option(help="URL of a running prefill engine. May be repeated.")] = None,
    decode: Annotated[Several, typer.Option(help="URL of a running decode engine. May be repeated.")] = None,
    ca_file: Annotated[
        str | None,
        typer.Option(help="PEM file with the CAs to trust for https:// URLs.", show_default="well-known CAs"),
    ] = None,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(
            help="The value that `vllm serve` gets on this machine. Checks it and the files and ports it names."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="HTTP port of the engine on this machine.")] = None,
    data_parallel_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Number of data-parallel decode engines on this machine. Each has its own KV port.",
            show_default="1",
        ),
    ] = None,
    peer: Annotated[Several, typer.Option(help="IP address of another node's NPU to ping. May be repeated.")] = None,
    decode_host: Annotated[
        Several,
        typer.Option(help="VLLM_HOST_IP of a decode engine that this prefill engine serves. May be repeated."),
    ] = None,
    hardware: Annotated[
        bool,
        typer.Option(
            "--hardware",
            help="Also run kernels, transfers and collectives on this machine's NPUs, and measure descriptors.",
        ),
    ] = False,
    step_timeout: Annotated[
        float | None, typer.Option(min=1, help="Timeout in seconds for each step of --hardware.", show_default="60")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    version: Version = False,
) -> None:
    """Check this machine. With URLs, check running engines and their proxy instead.

    Each problem comes with what to do about it. The exit code is 1 if there is an error.
    """
    # Imported here so that other commands start faster.
    from vllm_ascend_pd.tools.doctor import command
    from vllm_ascend_pd.tools.doctor.report import show

    this_machine = (kv_transfer_config, port, data_parallel_size, peer, decode_host, hardware or None)
    target: command.Machine | command.Pair
    try:
        if proxy is None and not prefill and not decode:
            if ca_file is not None:
                raise ValueError("--ca-file is for https:// URLs: give --proxy, --prefill or --decode")
            if step_timeout is not None and not hardware:
                raise ValueError("--step-timeout is for the steps of --hardware: give that, too")
            step_s = (step_timeout or command.STEP_TIMEOUT_S) if hardware else None
            target = command.read_machine(
                kv_transfer_config, port, data_parallel_size, peer or (), decode_host or (), step_s
            )
        elif any(value is not None for value in this_machine):
            raise ValueError(
                "--proxy, --prefill and --decode look at what runs; --kv-transfer-config, --port, "
                "--data-parallel-size, --peer, --decode-host and --hardware at this machine: give one kind"
            )
        else:
            target = command.read_pair([] if proxy is None else [proxy], prefill or (), decode or (), ca_file)
    except ValueError as problem:
        raise USAGE_ERROR(str(problem)) from None
    try:
        report = target.examine()
    except KeyboardInterrupt:
        print("vllm-ascend-pd: interrupted: nothing is left running, and there is no report", file=sys.stderr)
        raise typer.Exit(130) from None
    show(report, json)
    if not report.ok:
        raise typer.Exit(1)
