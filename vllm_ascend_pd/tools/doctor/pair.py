# SPDX-License-Identifier: Apache-2.0
"""Checks that a running proxy and its prefill and decode engines answer and fit together.

Each server is asked for a few pages, all of them untrusted. What a server is follows from its metrics: each role has
its own (`observe/stats.py`, `proxy/rendezvous/observer.py`), all there from the start.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Annotated, TypeVar

import httpx
import msgspec

from vllm_ascend_pd.core.hosts import is_loopback
from vllm_ascend_pd.core.reasons import WRONG_KV
from vllm_ascend_pd.core.signing import CLOCK_SKEW_S
from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.observe.stats import PREFIX, PUSHED_BYTES, TICKET_TO_READY_SECONDS, VERIFIED
from vllm_ascend_pd.tools.doctor.report import Finding, Level, error, finding, note, ok, warning
from vllm_ascend_pd.tools.vllm_names import KV_ROLES, REPLACES_CONNECTOR
from vllm_ascend_pd.transport.http_client import (
    HTTP_FAILURES,
    describe,
    innermost,
    open_client,
    parse_url,
    read_at_most,
)

API_KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's variable with the key of its API server."""

PROXY_PREFIX = PREFIX + "proxy_"
TIMEOUT_S = 5.0

_MAX_BYTES = {"/health": 1 << 20, "/v1/models": 1 << 20, "/metrics": 16 << 20}
"""Pages that servers are asked for, and how much of them is read. Metrics have about 100 KiB per data-parallel rank."""

_AT_ONCE = 16
_MAX_SKEW_S = CLOCK_SKEW_S / 2
"""From this host's clock. Of two clocks that are too far apart, one is further from it than half of that."""

_T = TypeVar("_T")


NAMED = {
    "proxy": "`vllm-ascend-pd proxy`",
    "prefill": "a prefill engine",
    "decode": "a decode engine",
    "other": "a vLLM engine without this package's connector",
}
"""What a server can be, and its name in findings. The first three are options, too."""


@dataclass(frozen=True)
class HttpAnswer:
    """An HTTP answer. Without one, `status` is 0 and `problem` says why. `sent` and `received` are unix seconds."""

    status: int
    body: bytes
    date: str | None
    sent: float
    received: float
    problem: str = ""


@dataclass(frozen=True, eq=False)
class CheckedServer:
    """A server whose URL was given, with its answers by path."""

    given: str  # the option: proxy, prefill or decode
    number: int  # among the servers of this option
    url: str
    answers: Mapping[str, HttpAnswer]

    @property
    def check(self) -> str:
        return f"{self.given}.{self.number}"

    @property
    def named(self) -> str:
        return f"{self.given} {self.url}"

    def decoded(self, path: str, kind: type[_T]) -> _T | None:
        """Returns None for an answer that is none of this kind."""
        answer = self.answers[path]
        if answer.status not in (200, 503):  # our proxy's /health has a body with both
            return None
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except UNREADABLE:
            return None

    def why(self, path: str, otherwise: str = "is not as vLLM's") -> str:
        """Why an answer could not be used."""
        answer = self.answers[path]
        return answer.problem or f"{path} {otherwise if answer.status == 200 else f'answers {answer.status}'}"


