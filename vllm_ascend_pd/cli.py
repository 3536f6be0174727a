# SPDX-License-Identifier: Apache-2.0
"""The `vllm-ascend-pd` command."""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from vllm_ascend_pd.proxy.settings import ProxySettings
from vllm_ascend_pd.proxy.settings import options as proxy_options
from vllm_ascend_pd.tools.command_line import USAGE_ERROR, ShortHelp, Version, new_app, removed_option, run_app
from vllm_ascend_pd.tools.doctor.cli import doctor
from vllm_ascend_pd.tools.migrate.cli import REMOVED as REMOVED_OF_MIGRATE
from vllm_ascend_pd.tools.migrate.cli import migrate
from vllm_ascend_pd.tools.plan.cli import plan
from vllm_ascend_pd.tools.timeline.command import timeline
from vllm_ascend_pd.tools.verify import verify
from vllm_ascend_pd.transport.port_holder import held_by

app = new_app(add_completion=True, help="Prefill/decode disaggregation for vLLM on Ascend NPUs.")


@app.callback()
def _all_commands(version: Version = False) -> None:
    pass


def proxy(*, version: Version = False, **given: Any) -> None:
    """Serve the OpenAI API in front of prefill and decode engines. Times are in seconds. More in docs/proxy.md."""
    # Imported here so that other commands do not load a web server.
    from vllm_ascend_pd.proxy.server import listen, serve

    host = given["host"]
    try:
        listener = listen(host, given["port"], given["read_timeout"])
    except OSError as error:
        holder = held_by(given["port"], error.errno)
        print(f"vllm-ascend-pd: cannot listen on {host}:{given['port']}: {error}{holder}", file=sys.stderr)
        raise typer.Exit(1) from None
    with listener:
        try:
            settings = ProxySettings(**given | {"port": listener.getsockname()[1]})
        except ValueError as error:
            raise USAGE_ERROR(str(error)) from None
        _log_to_stderr()
        logging.getLogger(__name__).info(
            "proxy listens on %s port %d; decode engines post tickets to %s",
            host,
            settings.port,
            settings.metaserver_url,
        )
        if not serve(settings, listener):
            raise typer.Exit(1)


def _add_proxy() -> None:
    """Gives `proxy` the options that `ProxySettings` declares."""
    parameters = {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (kind, default) in {**proxy_options(), "version": (Version, False)}.items()
    }
    proxy.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    app.command(cls=ShortHelp)(proxy)


_add_proxy()
for _command in (plan, doctor, timeline, verify):
    app.command(cls=ShortHelp)(_command)
# The words of another command follow: only options before them are this one's.
app.command(cls=ShortHelp, context_settings={"allow_interspersed_args": False})(migrate)


@app.command(cls=ShortHelp)
def secret(
    file: Annotated[
        Path | None, typer.Argument(help="File to create. It must not exist. Default: where engines look for it.")
    ] = None,
    version: Version = False,
) -> None:
    """Create the secret that all engines and proxies of a cluster share."""
    from vllm_ascend_pd.transport.secret_files import SecretFileError, default_secret_file, new_secret, write_new

    default = default_secret_file()
    path = file or default
    if path is None:
        raise USAGE_ERROR("this user has no home folder: name the file")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_new(path, new_secret())
    except (OSError, SecretFileError) as error:
        print(f"vllm-ascend-pd: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{path}: created with mode 0600. Copy it to the same path on every host of the cluster, for the user that")
    print("runs vLLM and the proxy, and keep its mode. Engines and proxies read it when they start.")
    if path.absolute() != default:
        print("Name it, too:")
        print(f'  engines: --kv-transfer-config: "kv_connector_extra_config": {{"secret_file": "{path.absolute()}"}}')
        print(f"  proxy: --secret-file {path.absolute()}")


_KEYGEN = "`vllm-ascend-pd secret` makes the one file that replaces the keys and the ticket secret"
_ONE_PORT = "--port serves tickets, too, and --metaserver-token-file protects them"
_GATEWAY = f"{_ONE_PORT}; TLS is the gateway's (examples/gateway)"
_TLS = "TLS is the gateway's, for clients and for tickets (examples/gateway)"
_FALLBACK = "where decode must not compute prompts, set its key who_computes to prefill"
_ORIGINS = "which pages of other origins may use the proxy (CORS) is the gateway's (examples/gateway)"
_CHECKS = "engines are checked every second, ejected after 3 failures and back after 2 good answers"
REMOVED = {
    "--engines-file": "name engines with --prefill and --decode, by DNS (dns+http://NAME:PORT) or by the admin API",
    "--media-hosts": "each engine fetches images, sounds and videos itself",
    "--media-timeout": "each engine fetches images, sounds and videos itself",
    "--ticket-secret-file": "engines and proxies have one secret: --secret-file",
    "--metaserver-port": _ONE_PORT,
    "--metaserver-tls-cert": _GATEWAY,
    "--metaserver-tls-key": _GATEWAY,
    "--metaserver-tls-key-password-file": _GATEWAY,
    "--metaserver-client-ca": _GATEWAY,
    "--dns-interval": "names of dns+http:// engines are looked up every 10 s",
    "--connect-timeout": "a connection to an engine may take 10 s",
    "--silence-timeout": "an engine that computes may be silent for a day",
    "--prefill-attempts": "--attempts bounds attempts at prefill and at decode",
    "--decode-attempts": "--attempts bounds attempts at prefill and at decode",
    "--check-interval": _CHECKS,
    "--eject-after": _CHECKS,
    "--return-after": _CHECKS,
    "--tls-cert": _TLS,
    "--tls-key": _TLS,
    "--tls-key-password-file": _TLS,
    "--prefill-timeout": "--read-timeout is for engines that compute nothing, prefill engines included",
    "--decode-fallback": _FALLBACK,
    "--no-decode-fallback": _FALLBACK,
    "--otlp-traces-endpoint": "engines send spans by this option of their own, below the client's traceparent",
    "--queue-per-engine": "1024 requests may wait per engine",
    "--allowed-origins": _ORIGINS,
    "--strategy": "an engine that has a prompt's beginning comes first, unless waiting there costs more",
    "--allowed-methods": _ORIGINS,
    "--allowed-headers": _ORIGINS,
    "--allow-credentials": _ORIGINS,
    "--no-allow-credentials": _ORIGINS,
}
"""Options of `proxy` of earlier versions, each with what holds instead."""


def main() -> NoReturn:
    command, words = "".join(sys.argv[1:2]), sys.argv[2:]
    if command == "keygen":
        print(f"vllm-ascend-pd: there is no command keygen any more: {_KEYGEN}", file=sys.stderr)
        sys.exit(2)
    if reason := removed_option(words, {"proxy": REMOVED, "migrate": REMOVED_OF_MIGRATE}.get(command, {})):
        print(f"vllm-ascend-pd: {reason}", file=sys.stderr)
        sys.exit(2)
    run_app(app, "vllm-ascend-pd")


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # These libraries log every request, and at debug level also headers with clients' keys.
    for name in ("aiohttp", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
