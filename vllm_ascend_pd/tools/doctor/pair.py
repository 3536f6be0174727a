# SPDX-License-Identifier: Apache-2.0
"""Checks that a running proxy and its prefill and decode engines answer and fit together."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import anyio
import msgspec

from vllm_ascend_pd.core.text import UNREADABLE, one_line
from vllm_ascend_pd.tools.doctor import clock, roles, transports
from vllm_ascend_pd.tools.doctor.finding import Finding, error, note, ok, warning
from vllm_ascend_pd.tools.doctor.http_get import MAX_BODY_BYTES, HttpAnswer, get, server_of
from vllm_ascend_pd.tools.doctor.roles import ServerKind
from vllm_ascend_pd.tools.doctor.stacks import VLLM
from vllm_ascend_pd.tools.doctor.versions import release
from vllm_ascend_pd.transport.http_session import open_session

API_KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's variable with the key of its API server."""

_PATHS = ("/health", "/version", "/v1/models", "/metrics")
_MAX_BYTES = {"/metrics": 16 << 20}
"""An engine's metrics have about 100 KiB per data-parallel rank."""

_AT_ONCE = 16
_CHARS = 200

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class CheckedServer:
    """A server whose URL was given."""

    role: str  # the option: proxy, prefill or decode
    number: int  # among the servers of this role
    url: str
    answers: Mapping[str, HttpAnswer]  # by path

    @property
    def check(self) -> str:
        return f"{self.role}.{self.number}"

    @property
    def named(self) -> str:
        return f"{self.role} {self.url}"


