# SPDX-License-Identifier: Apache-2.0
"""The proxy's settings, checked once at the start."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import msgspec

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.proxy.http.tls import Tls
from vllm_ascend_pd.proxy.operate.tracing import check_tracing
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.discovery import check_engine_urls, is_http
from vllm_ascend_pd.proxy.routing.strategies import DEFAULT_STRATEGY, STRATEGIES
from vllm_ascend_pd.transport.keys import read_text_secret

MIB = 1024 * 1024


POSITIVE = (
    "connect_timeout",
    "read_timeout",
    "silence_timeout",
    "prefill_timeout",
    "probe_timeout",
    "check_interval",
    "eject_after",
    "return_after",
    "dns_interval",
    "prefill_attempts",
    "decode_attempts",
    "max_concurrent",
    "keep_alive_timeout",
    "max_per_prefill",
    "max_per_decode",
    "queue_timeout",
    "max_body_bytes",
)
"""Settings with an option of `vllm-ascend-pd proxy` that must be greater than 0."""
NOT_NEGATIVE = ("queue_per_engine", "max_waiting")
"""Those that may be 0, too."""


def option(name: str) -> str:
    """The option of `vllm-ascend-pd proxy` for a setting."""
    return "--" + name.replace("max_body_bytes", "max_body_mib").replace("_", "-")


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a proxy. Times are in seconds. Raises ValueError, in words for the operator, for a value that
    cannot work."""

    prefill: tuple[str, ...]
    """Root URLs of the prefill engines, such as `http://10.0.0.1:8100`, or `dns+http://NAME:PORT`."""
    decode: tuple[str, ...]
    """Root URLs of the decode engines."""
    metaserver_url: str
    """The URL of this proxy's metaserver, as decode engines can reach it. They post their tickets there. Without a
    path, it gets `METASERVER_PATH`."""
    connect_timeout: float = 5.0
    """To open a connection to an engine, or to wait for a free one."""
    read_timeout: float = 600.0
    """How long a client may send or read nothing. Also how long an engine may send nothing for a request while it
    computes nothing for any request, by its own metrics."""
    silence_timeout: float = 24 * 3600.0
    """How long an engine may send nothing for a request, even while it computes."""
    prefill_timeout: float | None = None
    """How long a prefill engine that has prompts may serve none of them while its metric of computed tokens does not
    grow; then another engine is asked. Time in the queue of a working engine does not count. It must be longer than the
    longest prompt takes. None: only `read_timeout` applies."""
    probe_timeout: float = 15.0
    """How long an engine may leave a health probe unanswered until its requests fail. A decode engine is probed after
    the same time without a byte, a prefill engine all the time."""
    health_timeout: float = 2.0
    """For an engine's answer to a health check, to a question about its load, and to a probe for `/health`."""
    check_interval: float = 1.0
    """Between two checks of an engine's health and load."""
    eject_after: int = 3
    """Failed health checks in a row that eject an engine: it gets requests only if no other engine is left."""
    return_after: int = 2
    """Good health checks in a row that end an ejection."""
    strategy: str = DEFAULT_STRATEGY
    """The routing strategy, one of `strategies.STRATEGIES`."""
    prefill_attempts: int = 2
    """Failed prefills after which a sample of a prompt fails; 1: no retry. The count covers all tickets of the sample,
    those at earlier decode engines included. A prefill whose KV did not arrive failed, too. A prefill that worked does
    not count: if decode fails by itself, the next attempt needs another prefill. Retries prefer another engine."""
    decode_attempts: int = 2
    """How often one request is sent to decode engines while its client has got nothing; 1: no retry. Retries prefer
    another engine."""
    decode_fallback: bool = True
    """Whether decode is told when no prefill engine is well, so that it computes prompts within its own bound
    (`max_decode_prompt_tokens`). A request whose prefill engines turn out to be gone is sent to decode once more for
    this, beyond `decode_attempts`."""
    max_concurrent: int = 1024
    """Client requests that are served at a time. Further ones wait."""
    max_waiting: int = 32768
    """Client requests that wait. Further ones are answered 429."""
    keep_alive_timeout: float = 3900.0
    """How long a client's connection may be idle between two requests. Gateways close theirs earlier, so they send no
    request on a connection that the proxy closes at that moment."""
    max_per_prefill: int | None = None
    """Prompts at a prefill engine at a time; None: any number."""
    max_per_decode: int | None = None
    """Requests at a decode engine at a time; None: any number."""
    queue_per_engine: int = 1024
    """Requests that wait for a slot at an engine, for each engine that could have one. Further ones are answered 429. A
    request with several prompts or samples counts as one until its first prefill, and then not at all."""
    queue_timeout: float = 1800.0
    """How long a request waits, for `max_concurrent` or for a slot; then it is answered 429. It does not apply to a
    request's prefills after its first one."""
    max_body_bytes: int = 64 * MIB
    """The largest client request. Images are part of it."""
    max_ticket_bytes: int = 16 * MIB
    """The largest ticket. Token ids take about 7 bytes each; block ids take 8 bytes per 128 tokens and cache group. A
    ticket of 1 Mi tokens takes 7 MiB until its prefill ends."""
    metaserver_token_file: str | None = None
    """The file with the bearer token that decode engines must send with tickets."""
    admin_token_file: str | None = None
    """The file with the bearer token of the admin API and the status page. None: no admin API, and an open page."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests from a browser; `*`: all. As vLLM's option of that name."""
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that these pages may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that these pages may send."""
    allow_credentials: bool = False
    """Whether browsers may send cookies and other credentials with these requests."""
    tls: Tls | None = None
    """Certificates of the clients' port. None: plain HTTP."""
    metaserver_apart: bool = False
    """Whether the metaserver has its own port. Then the clients' port does not serve it."""
    metaserver_tls: Tls | None = None
    """Certificates of the metaserver's own port."""
    dns_interval: float = 10.0
    """Between two lookups of the names of `dns+http://` engines."""
    otlp_traces_endpoint: str | None = None
    """The collector that gets the spans of requests, as vLLM's option of that name. None: no spans."""

    def __post_init__(self) -> None:
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if not (urls or self.admin_token_file):
                raise ValueError(
                    f"at least one {role} engine is needed: --{role}, or --admin-token-file to add it while the proxy "
                    "runs"
                )
        self.engines()
        msgspec.structs.force_setattr(self, "metaserver_url", _with_path(self.metaserver_url))
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{option(name)} must be greater than 0")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"{option(name)} must not be less than 0")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"the strategy {self.strategy!r} is none of {', '.join(STRATEGIES)}")
        self._check_tls()
        self.metaserver_token()
        self.admin_token()
        if self.otlp_traces_endpoint is not None:
            check_tracing(self.otlp_traces_endpoint)

    def _check_tls(self) -> None:
        if self.metaserver_tls is not None and not self.metaserver_apart:
            raise ValueError("certificates of the metaserver need a port of its own: --metaserver-port")
        if self.tls is not None and self.tls.client_ca is not None:
            raise ValueError("clients need no certificates: engines check their bearer tokens")
        for tls in (self.tls, self.metaserver_tls):
            if tls is not None:
                tls.check()
        scheme = "http" if (self.metaserver_tls if self.metaserver_apart else self.tls) is None else "https"
        if scheme == "https" and not self.metaserver_url.startswith("https://"):
            raise ValueError(f"the metaserver URL {self.metaserver_url!r} must begin with https://: it is behind TLS")

    def engines(self) -> dict[EngineRole, tuple[str, ...]]:
        """The engines from the command line, by role."""
        lists = {EngineRole.PREFILL: self.prefill, EngineRole.DECODE: self.decode}
        engines = {role: check_engine_urls(role.value, urls) for role, urls in lists.items()}
        if both := sorted({*engines[EngineRole.PREFILL]} & {*engines[EngineRole.DECODE]}):
            raise ValueError(f"{both[0]} is given as a prefill and as a decode engine")
        return engines

    def metaserver_token(self) -> str | None:
        return None if self.metaserver_token_file is None else read_text_secret(self.metaserver_token_file)

    def admin_token(self) -> str | None:
        return None if self.admin_token_file is None else read_text_secret(self.admin_token_file)


