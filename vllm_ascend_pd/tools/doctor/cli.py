# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd doctor` and its options."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from vllm_ascend_pd.tools.command_line import USAGE_ERROR, Version, as_json

Several = list[str] | None


def _option(text: str, metavar: str, **settings: Any) -> Any:
    return typer.Option(help=text, metavar=metavar, **settings)


def doctor(
    proxy: Annotated[str | None, _option("A running proxy.", "URL")] = None,
    prefill: Annotated[Several, _option("A running prefill engine. May be repeated.", "URL")] = None,
    decode: Annotated[Several, _option("A running decode engine. May be repeated.", "URL")] = None,
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
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    version: Version = False,
) -> None:
    """Check this machine. With URLs, check running engines and their proxy instead.

    Each problem comes with what to do about it. The exit code is 1 if there is an error.
    """
    # Imported here so that other commands start faster.
    from vllm_ascend_pd.tools.doctor import command
    from vllm_ascend_pd.tools.doctor.report import show

    this_machine = (kv_transfer_config, port, data_parallel_size, hardware or None)
    try:
        if proxy is None and not prefill and not decode:
            examine = command.read_machine(kv_transfer_config, port, data_parallel_size, hardware)
        elif any(value is not None for value in this_machine):
            raise ValueError(
                "--proxy, --prefill and --decode look at what runs; --kv-transfer-config, --port, "
                "--data-parallel-size and --hardware at this machine: give one kind"
            )
        else:
            proxies = () if proxy is None else (proxy,)
            examine = command.read_pair({"proxy": proxies, "prefill": prefill or (), "decode": decode or ()})
    except ValueError as problem:
        raise USAGE_ERROR(str(problem)) from None
    try:
        report = examine()
    except KeyboardInterrupt:
        print("vllm-ascend-pd: interrupted: nothing is left running, and there is no report", file=sys.stderr)
        raise typer.Exit(130) from None
    if json:
        print(as_json(report), end="")
    else:
        show(report)
    if not report.ok:
        raise typer.Exit(1)
