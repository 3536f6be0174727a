# SPDX-License-Identifier: Apache-2.0
"""What the operator chooses, checked once."""

from __future__ import annotations

import ipaddress

import msgspec

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.core.signing import Secret
from vllm_ascend_pd.proxy.http.tls import Tls
from vllm_ascend_pd.proxy.operate.tracing import check_tracing
from vllm_ascend_pd.proxy.routing.addresses import check_engine_urls, is_http
from vllm_ascend_pd.proxy.routing.balance import DEFAULT_STRATEGY, STRATEGIES
from vllm_ascend_pd.proxy.routing.engines_file import read_engines
from vllm_ascend_pd.proxy.routing.registry import EngineRole
from vllm_ascend_pd.transport.secret_files import read_text_secret, read_ticket_secret

MIB = 1024 * 1024


def _option(name: str) -> str:
    """The option of `vllm-ascend-pd proxy` that a setting comes from."""
    return "--" + name.replace("max_body_bytes", "max_body_mib").replace("_", "-")


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ValueError, in words meant for the operator, when a value cannot work."""

    prefill: tuple[str, ...]
    """Root URLs of the prefill engines, such as `http://10.0.0.1:8100`, or `dns+http://NAME:PORT`."""
    decode: tuple[str, ...]
    """Root URLs of the decode engines."""
    metaserver_url: str
    """Where decode engines post their tickets: this proxy, as they can reach it."""
    connect_timeout: float = 5.0
    """Seconds to open a connection to an engine, or to wait for a free one."""
    read_timeout: float = 600.0
    """Seconds a client that sends or reads may stay silent. As long after the last byte of an engine, a request there
    has failed if the engine computed nothing for anybody, by its own metrics."""
    silence_timeout: float = 24 * 3600.0
    """Seconds after the last byte of an engine when a request there has failed, even if the engine computes."""
    prefill_timeout: float | None = None
    """Seconds that a prefill engine with prompts may serve none of them, with a count of tokens in its metrics that
    does not grow. Time in the queue of an engine that works does not count. None: `read_timeout` alone counts. Shorter,
    it leaves time for another attempt; it must be longer than the longest prompt takes."""
    probe_timeout: float = 15.0
    """Seconds without an answer to a health probe after which an engine's requests are taken away from it. A decode
    engine is probed after as many seconds without a byte, a prefill engine all the time."""
    health_timeout: float = 2.0
    """Seconds an engine has to answer a health check, one at `/health` included, or a question about its load."""
    check_interval: float = 1.0
    """Seconds between two checks of an engine: of its health and its load."""
    eject_after: int = 3
    """Failed health checks in a row after which an engine gets requests only if no other is left."""
    return_after: int = 2
    """Good ones in a row after which it does again."""
    strategy: str = DEFAULT_STRATEGY
    """Who gets a request: one of `balance.STRATEGIES`."""
    prefill_attempts: int = 2
    """Prefills of one sample of a prompt, over all its tickets, those of the same request at an earlier decode engine
    included; 1: no retry. Each goes to another engine where there is one. One whose KV did not come has failed, too;
    one that worked does not count, should decode fail by itself: the next one needs its own."""
    decode_attempts: int = 2
    """Times that one request goes to a decode engine, as long as nothing was sent to the client; 1: no retry. Each
    goes to another engine where there is one."""
    max_concurrent: int = 1024
    """Client requests that are served at a time; others wait."""
    max_waiting: int = 32768
    """Client requests that wait until fewer are served; further ones are answered 429."""
    keep_alive_timeout: float = 3900.0
    """Seconds that a connection from outside may be idle between two requests: longer than gateways keep theirs, so
    that no request goes into a connection that is just being closed."""
    max_per_prefill: int | None = None
    """Prompts at a prefill engine at a time; None: any number."""
    max_per_decode: int | None = None
    """Requests at a decode engine at a time; None: any number."""
    queue_per_engine: int = 1024
    """Requests that wait for a place, for each engine that could have one; further ones are answered 429. One with
    several prompts or samples is one until its first prefill, and then none."""
    queue_timeout: float = 1800.0
    """Seconds that a request waits in either line; then it is answered 429. Not for the prefills of a request after its
    first."""
    max_body_bytes: int = 64 * MIB
    """Largest client request: images travel inside it."""
    max_ticket_bytes: int = 16 * MIB
    """Largest ticket: its token ids take about 7 bytes each, its block ids 8 bytes per 128 tokens and cache group. One
    of 1 Mi tokens takes 7 MiB, for as long as it is prefilled."""
    ticket_secret_file: str | None = None
    """The cluster's ticket secret: signs a ticket that is tried again under another attempt."""
    metaserver_token_file: str | None = None
    """The bearer token that decode engines must send with their tickets."""
    admin_token_file: str | None = None
    """The bearer token of the admin API and the status page. None: there is no admin API, and the page is open."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests from a browser; `*`: all. This and what follows are as vLLM's options."""
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that they may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that they may send."""
    allow_credentials: bool = False
    """Whether browsers may send cookies and the like along."""
    engines_file: str | None = None
    """A YAML file that lists more engines, read again when it changes."""
    tls: Tls | None = None
    """Of the port for clients. None: plain HTTP."""
    metaserver_apart: bool = False
    """The metaserver has a port of its own; the one for clients does not have it then."""
    metaserver_tls: Tls | None = None
    """Of that port."""
    dns_interval: float = 10.0
    """Seconds between lookups of the names of `dns+http://` engines."""
    otlp_traces_endpoint: str | None = None
    """The collector that spans of requests are sent to, as vLLM's option of that name. None: there are no spans."""

    def __post_init__(self) -> None:
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if not (urls or self.engines_file or self.admin_token_file):
                raise ValueError(
                    f"at least one {role} engine is needed: --{role} or --engines-file, or --admin-token-file to add "
                    "it while the proxy runs"
                )
        self.engines()
        if self.engines_file is not None:
            try:
                read_engines(self.engines_file)
            except ValueError as error:
                raise ValueError(f"the engines file {self.engines_file} cannot be used: {error}") from None
        if not is_http(self.metaserver_url):
            raise ValueError(f"the metaserver URL {self.metaserver_url!r} is not an http(s) URL")
        for name in (
            "connect_timeout",
            "read_timeout",
            "silence_timeout",
            "prefill_timeout",
            "probe_timeout",
            "health_timeout",
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
            "max_ticket_bytes",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{_option(name)} must be greater than 0")
        for name in ("queue_per_engine", "max_waiting"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_option(name)} must not be less than 0")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"the strategy {self.strategy!r} is none of {', '.join(STRATEGIES)}")
        self._check_tls()
        self.ticket_secret()
        self.metaserver_token()
        self.admin_token()
        if self.otlp_traces_endpoint is not None:
            check_tracing(self.otlp_traces_endpoint)

    def _check_tls(self) -> None:
        if self.metaserver_tls is not None and not self.metaserver_apart:
            raise ValueError("certificates of the metaserver's own need a port of its own: --metaserver-port")
        if self.tls is not None and self.tls.client_ca is not None:
            raise ValueError("clients are told apart by their bearer tokens: engines check those, the proxy no client")
        for tls in (self.tls, self.metaserver_tls):
            if tls is not None:
                tls.check()
        scheme = "http" if (self.metaserver_tls if self.metaserver_apart else self.tls) is None else "https"
        if scheme == "https" and not self.metaserver_url.startswith("https://"):
            raise ValueError(f"the metaserver URL {self.metaserver_url!r} must begin with https://: it is behind TLS")

    def engines(self) -> dict[EngineRole, tuple[str, ...]]:
        """Those that the command line lists."""
        lists = {EngineRole.PREFILL: self.prefill, EngineRole.DECODE: self.decode}
        engines = {role: check_engine_urls(role.value, urls) for role, urls in lists.items()}
        if both := sorted({*engines[EngineRole.PREFILL]} & {*engines[EngineRole.DECODE]}):
            raise ValueError(f"{both[0]} is given as a prefill and as a decode engine")
        return engines

    def ticket_secret(self) -> Secret | None:
        return None if self.ticket_secret_file is None else read_ticket_secret(self.ticket_secret_file)

    def metaserver_token(self) -> str | None:
        return None if self.metaserver_token_file is None else read_text_secret(self.metaserver_token_file)

    def admin_token(self) -> str | None:
        return None if self.admin_token_file is None else read_text_secret(self.admin_token_file)


def default_metaserver_url(host: str, port: int, tls: Tls | None = None) -> str:
    """The metaserver's URL of a proxy that listens on `host`: only right if engines can reach that address."""
    scheme = "http" if tls is None else "https"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{scheme}://{host}:{port}{METASERVER_PATH}"
    if address.is_unspecified:
        raise ValueError(
            f"decode engines cannot reach {host}: say where they find this proxy, "
            f"with --metaserver-url {scheme}://ADDRESS:{port}{METASERVER_PATH}"
        )
    authority = f"[{host}]" if address.version == 6 else host
    return f"{scheme}://{authority}:{port}{METASERVER_PATH}"


def names(option: str, value: str) -> tuple[str, ...]:
    """An option's JSON list of strings. Raises ValueError."""
    try:
        return msgspec.json.decode(value.encode(), type=tuple[str, ...])
    except msgspec.MsgspecError:
        raise ValueError(f'--{option} must be a JSON list of strings, such as ["*"]') from None