def default_metaserver_url(host: str, port: int, tls: Tls | None = None) -> str:
    """The metaserver's URL of a proxy that listens on `host`. Raises ValueError if nobody can connect to `host`."""
    scheme = "http" if tls is None else "https"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{scheme}://{host}:{port}{METASERVER_PATH}"
    if address.is_unspecified:
        raise ValueError(
            f"decode engines cannot connect to {host}: give the proxy's address "
            f"with --metaserver-url {scheme}://ADDRESS:{port}{METASERVER_PATH}"
        )
    authority = f"[{host}]" if address.version == 6 else host
    return f"{scheme}://{authority}:{port}{METASERVER_PATH}"


def _with_path(url: str) -> str:
    """Returns the metaserver's URL with its default path if it has none. Raises ValueError for a URL that every decode
    engine refuses to post to."""
    if not is_http(url):
        raise ValueError(f"the metaserver URL {url!r} is not an http(s) URL")
    if any(character in url for character in "@#?%\\"):
        raise ValueError(f"the metaserver URL {url!r}: give only scheme, host, port and path")
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + METASERVER_PATH


def names(option: str, value: str) -> tuple[str, ...]:
    """The strings of an option that is a JSON list. Raises ValueError."""
    try:
        return msgspec.json.decode(value.encode(), type=tuple[str, ...])
    except msgspec.MsgspecError:
        raise ValueError(f'--{option} must be a JSON list of strings, such as ["*"]') from None
