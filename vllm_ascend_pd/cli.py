# SPDX-License-Identifier: Apache-2.0
"""The `vllm-ascend-pd` command."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, cast

import typer

# typer exports one usage error; the base of all of them is click's or, in newer versions, typer's own copy.
_USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)

app = typer.Typer(
    help="Prefill/decode disaggregation for vLLM on Ascend NPUs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Keeps `proxy` a subcommand while it is the only one."""


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