class ServedModel(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[ServedModel]


class _Version(msgspec.Struct, frozen=True):
    version: str


class _ProxyHealth(msgspec.Struct, frozen=True):
    """The answer of `proxy/operate/health.py`: each engine's state by its URL."""

    status: str
    prefill: dict[str, str]
    decode: dict[str, str]


def api_key(environment: Mapping[str, str]) -> str | None:
    """Returns the engines' API key. Raises ValueError, without the key in it, if HTTP cannot send it."""
    key = environment.get(API_KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"{API_KEY_VARIABLE} is not an API key: it has characters that HTTP cannot send")
    return key or None


async def ask(
    urls: Mapping[str, Sequence[str]], environment: Mapping[str, str], trusted: ssl.SSLContext | None = None
) -> list[CheckedServer]:
    """Checks the servers. `urls` are root URLs by role, `trusted` the CAs. Raises ValueError as `api_key` does."""
    key = api_key(environment)
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    session = open_session(headers=headers, ssl_context=trusted)
    servers = [CheckedServer(role, n, url, {}) for role, each in urls.items() for n, url in enumerate(each)]
    answers: dict[tuple[str, int], dict[str, HttpAnswer]] = {(server.role, server.number): {} for server in servers}
    limit = anyio.Semaphore(_AT_ONCE)

    async def fetch(server: CheckedServer, path: str) -> None:
        async with limit:
            answers[server.role, server.number][path] = await get(
                session, server.url + path, _MAX_BYTES.get(path, MAX_BODY_BYTES)
            )

    async with session, anyio.create_task_group() as tasks:
        for server, path in product(servers, _PATHS):
            if (server.role, path) != ("proxy", "/version"):
                tasks.start_soon(fetch, server, path)
    return [CheckedServer(each.role, each.number, each.url, answers[each.role, each.number]) for each in servers]


def judge(servers: Sequence[CheckedServer]) -> list[Finding]:
    engines = [server for server in servers if server.role != "proxy"]
    offsets = {server.check: _offset(server) for server in servers}
    used = _used(servers)
    findings = []
    for server in servers:
        findings.append(_health(server))
        if server.answers["/health"].status == 0:
            continue
        findings.append(_role(server, used.get(server_of(server.url), set())))
        findings += [] if server.role == "proxy" else [_version(server)]
        findings.append(_models_of(server))
        what = f"clock of {server.named} against this host's"
        findings.append(clock.judge(f"{server.check}.clock", what, offsets[server.check]))
        if server.role == "proxy" and ServerKind.PROXY in _kinds(server):
            findings += _proxied(server, engines)
    return [*findings, *_versions(engines), *_models(servers), *_transports(engines), *_clocks(engines, offsets)]


def _health(server: CheckedServer) -> Finding:
    check, answer = f"{server.check}.health", server.answers["/health"]
    if answer.status == 0:
        action = "check that it runs, its --host and --port, and that nothing filters the connection from here"
        if "CERTIFICATE_VERIFY_FAILED" in answer.problem:
            action = "name its authority with --ca-file; if that is right, the certificate is wrong or another host's"
        return error(check, f"{server.named} {answer.problem}", action)
    if answer.status == 200:
        return ok(check, f"{server.named} is healthy, in {answer.received - answer.sent:.3f} s")
    if server.role == "proxy":
        action = "see what it says of each engine, and why those are not healthy"
    else:
        action = "its log says why; an engine whose core has died must be started again"
    return error(check, f"{server.named} answers /health with {answer.status}", action)


def _kinds(server: CheckedServer) -> frozenset[ServerKind]:
    """Returns what the server is, as far as its metrics show it."""
    answer = server.answers["/metrics"]
    found = roles.kinds(answer.body) if answer.status == 200 else frozenset()
    return found | {ServerKind.PROXY} if _decoded(server, "/health", _ProxyHealth) is not None else found


def _used(servers: Sequence[CheckedServer]) -> dict[tuple[str, str, int | None], set[ServerKind]]:
    """Returns the roles in which the proxies use an engine, by `server_of` its URL."""
    used: dict[tuple[str, str, int | None], set[ServerKind]] = {}
    for server in servers:
        health = _decoded(server, "/health", _ProxyHealth)
        for kind, urls in (
            () if health is None else ((ServerKind.PREFILL, health.prefill), (ServerKind.DECODE, health.decode))
        ):
            for url in urls:
                used.setdefault(server_of(url), set()).add(kind)
    return used


def _role(server: CheckedServer, used: set[ServerKind]) -> Finding:
    check, given, found = f"{server.check}.role", ServerKind(server.role), _kinds(server)
    if given is ServerKind.PROXY and not found and server.answers["/health"].status == 200:
        return roles.judge_no_proxy(check, server.url)
    replaced = roles.offloads(server.answers["/metrics"].body)
    return roles.judge(check, server.url, given, found, _why(server, "/metrics", "has none of vLLM's"), used, replaced)


def _version(server: CheckedServer) -> Finding:
    check = f"{server.check}.version"
    version = _decoded(server, "/version", _Version)
    if version is None:
        return note(check, f"{server.named} does not report its version ({_why(server, '/version')})")
    if release(version.version) not in VLLM:
        found = (
            f"{server.named} is vLLM {one_line(version.version, 80)}, but this package supports {' and '.join(VLLM)}"
        )
        return warning(
            check, found, "run engines of a version that it knows, with `vllm-ascend-pd doctor` on their hosts"
        )
    return ok(check, f"{server.named} is vLLM {version.version}", version=version.version)


def _models_of(server: CheckedServer) -> Finding:
    check = f"{server.check}.models"
    models = _decoded(server, "/v1/models", _Models)
    if models is None or not models.data:
        answer = server.answers["/v1/models"]
        action = f"set {API_KEY_VARIABLE} to the engines' API key" if answer.status == 401 else "its log says why"
        return error(check, f"{server.named} names no model ({_why(server, '/v1/models')})", action)
    return ok(check, f"{server.named} serves {_names(models)}")


def _proxied(proxy: CheckedServer, engines: Sequence[CheckedServer]) -> list[Finding]:
    """Checks the proxy's list of engines: their state, and whether the given engines are in it."""
    check = f"{proxy.check}.engines"
    health = _decoded(proxy, "/health", _ProxyHealth)
    if health is None:
        return [note(check, f"{proxy.named} does not list its engines ({_why(proxy, '/health', 'is not as its')})")]
    findings = []
    everything = {server_of(url) for url in (*health.prefill, *health.decode)}
    for role, states in (("prefill", health.prefill), ("decode", health.decode)):
        for url, state in states.items():
            if state != "ok":
                found = f"{proxy.named} finds {role} {one_line(url, _CHARS)}: {one_line(state, _CHARS)}"
                findings.append(error(check, found, "check that engine, and the network from the proxy's host to it"))
        used = {server_of(url) for url in states}
        for engine in engines:
            if engine.role != role or server_of(engine.url) in used:
                continue
            if server_of(engine.url) not in everything:
                listed = one_line(", ".join(states) or "none", _CHARS)
                found = f"{proxy.named} does not use {engine.named}, but {listed}"
                action = "start the proxy with its URL, or ignore this if it has another address there"
                findings.append(warning(check, found, action))
            elif ServerKind(role) in _kinds(engine):  # else its own role is the finding
                found = f"{proxy.named} uses {engine.named} for the other role, not for {role}"
                findings.append(error(check, found, "correct the proxy's --prefill and --decode"))
    count = len(health.prefill) + len(health.decode)
    return findings or [ok(check, f"{proxy.named} finds all {count} engines healthy", engines=count)]


def _versions(engines: Sequence[CheckedServer]) -> list[Finding]:
    versions = {e.named: v.version for e in engines if (v := _decoded(e, "/version", _Version)) is not None}
    if len(set(map(release, versions.values()))) > 1:
        listed = one_line("; ".join(f"{name}: {version}" for name, version in versions.items()), 2 * _CHARS)
        action = "run the same vLLM on both sides: others describe KV caches differently"
        return [warning("pair.versions", f"engines run different versions of vLLM: {listed}", action)]
    return [ok("pair.versions", "all engines run the same version of vLLM")] if len(versions) > 1 else []


def _models(servers: Sequence[CheckedServer]) -> list[Finding]:
    """Checks that all engines serve the same models with the same context length."""
    models = {server: found for server in servers if (found := _decoded(server, "/v1/models", _Models)) is not None}
    if len(models) < 2:
        return []
    if len({frozenset(model.id for model in found.data) for found in models.values()}) > 1:
        listed = one_line("; ".join(f"{s.named}: {_names(found)}" for s, found in models.items()), 2 * _CHARS)
        action = "serve the same model, and adapters, under the same names everywhere (--served-model-name)"
        return [error("pair.models", f"the engines serve different models: {listed}", action)]
    findings = [ok("pair.models", "all engines serve the same models")]
    lengths = {s.named: m.max_model_len for s, found in models.items() for m in found.data[:1] if s.role != "proxy"}
    if len(set(lengths.values()) - {None}) > 1:
        listed = one_line("; ".join(f"{name}: {length}" for name, length in lengths.items()), 2 * _CHARS)
        action = "give all engines the same --max-model-len: a prompt that only one side takes fails"
        findings.append(warning("pair.max-model-len", f"context lengths differ: {listed}", action))
    return findings


def _transports(engines: Sequence[CheckedServer]) -> list[Finding]:
    """Compares each prefill engine's transport with each decode engine's."""
    known = [each for each in engines if ServerKind(each.role) in _kinds(each)]
    said = {each: transports.read(each.answers["/metrics"].body) for each in known}
    findings = []
    for one, other in product(known, known):
        if (one.role, other.role) == ("prefill", "decode"):
            check = f"pair.transport.{one.number}.{other.number}"
            findings.append(transports.judge(check, {one.named: said[one], other.named: said[other]}))
    return findings


def _clocks(engines: Sequence[CheckedServer], offsets: Mapping[str, clock.OffsetRange | None]) -> list[Finding]:
    """Compares the clocks of prefill and decode hosts, which signed tickets depend on."""
    findings = []
    prefills, decodes = ([e for e in engines if e.role == role] for role in ("prefill", "decode"))
    for one, other in product(prefills, decodes):
        first, second = offsets[one.check], offsets[other.check]
        if first is not None and second is not None:
            what = f"clock of {one.named} against that of {other.named}"
            findings.append(clock.judge(f"pair.clock.{one.number}.{other.number}", what, clock.between(first, second)))
    return findings


def _offset(server: CheckedServer) -> clock.OffsetRange | None:
    answer = server.answers["/health"]
    return None if answer.date is None else clock.offset(answer.date, answer.sent, answer.received)


def _decoded(server: CheckedServer, path: str, kind: type[_T]) -> _T | None:
    answer = server.answers[path]
    if answer.status not in (200, 503):  # our proxy's /health has a body with both
        return None
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except UNREADABLE:
        return None


def _why(server: CheckedServer, path: str, otherwise: str = "is not as vLLM's") -> str:
    answer = server.answers[path]
    return answer.problem or (f"{path} answers {answer.status}" if answer.status != 200 else f"{path} {otherwise}")


def _names(models: _Models) -> str:
    return one_line(", ".join(model.id for model in models.data), _CHARS)
