# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_ascend_pd.tools.command_line import USAGE_ERROR, Version


def doctor(
    proxy: Annotated[str | None, typer.Option(help="URL of a running proxy.")] = None,
    prefill: Annotated[list[str] | None, typer.Option(help="URL of a running prefill engine. May be repeated.")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="URL of a running decode engine. May be repeated.")] = None,
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
        int,
        typer.Option(
            min=1, max=1024, help="Number of data-parallel engines on this machine. Each has its own KV port."
        ),
    ] = 1,
    peer: Annotated[
        list[str] | None, typer.Option(help="IP address of another node's NPU to ping. May be repeated.")
    ] = None,
    decode_host: Annotated[
        list[str] | None,
        typer.Option(help="VLLM_HOST_IP of a decode engine that this prefill engine serves. May be repeated."),
    ] = None,
    hardware: Annotated[
        bool,
        typer.Option("--hardware", help="Also run kernels, transfers and collectives on this machine's NPUs."),
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
    from vllm_ascend_pd.tools.doctor.command import options, print_report
    from vllm_ascend_pd.tools.doctor.engine_config import UsageError

    try:
        chosen = options(
            proxy,
            prefill or (),
            decode or (),
            ca_file,
            kv_transfer_config,
            port,
            data_parallel_size,
            peer or (),
            decode_host or (),
            hardware,
            step_timeout,
        )
    except UsageError as error:
        raise USAGE_ERROR(str(error)) from None
    if not print_report(chosen, as_json=json):
        raise typer.Exit(1)
