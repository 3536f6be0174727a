# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdicts about a running pair."""

import dataclasses
import json
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.observe.stats import DECODE_METRICS, PREFILL_METRICS, PREFIX, Metric
from vllm_ascend_pd.proxy.rendezvous import observer
from vllm_ascend_pd.tools.doctor.pair import (
    PROXY_PREFIX,
    CheckedServer,
    HttpAnswer,
    judge,
    root_url,
    server_of,
)
from vllm_ascend_pd.tools.doctor.report import Level

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://LOCALHOST:8100", "http://127.0.0.1:8100", True),
        ("http://localhost:8100", "http://[::1]:8100/", True),
        ("http://Node-1", "http://node-1:80", True),
        ("http://[fd00::01]:1", "http://[FD00::1]:1", True),
        ("http://localhost:8100", "http://localhost:8101", False),
        ("http://localhost:80", "https://localhost:80", False),
        ("http://127.0.0.1:8100", "http://10.0.0.1:8100", False),
        ("http://[", "http://]", False),
    ],
)
def test_which_urls_are_of_one_server(one: str, other: str, same: bool) -> None:
    assert (server_of(one) == server_of(other)) is same


@pytest.mark.parametrize(
    "url", ["p:1", "ftp://p:1", "http://p:x", "http://p:1/v1", "http://user:pw@p:1", "http://[", "http://\udcff:1"]
)
def test_urls(url: str) -> None:
    with pytest.raises(ValueError, match=r"--proxy: .*URL") as raised:
        root_url("proxy", url)
    assert "pw" not in str(raised.value)
    assert root_url("proxy", "http://10.0.0.1:8100/") == "http://10.0.0.1:8100"


def answer(body: Any = None, status: int = 200, skew: float = 0.0) -> HttpAnswer:
    content = b"" if body is None else json.dumps(body).encode()
    return HttpAnswer(status, content, formatdate(int(NOW + skew), usegmt=True), NOW, NOW + 0.01)


def metrics(*names: str) -> HttpAnswer:
    text = "".join(f'# HELP {name} x\n# TYPE {name} counter\n{name}{{engine="0"}} 0.0\n' for name in names)
    return HttpAnswer(200, text.encode(), answer().date, NOW, NOW + 0.01)


def of_engine(known: tuple[Metric, ...]) -> HttpAnswer:
    return metrics("vllm:num_requests_running", *(PREFIX + metric.name for metric in known))


METRICS = {
    "prefill": of_engine(PREFILL_METRICS),
    "decode": of_engine(DECODE_METRICS),
    "proxy": metrics("vllm:kv_pd_proxy_requests_in_flight", "vllm:kv_pd_proxy_prefill_seconds_count"),
    "other": metrics("vllm:num_requests_running", "vllm:request_prefill_time_seconds_count"),
}


GONE = HttpAnswer(0, b"", None, NOW, NOW, "cannot be connected to: refused")


def engine(role: str = "prefill", model: str = "m", length: int = 4096, skew: float = 0) -> CheckedServer:
    models = {"object": "list", "data": [{"id": model, "max_model_len": length}]}
    answers = {
        "/health": answer(skew=skew),
        "/v1/models": answer(models),
        "/metrics": METRICS[role],
    }
    return CheckedServer(role, 0, f"http://{role}:1", answers)


def proxy(state: str = "healthy", prefill: str = "http://prefill:1") -> CheckedServer:
    body = {"status": "ok", "prefill": {prefill: "healthy"}, "decode": {"http://decode:1": state}, "problems": []}
    answers = {
        "/health": answer(body, 200 if state == "healthy" else 503),
        "/v1/models": engine().answers["/v1/models"],
        "/metrics": METRICS["proxy"],
    }
    return CheckedServer("proxy", 0, "http://proxy:1", answers)


def levels(*servers: CheckedServer) -> dict[str, Level]:
    """Those that are not ok."""
    return {finding.check: finding.level for finding in judge(servers) if finding.level is not Level.OK}


def changed(server: CheckedServer, path: str, other: HttpAnswer) -> CheckedServer:
    return CheckedServer(server.given, server.number, server.url, {**server.answers, path: other})


def test_a_pair_that_fits() -> None:
    findings = judge([proxy(), engine(), engine("decode")])
    assert {finding.level for finding in findings} == {Level.OK}
    assert {
        "proxy.0.role",
        "prefill.0.role",
        "proxy.0.engines",
        "pair.models",
        "pair.max-model-len",
    } <= {finding.check for finding in findings}


