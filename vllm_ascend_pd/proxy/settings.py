# SPDX-License-Identifier: Apache-2.0
"""The proxy's settings, declared once: fields with an `Option` are the options of `vllm-ascend-pd proxy`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Annotated, Any, get_type_hints
from urllib.parse import urlsplit

import msgspec
from typer import Option

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.core.signed_addresses import metaserver_tokens, sign_metaserver
from vllm_ascend_pd.core.ticket_params import METASERVER_SIGNATURE
from vllm_ascend_pd.transport.secret_files import cluster_secret, read_text_secret

MIB = 1024 * 1024
DNS_SCHEME = "dns+http"
"""`dns+http://NAME:PORT` stands for one engine at each address to which the name resolves, now and later."""
_EXAMPLE = "http://10.0.0.1:8100"
_LABEL = re.compile("[A-Za-z0-9_-]{1,63}")

_BODIES_THAT_FIT = 4
"""Of the largest size. A quarter of the room is not for clients, and a body takes half of what is left at most."""
_MAY_BE_0 = ("port", "max_waiting", "queue_per_engine")
"""Numbers that may be 0. All others must be greater."""


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a proxy. Times are in seconds. Raises ValueError, in words for the operator, for a value that
    cannot work."""

    prefill: Annotated[
        list[str],
        Option(help="A prefill engine, or with dns+http://NAME:PORT each address of NAME. Repeatable.", metavar="URL"),
    ] = []
    decode: Annotated[list[str], Option(help="A decode engine, in the same way. Repeatable.", metavar="URL")] = []
    host: Annotated[str, Option(help="Address to listen on.", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen on. 0: any free one.", metavar="PORT", min=0, max=65535)] = 8000
    metaserver_url: Annotated[
        str,
        Option(help="Where decode reaches it.", metavar="URL", show_default="http://HOST:PORT/v1/metaserver"),
    ] = ""
    """Without a path, /v1/metaserver is added."""
    read_timeout: Annotated[float, Option(help="For silent engines and idle readers.", metavar="S")] = 600.0
    """An engine that computes a request, by its own metrics, may be silent for longer."""
    probe_timeout: Annotated[float, Option(help="Without answers to health probes.", metavar="S")] = 15.0
    """An engine is probed every second while a request waits for its bytes."""
    attempts: Annotated[int, Option(help="Tries at prefill, and at decode.", metavar="N")] = 2
    """Attempts at decode: how often one request is sent to decode engines while its client has got nothing. Attempts at
    prefill: failed prefills after which a sample of a prompt fails. The count covers all tickets of the sample, those
    at earlier decode engines included. A prefill whose KV did not arrive failed, too; if there are only such failures,
    more prefills may follow (`routing/answers.py`, `MAX_UNDELIVERED`). A prefill that worked does not
    count: if decode fails by itself, the next attempt needs another prefill. Retries prefer another engine."""
    max_concurrent: Annotated[int, Option(help="Requests in flight. Others wait.", metavar="N")] = 1024
    max_waiting: Annotated[int, Option(help="Requests that wait. Others get 429.", metavar="N")] = 32768
    keep_alive_timeout: Annotated[float, Option(help="For idle connections of clients.", metavar="S")] = 3900.0
    """Gateways close theirs earlier, so they send no request on a connection that the proxy closes at that moment."""
    max_per_prefill: Annotated[
        int | None, Option(help="Prompts at a prefill engine.", metavar="N", show_default="no limit")
    ] = None
    max_per_decode: Annotated[
        int | None, Option(help="Requests at a decode engine.", metavar="N", show_default="no limit")
    ] = None
    queue_timeout: Annotated[float, Option(help="Wait in a queue. Then 429.", metavar="S")] = 1800.0
    """For `max_concurrent`, or for a slot at an engine. It does not apply to a request's prefills after its first
    one."""
    max_body_mib: Annotated[int, Option(help="Size of a body, images included.", metavar="MIB")] = 64
    max_bodies_mib: Annotated[int, Option(help="Size of all bodies together.", metavar="MIB")] = 512
    """Of clients' requests and engines' posts, while they arrive, wait and are served. What does not fit is answered
    503."""
    secret_file: Annotated[
        str | None,
        Option(
            help="The cluster's secret.",
            metavar="FILE",
            show_default="~/.config/vllm-ascend-pd/secret",
        ),
    ] = None
    metaserver_token_file: Annotated[
        str | None, Option(help="Token of engines without the secret.", metavar="FILE")
    ] = None
    admin_token_file: Annotated[
        str | None, Option(help="Token of the admin API and the status page.", metavar="FILE")
    ] = None

    # What follows has no option: nobody had a reason for another value. Tests do.

    connect_timeout: float = 10.0
    """To open a connection to an engine. A lost SYN is sent again after 1, 3 and 7 s."""
    silence_timeout: float = 24 * 3600.0
    """How long an engine may send nothing for a request although it computes: longer than any answer takes."""
    health_timeout: float = 2.0
    """For an engine's answer to a health check, to a question about its load, and to a probe for `/health`."""
    check_interval: float = 1.0
    """Between two checks of an engine's health and load. An engine answers one in about a millisecond."""
    eject_after: int = 3
    """Failed health checks in a row that eject an engine: it gets requests only if no other engine is left. One or two
    may be lost by a busy host."""
    return_after: int = 2
    """Good health checks in a row that end an ejection."""
    dns_interval: float = 10.0
    """Between two lookups of the names of `dns+http://` engines. Kubernetes' own records live 5 s to 30 s."""
    queue_per_engine: int = 1024
    """Requests that wait for a slot at an engine, for each engine that could have one. Further ones are answered 429. A
    request with several prompts or samples counts as one until its first prefill, and then not at all."""
    max_ticket_bytes: int = 16 * MIB
    """The largest ticket. Token ids take about 7 bytes each; block ids take 8 bytes per 128 tokens and cache group. A
    ticket of 1 Mi tokens takes 7 MiB until its prefill ends."""

    def __post_init__(self) -> None:
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if not (urls or self.admin_token_file):
                raise ValueError(
                    f"at least one {role} engine is needed: --{role}, or --admin-token-file to add it while the proxy "
                    "runs"
                )
        self.engines()
        for name in self.__struct_fields__:
            value, may_be_0 = getattr(self, name), name in _MAY_BE_0
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if value < 0 or (value == 0 and not may_be_0):
                least = "not be less than 0" if may_be_0 else "be greater than 0"
                raise ValueError(f"--{name.replace('_', '-')} must {least}")
        if self.max_bodies_mib < _BODIES_THAT_FIT * self.max_body_mib:
            raise ValueError(
                f"--max-bodies-mib must be at least {_BODIES_THAT_FIT} times --max-body-mib: "
                f"{_BODIES_THAT_FIT * self.max_body_mib}"
            )
        url = _with_path(self.metaserver_url or _default_metaserver_url(self.host, self.port))
        msgspec.structs.force_setattr(self, "metaserver_url", url)
        self.metaserver_tokens()
        self.admin_token()

    def engines(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The prefill and decode engines from the command line."""
        prefill, decode = _checked("prefill", self.prefill), _checked("decode", self.decode)
        if both := sorted({*prefill} & {*decode}):
            raise ValueError(f"{both[0]} is given as a prefill and as a decode engine")
        return prefill, decode

    def metaserver(self) -> dict[str, str]:
        """What tells decode where to post tickets: the metaserver's URL, signed if there is a secret."""
        named, secret = {"metaserver": self.metaserver_url}, cluster_secret(self.secret_file)
        if secret is not None:
            named[METASERVER_SIGNATURE] = sign_metaserver(secret, self.metaserver_url)
        return named

    def metaserver_tokens(self) -> list[str]:
        """The bearer tokens of decode engines; none if tickets need none."""
        secret = cluster_secret(self.secret_file)
        tokens = [] if secret is None else metaserver_tokens(secret)
        if self.metaserver_token_file is not None:
            tokens.append(read_text_secret(self.metaserver_token_file))
        return tokens

    def admin_token(self) -> str | None:
        return None if self.admin_token_file is None else read_text_secret(self.admin_token_file)


def options() -> dict[str, tuple[Any, Any]]:
    """The type and the default of each setting that has an option, in order. The type carries the `Option`."""
    types = get_type_hints(ProxySettings, include_extras=True)
    defaults = {field.name: field for field in msgspec.structs.fields(ProxySettings)}
    return {
        name: (kind, defaults[name].default if defaults[name].default is not msgspec.NODEFAULT else [])
        for name, kind in types.items()
        if hasattr(kind, "__metadata__")
    }


def _default_metaserver_url(host: str, port: int) -> str:
    """The metaserver's URL of a proxy that listens on `host`. Raises ValueError if nobody can connect to `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}{METASERVER_PATH}"
    if address.is_unspecified:
        raise ValueError(
            f"decode engines cannot connect to {host}: give the proxy's address "
            f"with --metaserver-url http://ADDRESS:{port}{METASERVER_PATH}"
        )
    authority = f"[{host}]" if address.version == 6 else host
    return f"http://{authority}:{port}{METASERVER_PATH}"


def _with_path(url: str) -> str:
    """Returns the metaserver's URL with its default path if it has none. Raises ValueError for a URL that every decode
    engine refuses to post to."""
    if not _has_host(url, ("http", "https")):
        raise ValueError(f"the metaserver URL {url!r} is not an http(s) URL")
    if any(character in url for character in "@#?%\\"):
        raise ValueError(f"the metaserver URL {url!r}: give only scheme, host, port and path")
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + METASERVER_PATH


def check_engine_url(role: str, url: str, schemes: Sequence[str] = ("http", "https", DNS_SCHEME)) -> str:
    """Returns the URL without a trailing slash, so that a path can be appended, and in lower case, so that a host has
    one spelling. Raises ValueError with a message for the operator."""
    if not url.isprintable() or not _has_host(url, schemes):
        raise ValueError(f"{role} engine {url!r} is not a URL such as {_EXAMPLE}")
    parts = urlsplit(url)
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{role} engine {url!r}: give only scheme, host and port, without a path or user")
    if parts.scheme == DNS_SCHEME and parts.port is None:
        raise ValueError(f"{role} engine {url!r}: give the port")
    return url.rstrip("/").lower()


def _checked(role: str, urls: Sequence[str]) -> tuple[str, ...]:
    """Checks each URL by `check_engine_url`, and that no two are the same. Raises ValueError."""
    roots = tuple(check_engine_url(role, url) for url in urls)
    if len(set(roots)) < len(roots):
        raise ValueError(f"the same {role} engine is given twice")
    return roots


def _has_host(url: str, schemes: Sequence[str]) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and _is_host(parts.hostname or "") and parts.port != 0
    except ValueError:  # the port is no number, or a bracket is not closed
        return False


def _is_host(host: str) -> bool:
    """Whether a host is an address or a name that resolvers accept. They fail in various ways on other text."""
    if ":" in host:
        ipaddress.IPv6Address(host)
        return "%" not in host
    return len(host) <= 253 and all(map(_LABEL.fullmatch, host.removesuffix(".").split(".")))
