# SPDX-License-Identifier: Apache-2.0
"""The `vllm-ascend-pd` command."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from vllm_ascend_pd.tools.command_line import USAGE_ERROR, Version, new_app, run_app
from vllm_ascend_pd.tools.doctor.cli import doctor
from vllm_ascend_pd.tools.migrate.cli import migrate
from vllm_ascend_pd.tools.plan.cli import plan
from vllm_ascend_pd.tools.timeline.command import timeline

app = new_app(help="Prefill/decode disaggregation for vLLM on Ascend NPUs.")


@app.callback()
def _all_commands(version: Version = False) -> None:
    pass


@app.command()
def proxy(
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a prefill engine. dns+http://NAME:PORT means every address of NAME. May be repeated."
        ),
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="URL of a decode engine, as for --prefill. May be repeated.")
    ] = None,
    dns_interval: Annotated[float, typer.Option(help="Seconds between DNS lookups of dns+http:// URLs.")] = 10.0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0 chooses a free port.")] = 8000,
    metaserver_url: Annotated[
        str | None,
        typer.Option(
            help="URL at which decode engines reach this proxy. Without a path, /v1/metaserver is added.",
            show_default="http://HOST:PORT/v1/metaserver",
        ),
    ] = None,
    metaserver_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Separate port for tickets, which --port then refuses. 0 chooses a free port."
        ),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(help="PEM file with the certificate chain of --port. Enables HTTPS.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file with the key of --tls-cert.")] = None,
    tls_key_password_file: Annotated[str | None, typer.Option(help="File with the password of --tls-key.")] = None,
    metaserver_tls_cert: Annotated[
        str | None,
        typer.Option(help="PEM file with the certificate chain of --metaserver-port.", show_default="--tls-cert"),
    ] = None,
    metaserver_tls_key: Annotated[
        str | None, typer.Option(help="PEM file with its key.", show_default="--tls-key")
    ] = None,
    metaserver_tls_key_password_file: Annotated[
        str | None, typer.Option(help="File with the password of that key.")
    ] = None,
    metaserver_client_ca: Annotated[
        str | None,
        typer.Option(help="PEM file with a CA. Only decode engines with a certificate from this CA may post tickets."),
    ] = None,
    connect_timeout: Annotated[float, typer.Option(help="Timeout in seconds for connecting to an engine.")] = 5.0,
    read_timeout: Annotated[
        float,
        typer.Option(help="Timeout in seconds for a silent client, and for a silent engine that computes no request."),
    ] = 600.0,
    silence_timeout: Annotated[
        float,
        typer.Option(help="Timeout in seconds for an engine that sends nothing for a request but still computes."),
    ] = 24 * 3600.0,
    prefill_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds without a completed prompt after which a prefill engine's prompts go to another one.",
            show_default="--read-timeout",
        ),
    ] = None,
    probe_timeout: Annotated[
        float,
        typer.Option(help="Seconds without an answer to a health probe after which a request moves to another engine."),
    ] = 15.0,
    prefill_attempts: Annotated[
        int,
        typer.Option(
            help="Maximum number of prefill attempts per prompt, over all retries of its request. 1: no retry."
        ),
    ] = 2,
    decode_attempts: Annotated[
        int, typer.Option(help="Maximum number of decode attempts before the first token. 1: no retry.")
    ] = 2,
    decode_fallback: Annotated[
        bool, typer.Option(help="Let decode compute prompts, within its own bound, while no prefill engine is well.")
    ] = True,
    strategy: Annotated[
        str, typer.Option(help="Routing strategy: round-robin, least-load or prefix-affinity.")
    ] = "prefix-affinity",
    check_interval: Annotated[float, typer.Option(help="Seconds between health and load checks of an engine.")] = 1.0,
    eject_after: Annotated[
        int,
        typer.Option(help="Number of consecutive failed health checks after which an engine gets no more requests."),
    ] = 3,
    return_after: Annotated[
        int, typer.Option(help="Number of consecutive good health checks after which it gets requests again.")
    ] = 2,
    max_concurrent: Annotated[
        int, typer.Option(help="Maximum number of requests in flight. Further requests wait.")
    ] = 1024,
    max_waiting: Annotated[
        int, typer.Option(help="Maximum number of waiting requests. Further requests get status 429.")
    ] = 32768,
    keep_alive_timeout: Annotated[
        float, typer.Option(help="Seconds after which an idle client connection is closed.")
    ] = 3900.0,
    max_per_prefill: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of prompts in flight per prefill engine. Further prompts wait.",
            show_default="no limit",
        ),
    ] = None,
    max_per_decode: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of requests in flight per decode engine. Further requests wait.",
            show_default="no limit",
        ),
    ] = None,
    queue_per_engine: Annotated[
        int, typer.Option(help="Maximum number of requests that wait per engine. Further requests get status 429.")
    ] = 1024,
    queue_timeout: Annotated[
        float,
        typer.Option(help="Maximum seconds in a queue. Then the request gets status 429, unless prefill has begun."),
    ] = 1800.0,
    max_body_mib: Annotated[int, typer.Option(help="Maximum size of a request body in MiB.")] = 64,
    allowed_origins: Annotated[str, typer.Option(help="Allowed CORS origins as a JSON list, as in vLLM.")] = "[]",
    allowed_methods: Annotated[str, typer.Option(help="Allowed CORS methods as a JSON list, as in vLLM.")] = '["*"]',
    allowed_headers: Annotated[str, typer.Option(help="Allowed CORS headers as a JSON list, as in vLLM.")] = '["*"]',
    allow_credentials: Annotated[bool, typer.Option(help="Allow credentials in CORS requests, as in vLLM.")] = False,
    metaserver_token_file: Annotated[
        str | None, typer.Option(help="File with the bearer token that decode engines must send with tickets.")
    ] = None,
    admin_token_file: Annotated[
        str | None,
        typer.Option(help="File with the bearer token of the status page and /admin/engines. Enables the latter."),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="OpenTelemetry collector that gets the spans of requests, as in vLLM.")
    ] = None,
    version: Version = False,
) -> None:
    """Serve the OpenAI API in front of prefill and decode engines."""
    # Imported here so that other commands do not load a web server.
    from vllm_ascend_pd.proxy.http.tls import from_files
    from vllm_ascend_pd.proxy.server import listen, serve
    from vllm_ascend_pd.proxy.settings import MIB, ProxySettings, default_metaserver_url, names

    apart = metaserver_port is not None
    with contextlib.ExitStack() as open_ports:
        listeners = []
        for each in [port] if metaserver_port is None else [port, metaserver_port]:
            try:
                listeners.append(open_ports.enter_context(listen(host, each)))
            except OSError as error:
                print(f"vllm-ascend-pd: cannot listen on {host}:{each}: {error}", file=sys.stderr)
                raise typer.Exit(1) from None
        port, ticket_port = (each.getsockname()[1] for each in (listeners[0], listeners[-1]))
        try:
            if metaserver_client_ca is not None and not apart:
                raise ValueError("--metaserver-client-ca needs --metaserver-port: clients have no such certificate")
            tls = from_files("tls", tls_cert, tls_key, tls_key_password_file)
            own = (metaserver_tls_cert, metaserver_tls_key, metaserver_tls_key_password_file)
            shared = (tls_cert, tls_key, tls_key_password_file) if apart and own == (None, None, None) else own
            metaserver_tls = from_files("metaserver-tls", *shared, metaserver_client_ca)
            ticket_tls = metaserver_tls if apart else tls
            settings = ProxySettings(
                prefill=tuple(prefill or ()),
                decode=tuple(decode or ()),
                dns_interval=dns_interval,
                metaserver_url=metaserver_url or default_metaserver_url(host, ticket_port, ticket_tls),
                tls=tls,
                metaserver_apart=apart,
                metaserver_tls=metaserver_tls,
                connect_timeout=connect_timeout,
                read_timeout=read_timeout,
                silence_timeout=silence_timeout,
                prefill_timeout=prefill_timeout,
                probe_timeout=probe_timeout,
                prefill_attempts=prefill_attempts,
                decode_attempts=decode_attempts,
                decode_fallback=decode_fallback,
                strategy=strategy,
                check_interval=check_interval,
                eject_after=eject_after,
                return_after=return_after,
                max_concurrent=max_concurrent,
                max_waiting=max_waiting,
                keep_alive_timeout=keep_alive_timeout,
                max_per_prefill=max_per_prefill,
                max_per_decode=max_per_decode,
                queue_per_engine=queue_per_engine,
                queue_timeout=queue_timeout,
                max_body_bytes=max_body_mib * MIB,
                allowed_origins=names("allowed-origins", allowed_origins),
                allowed_methods=names("allowed-methods", allowed_methods),
                allowed_headers=names("allowed-headers", allowed_headers),
                allow_credentials=allow_credentials,
                metaserver_token_file=metaserver_token_file,
                admin_token_file=admin_token_file,
                otlp_traces_endpoint=otlp_traces_endpoint,
            )
        except ValueError as error:
            raise USAGE_ERROR(str(error)) from None
        _log_to_stderr()
        logging.getLogger(__name__).info(
            "proxy listens on %s port %d; decode engines post tickets to %s", host, port, settings.metaserver_url
        )
        if not serve(settings, *listeners):
            raise typer.Exit(1)


for _command in (plan, doctor, timeline):
    app.command()(_command)
# The words of another command follow: only options before them are this one's.
app.command(context_settings={"allow_interspersed_args": False})(migrate)


@app.command()
def keygen(
    file: Annotated[Path, typer.Argument(help="File to create. It must not exist.")],
    ticket_secret: Annotated[
        bool, typer.Option("--ticket-secret", help="Create a ticket secret instead of side-channel keys.")
    ] = False,
    version: Version = False,
) -> None:
    """Create a file with side-channel keys, or with a ticket secret."""
    from vllm_ascend_pd.transport.keys import SecretFileError, new_key_file, new_ticket_secret, write_new

    try:
        write_new(file, new_ticket_secret() if ticket_secret else new_key_file())
    except SecretFileError as error:
        print(f"vllm-ascend-pd: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    key = "ticket_secret_file" if ticket_secret else "side_channel_key_file"
    print(f"{file}: created with mode 0600. Copy it to the hosts of all prefill and decode engines, and name it in")
    print(f'  --kv-transfer-config: "kv_connector_extra_config": {{"{key}": "{file.absolute()}"}}')


REMOVED = {
    "--engines-file": "name engines with --prefill and --decode, by DNS (dns+http://NAME:PORT) or by the admin API",
    "--media-hosts": "each engine fetches images, sounds and videos itself",
    "--media-timeout": "each engine fetches images, sounds and videos itself",
    "--ticket-secret-file": "the proxy needs no ticket secret",
}
"""Options of `proxy` of earlier versions, each with what holds instead."""


def main() -> NoReturn:
    if sys.argv[1:2] == ["proxy"]:
        for argument in sys.argv[2:]:
            if (name := argument.partition("=")[0]) in REMOVED:
                print(f"vllm-ascend-pd: there is no option {name} any more: {REMOVED[name]}", file=sys.stderr)
                sys.exit(2)
    run_app(app, "vllm-ascend-pd")


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # These libraries log every request, and at debug level also headers with clients' keys.
    for name in ("aiohttp", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