@pytest.mark.parametrize(
    ("servers", "not_ok"),
    [
        ([engine(), engine("decode", model="other")], {"pair.models": Level.ERROR}),
        ([engine(), engine("decode", length=8192)], {"pair.max-model-len": Level.WARNING}),
        ([engine(skew=20), engine("decode", skew=-10)], {"prefill.0.clock": Level.ERROR}),
        ([engine(skew=10), engine("decode", skew=-20)], {"decode.0.clock": Level.ERROR}),
        ([engine(skew=10), engine("decode", skew=-10)], {}),
        ([changed(engine(), "/health", dataclasses.replace(answer(), date="Sat, 99 Nov 2026 00:00:00 GMT"))], {}),
        ([changed(engine(), "/health", answer(status=500))], {"prefill.0.health": Level.ERROR}),
        ([changed(engine(), "/health", GONE)], {"prefill.0.health": Level.ERROR}),
        ([changed(engine(), "/v1/models", answer(["x"]))], {"prefill.0.models": Level.ERROR}),
        ([proxy(state="unreachable")], {"proxy.0.health": Level.ERROR, "proxy.0.engines": Level.ERROR}),
        ([proxy(prefill="http://else:1"), engine()], {"proxy.0.engines": Level.WARNING}),
        ([changed(proxy(), "/health", answer())], {"proxy.0.engines": Level.NOTE}),
    ],
)
def test_what_does_not(servers: list[CheckedServer], not_ok: dict[str, Level]) -> None:
    assert levels(*servers) == not_ok


def given_as(role: str, server: CheckedServer) -> CheckedServer:
    return CheckedServer(role, 0, server.url, server.answers)


def without_metrics(server: CheckedServer) -> CheckedServer:
    return changed(server, "/metrics", answer(status=404))


def roles(*servers: CheckedServer) -> dict[str, tuple[Level, str, str]]:
    return {f.check: (f.level, f.found, f.action) for f in judge(servers) if f.check.endswith(".role")}


@pytest.mark.parametrize("given", ["proxy", "prefill", "decode"])
@pytest.mark.parametrize("kind", ["proxy", "prefill", "decode"])
def test_what_is_given_in_a_wrong_role_is_said_to_be_what_it_is(given: str, kind: str) -> None:
    server = {"proxy": proxy(), "prefill": engine(), "decode": engine("decode")}[kind]
    [(level, found, action)] = roles(given_as(given, server)).values()
    assert level is (Level.OK if given == kind else Level.ERROR)
    named = {"proxy": "is `vllm-ascend-pd proxy`", "prefill": "is a prefill engine", "decode": "is a decode engine"}
    assert f"http://{kind}:1" in found
    assert named[kind] in found
    assert given == kind or f"give it as --{kind}" in action
    assert ("kv_role" in action) == (given != kind and "proxy" not in (given, kind))


def test_a_proxy_whose_engines_are_exchanged_is_told_to_correct_that() -> None:
    turned = {"status": "ok", "prefill": {"http://decode:1": "healthy"}, "decode": {"http://prefill:1": "healthy"}}
    wrong = changed(proxy(), "/health", answer(turned))
    found = roles(wrong, given_as("decode", engine()), given_as("prefill", engine("decode")))
    assert found["proxy.0.role"][0] is Level.OK
    for check in ("prefill.0.role", "decode.0.role"):
        assert found[check][0] is Level.ERROR
    assert levels(wrong, given_as("decode", engine()))["proxy.0.engines"] is Level.ERROR
    assert levels(wrong, engine(), engine("decode")) == {"proxy.0.engines": Level.ERROR}


@pytest.mark.parametrize("role", ["prefill", "decode", "proxy"])
def test_an_engine_without_the_connector(role: str) -> None:
    [(level, found, action)] = roles(given_as(role, changed(engine(), "/metrics", METRICS["other"]))).values()
    assert level is Level.ERROR
    assert "without this package's connector" in found
    expected = {"prefill": "kv_producer", "decode": "kv_consumer", "proxy": "`vllm-ascend-pd proxy`"}
    assert expected[role] in action


@pytest.mark.parametrize(("size", "replaced"), [("10.0", True), ("None", False)])
def test_an_engine_whose_connector_was_replaced_says_why(size: str, replaced: bool) -> None:
    info = f'vllm:cache_config_info{{block_size="128",kv_offloading_size="{size}",engine="0"}} 1.0\n'.encode()
    answer = dataclasses.replace(METRICS["other"], body=METRICS["other"].body + info)
    server = given_as("decode", changed(engine(), "/metrics", answer))
    [(level, found, action)] = roles(server).values()
    assert level is Level.ERROR
    assert ("--kv-offloading-size" in found) is ("MultiConnector" in action) is replaced