class ServedModel(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: Annotated[list[ServedModel], msgspec.Meta(min_length=1)]

    def __str__(self) -> str:
        return ", ".join(model.id for model in self.data)


class _ProxyHealth(msgspec.Struct, frozen=True):
    """The answer of the proxy's `/health` (`proxy/operate/status.py`): each engine's state by its URL."""

    status: str
    prefill: dict[str, str]
    decode: dict[str, str]


def root_url(option: str, text: str) -> str:
    """Returns `text` without a slash at its end. Raises ValueError if it is not the root URL of an HTTP server.

    The error is without the text, which may hold a password.
    """
    try:
        parsed = parse_url(text)
    except ValueError as problem:
        raise ValueError(f"--{option}: {problem}; it must be a URL such as http://10.0.0.1:8100") from None
    if parsed.path not in ("", "/"):
        raise ValueError(f"--{option}: give only scheme, host and port of the URL, without a path")
    return text.rstrip("/")


def server_of(url: str) -> tuple[str, str, int]:
    """Returns scheme, host and port, in which two URLs of one server are alike however they are written."""
    try:
        parsed = parse_url(url)
    except ValueError:  # servers say what they like
        return "", url, 0
    return parsed.scheme, "localhost" if is_loopback(parsed.host) else parsed.host, parsed.port


def api_key(environment: Mapping[str, str]) -> str | None:
    """Returns the engines' API key. Raises ValueError, without the key in it, if HTTP cannot send it."""
    key = environment.get(API_KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"{API_KEY_VARIABLE} is not an API key: it has characters that HTTP cannot send")
    return key or None


async def ask(urls: Mapping[str, Sequence[str]], key: str | None) -> list[CheckedServer]:
    """Asks the servers at these root URLs. Trusts this host's CAs, or those of SSL_CERT_FILE, which OpenSSL reads."""
    limit, trusted = asyncio.Semaphore(_AT_ONCE), ssl.create_default_context()
    async with open_client(httpx.Limits(), httpx.Timeout(None), max(_MAX_BYTES.values()), trusted) as client:
        client.headers["Accept-Encoding"] = "identity"
        if key is not None:
            client.headers["Authorization"] = f"Bearer {key}"

        async def get(url: str, path: str) -> HttpAnswer:
            async with limit:
                return await _answer(client, url + path, _MAX_BYTES[path])

        async def ask_one(given: str, number: int, url: str) -> CheckedServer:
            answers = await asyncio.gather(*(get(url, path) for path in _MAX_BYTES))
            return CheckedServer(given, number, url, dict(zip(_MAX_BYTES, answers, strict=True)))

        servers = [(given, number, url) for given, each in urls.items() for number, url in enumerate(each)]
        return await asyncio.gather(*(ask_one(*server) for server in servers))


async def _answer(client: httpx.AsyncClient, url: str, max_bytes: int) -> HttpAnswer:
    """Never raises for what a server does."""
    sent = time.time()
    try:
        async with asyncio.timeout(TIMEOUT_S), client.stream("GET", url) as response:
            body = await read_at_most(response, max_bytes)
        return HttpAnswer(response.status_code, body, response.headers.get("date"), sent, time.time())
    except TimeoutError:
        problem = f"did not answer within {TIMEOUT_S:g} s"
    except httpx.ConnectError as failure:
        refused = isinstance(innermost(failure), ConnectionRefusedError)
        problem = f"cannot be connected to: {'Connection refused' if refused else describe(failure)}"
    except HTTP_FAILURES as failure:
        problem = f"broke off: {describe(failure)}"
    return HttpAnswer(0, b"", None, sent, time.time(), problem)


def judge(servers: Sequence[CheckedServer]) -> list[Finding]:
    engines = [server for server in servers if server.given != "proxy"]
    healths = [health for server in servers if (health := server.decoded("/health", _ProxyHealth)) is not None]
    behind_a_proxy = {server_of(url) for health in healths for url in (*health.prefill, *health.decode)}
    findings = []
    for server in servers:
        findings.append(_judge_health(server))
        if server.answers["/health"].status == 0:
            continue
        findings.append(_judge_role(server, server_of(server.url) in behind_a_proxy))
        findings.append(_judge_models(server))
        if server.given == "proxy" and kind_of(server) == "proxy":
            findings += _judge_engines_of(server, engines)
        findings += _judge_kv(server) + _judge_clock(server)
    return [*findings, *_compare_servers(servers, engines)]


def _judge_health(server: CheckedServer) -> Finding:
    check, answer = f"{server.check}.health", server.answers["/health"]
    if answer.status == 0:
        action = "check that it runs, its --host and --port, and that nothing filters the connection from here"
        if "CERTIFICATE_VERIFY_FAILED" in answer.problem:
            action = "name its authority's file in SSL_CERT_FILE; else the certificate is wrong or another host's"
        return error(check, f"{server.named} {answer.problem}", action)
    if answer.status == 200:
        return ok(check, f"{server.named} is healthy, in {answer.received - answer.sent:.3f} s")
    action = "its log says why; an engine whose core has died must be started again"
    return error(check, f"{server.named} answers /health with {answer.status}", action)


_OWN_METRICS = {
    "proxy": PROXY_PREFIX,
    "prefill": PREFIX + PUSHED_BYTES.name,
    "decode": PREFIX + TICKET_TO_READY_SECONDS.name,
}
"""How names of metrics begin that only this kind of server has."""
_NAMES = re.compile(r"^(?:# TYPE )?(vllm:\w+)", re.MULTILINE)
_OFFLOADS = re.compile(rb'^vllm:cache_config_info\{.*\bkv_offloading_size="(?!None")', re.MULTILINE)
"""vLLM's metric with all settings of its KV cache as labels."""


def kind_by_metrics(metrics: bytes) -> str | None:
    """Returns the kind of server that has such metrics, None if they do not show it."""
    names = set(_NAMES.findall(metrics.decode(errors="replace")))
    for kind, own in _OWN_METRICS.items():
        if any(name.startswith(own) for name in names):
            return kind
    return "other" if names and not any(name.startswith(PREFIX) for name in names) else None


def kind_of(server: CheckedServer) -> str | None:
    if server.decoded("/health", _ProxyHealth) is not None:
        return "proxy"
    answer = server.answers["/metrics"]
    return kind_by_metrics(answer.body) if answer.status == 200 else None


def _judge_role(server: CheckedServer, behind_a_proxy: bool) -> Finding:
    """Judges whether a server is what it was given as. `behind_a_proxy`: a given proxy uses it."""
    check, given, kind = f"{server.check}.role", server.given, kind_of(server)
    if kind == given:
        return ok(check, f"{server.url} is {NAMED[given]}")
    said = f"{server.url} is given as --{given}, and "
    if kind in (None, "other") and given == "proxy" and server.answers["/health"].status == 200:
        found = f"{said}{'its /health and /metrics are not its' if kind is None else f'is {NAMED[kind]}'}"
        return error(check, found, f"give the URL of {NAMED[given]} itself, not of a server in front of it")
    if kind is None:
        why = server.why("/metrics", "has none of vLLM's")
        found = f"cannot tell whether {server.url} is {NAMED[given]}: {why}"
        return note(check, found, "engines started with --disable-log-stats have no metrics: else check the URL")
    said += f"is {NAMED[kind]}"
    start = f"start it with this connector and kv_role {KV_ROLES.get(given)} (--kv-transfer-config)"
    if kind != "other":
        action = f"give it as --{kind}, and the URL of {NAMED[given]} as --{given}"
        both_engines = kind in KV_ROLES and given in KV_ROLES
        return error(check, said, f"{action}; if it is to be {NAMED[given]}, {start}" if both_engines else action)
    if _OFFLOADS.search(server.answers["/metrics"].body):
        said += f". It was started with --{REPLACES_CONNECTOR}, with which vLLM replaces its connector"
        action = "start it without; to offload, too, list OffloadingConnector beside this one in a MultiConnector"
        return error(check, said, action)
    if behind_a_proxy:
        return warning(check, said, f"{start}; not if both sides have vllm-ascend's layerwise connector")
    return error(check, said, f"{start}, or give another URL")


def _judge_models(server: CheckedServer) -> Finding:
    check, models = f"{server.check}.models", server.decoded("/v1/models", _Models)
    if models is not None:
        return ok(check, f"{server.named} serves {models}")
    denied = server.answers["/v1/models"].status == 401
    action = f"set {API_KEY_VARIABLE} to the engines' API key" if denied else "its log says why"
    return error(check, f"{server.named} names no model ({server.why('/v1/models')})", action)


def _judge_engines_of(proxy: CheckedServer, engines: Sequence[CheckedServer]) -> list[Finding]:
    """Checks the proxy's list of engines: their state, and whether the given engines are in it."""
    check, health = f"{proxy.check}.engines", proxy.decoded("/health", _ProxyHealth)
    if health is None:
        return [note(check, f"{proxy.named} does not list its engines ({proxy.why('/health', 'is not as its')})")]
    findings = []
    used = {"prefill": health.prefill, "decode": health.decode}
    for role, states in used.items():
        for url, state in states.items():
            if state != "healthy":
                found = f"{proxy.named} finds {role} {url}: {state}"
                findings.append(error(check, found, "check that engine, and the network from the proxy's host to it"))
    for engine in engines:
        roles = [role for role, urls in used.items() if server_of(engine.url) in map(server_of, urls)]
        if not roles:
            found = f"{proxy.named} does not use {engine.named}"
            action = "start the proxy with its URL, or ignore this if it has another address there"
            findings.append(warning(check, found, action))
            continue
        kind = kind_of(engine)
        right = kind if kind in used else engine.given
        if right not in roles:
            found = f"{proxy.named} uses {engine.url} as {NAMED[roles[0]]}, not as {NAMED[right]}"
            findings.append(error(check, found, "correct its --prefill and --decode"))
    count = len(health.prefill) + len(health.decode)
    return findings or [ok(check, f"{proxy.named} finds all {count} engines healthy", engines=count)]


def _compare_servers(servers: Sequence[CheckedServer], engines: Sequence[CheckedServer]) -> list[Finding]:
    models = {server: models for server in servers if (models := server.decoded("/v1/models", _Models)) is not None}
    lengths = {server.named: each.data[0].max_model_len for server, each in models.items() if server in engines}
    names = {server.named: ", ".join(sorted(model.id for model in each.data)) for server, each in models.items()}
    same_models = "serve the same under the same names everywhere (--served-model-name)"
    return [
        *_compare("models", names, Level.ERROR, same_models),
        *_compare("max-model-len", lengths, Level.WARNING, "a prompt that only one side takes fails"),
    ]


def _compare(what: str, values: Mapping[str, object], level: Level, action: str) -> list[Finding]:
    """`values`: of each server, by its name."""
    listed = "; ".join(f"{server}: {value}" for server, value in values.items())
    if len(set(values.values())) > 1:
        return [finding(level, f"pair.{what}", f"the {what} differ: {listed}", action)]
    return [ok(f"pair.{what}", f"all servers have the same {what}")] if len(values) > 1 else []


_WRONG_KV = re.compile(
    rb'^%s_total\{.*\bresult="(?:%s)".*\} (\d{1,9}(?:\.\d+)?(?:e\+\d\d)?)$'
    % ((PREFIX + VERIFIED.name).encode(), "|".join(WRONG_KV).encode()),
    re.MULTILINE,
)


def _judge_kv(server: CheckedServer) -> list[Finding]:
    """Tells what `verify_kv` has found on the server's ranks."""
    times = sum(map(float, _WRONG_KV.findall(server.answers["/metrics"].body)))
    found, action = f"{server.named} has had wrong KV {times:g} times", "its log says who wrote it: see docs/garbled.md"
    return [error(f"{server.check}.kv", found, action, times=times)] if times else []


def _judge_clock(server: CheckedServer) -> list[Finding]:
    """Compares the clock of the server's host with this host's. A Date is a whole second, and one or two old."""
    answer = server.answers["/health"]
    try:
        ahead = parsedate_to_datetime(answer.date or "").timestamp() - answer.received
    except (ValueError, TypeError, OverflowError):
        return []
    if abs(ahead) <= _MAX_SKEW_S:
        return []
    found = f"the clock of {server.named} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this host's"
    action = f"synchronise the hosts' clocks (chrony, ntpd): signed tickets are refused beyond {CLOCK_SKEW_S} s"
    return [error(f"{server.check}.clock", found, action, seconds=round(ahead, 3))]