def test_wrong_kv_that_decode_has_found_is_told() -> None:
    counts = b'vllm:kv_pd_verified_total{engine="0",rank="0/%d",result="%s"} %s\n'
    found = [(0, b"right", b"9.0"), (0, b"wrong", b"2.0"), (1, b"overwritten", b"1.0"), (1, b"wrong", b"1e+e")]
    said = dataclasses.replace(
        METRICS["decode"], body=METRICS["decode"].body + b"".join(counts % each for each in found)
    )
    [finding] = [each for each in judge([changed(engine("decode"), "/metrics", said)]) if each.check == "decode.0.kv"]
    assert (finding.level, finding.figures) == (Level.ERROR, {"times": 3.0})
    assert not [each for each in judge([engine("decode")]) if each.check == "decode.0.kv"]


def test_engines_with_another_connector_behind_the_proxy_may_be_meant() -> None:
    other = {role: changed(engine(role), "/metrics", METRICS["other"]) for role in ("prefill", "decode")}
    found = roles(proxy(), *(given_as(role, server) for role, server in other.items()))
    assert [found[f"{role}.0.role"][0] for role in other] == [Level.WARNING, Level.WARNING]
    assert all("layerwise connector" in found[f"{role}.0.role"][2] for role in other)


def test_without_metrics_the_proxy_is_believed_and_else_nothing_is_said() -> None:
    """As of engines with --disable-log-stats."""
    prefill, decode = without_metrics(engine()), without_metrics(engine("decode"))
    assert levels(prefill, decode) == {"prefill.0.role": Level.NOTE, "decode.0.role": Level.NOTE}
    assert levels(proxy(), prefill, decode) == {"prefill.0.role": Level.NOTE, "decode.0.role": Level.NOTE}
    turned = levels(proxy(), given_as("decode", prefill), given_as("prefill", decode))
    assert turned == {"prefill.0.role": Level.NOTE, "decode.0.role": Level.NOTE, "proxy.0.engines": Level.ERROR}
    assert roles(without_metrics(proxy()))["proxy.0.role"][0] is Level.OK  # its /health says it


def test_what_is_neither() -> None:
    stranger = CheckedServer(
        "proxy", 0, "http://web:1", {**without_metrics(engine()).answers, "/health": answer("fine")}
    )
    assert roles(stranger)["proxy.0.role"][0] is Level.ERROR
    assert levels(stranger) == {"proxy.0.role": Level.ERROR}
    closed = changed(stranger, "/health", answer(status=403))
    assert levels(closed)["proxy.0.role"] is Level.NOTE  # somebody keeps it from us: `health` is the error


def test_the_names_of_metrics_are_those_that_are_served() -> None:
    assert PROXY_PREFIX == observer.PREFIX


JSON = st.recursive(st.none() | st.integers() | st.text(), lambda e: st.lists(e) | st.dictionaries(st.text(), e))
BODIES = (
    st.binary()
    | st.sampled_from([each.body for each in METRICS.values()])
    | st.one_of(
        JSON,
        st.fixed_dictionaries({"data": st.lists(st.fixed_dictionaries({"id": st.text(min_size=1)})) | JSON}),
        st.fixed_dictionaries({"status": st.text(), "prefill": st.dictionaries(st.text(), st.text()), "decode": JSON}),
    ).map(lambda body: json.dumps(body).encode())
)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([200, 401, 500, 503]), BODIES), min_size=9, max_size=9))
def test_whatever_servers_say_is_judged(said: list[tuple[int, bytes]]) -> None:
    servers = []
    for server in (proxy(), engine(), engine("decode")):
        answers = {}
        for path, intact in server.answers.items():
            status, body = said.pop()
            answers[path] = HttpAnswer(status, body, intact.date, NOW, NOW)
        servers.append(CheckedServer(server.given, 0, server.url, answers))
    assert all(len(finding.found) <= 1003 for finding in judge(servers))


def test_a_key_that_is_missing_is_named() -> None:
    findings = judge([changed(engine(), "/v1/models", answer({"error": "Unauthorized"}, 401))])
    [wrong] = [finding for finding in findings if finding.level is Level.ERROR]
    assert "VLLM_API_KEY" in wrong.action
