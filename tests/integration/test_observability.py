# SPDX-License-Identifier: Apache-2.0
"""`examples/observability`: what dashboard and alerts ask for exists; Prometheus takes the files as they are, if its
package is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from proxy_cluster import COMPLETION, STREAM, eventually, running_cluster
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from harness.connectors import config_of
from harness.documented import documented
from harness.ports import release_port, reserve_port
from vllm_ascend_pd.observe.stats import PREFIX

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "examples" / "observability"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
# scripts/setup_env.sh --with-programs puts both there.
PROGRAMS = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
PROMETHEUS, PROMTOOL = (shutil.which(program, path=PROGRAMS) or "" for program in ("prometheus", "promtool"))
needs_prometheus = pytest.mark.skipif(
    not (PROMETHEUS and PROMTOOL),
    reason="scripts/setup_env.sh --with-programs, on Debian or Ubuntu, unpacks promtool and prometheus",
)

# A metric with its selector. Of PromQL only this is read here: promtool reads all of it.
_SELECTOR = re.compile(r"\b(up|vllm:\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_BY = re.compile(r"\bby \(([^)]*)\)")
_LEGEND = re.compile(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}")
# What Prometheus adds to all that it scrapes.
_SCRAPED = {"job", "instance"}


def samples(families: Any) -> dict[str, set[str]]:
    """Sample name -> its labels."""
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def proxy_metrics() -> dict[str, set[str]]:
    with running_cluster(max_concurrent=1) as cluster:
        assert cluster.complete(**STREAM).status_code == 200
        # A request counts when it has ended, which its client sees a moment before.
        eventually(lambda: "kv_pd_proxy_requests_total{" in cluster.client.get("/metrics").text)
        return samples(text_string_to_metric_families(cluster.client.get("/metrics").text))


def engine_metrics(model: Path, role: str) -> dict[str, set[str]]:
    config = config_of(model, {"kv_role": role})
    unregister_vllm_metrics()
    PrometheusStatLogger(config, [0])
    try:
        found = samples(family for family in REGISTRY.collect() if family.name.startswith("vllm:"))
        # A gauge of ranks has no sample before a rank has said something.
        ours = [family for family in REGISTRY.collect() if family.name.startswith(PREFIX)]
        found.update({family.name: {"rank"} for family in ours if not family.samples})
        return found
    finally:
        unregister_vllm_metrics()


@pytest.fixture(scope="module")
def exposed(model: Path) -> dict[str, dict[str, set[str]]]:
    """What each role has on `/metrics`, by the job of `targets.yml`: sample name -> labels."""
    return {
        "pd-proxy": proxy_metrics(),
        "pd-prefill": engine_metrics(model, "kv_producer"),
        "pd-decode": engine_metrics(model, "kv_consumer"),
    }


def queries() -> Iterator[tuple[str, str, set[str]]]:
    """(PromQL, who has it if that is clear, labels that its result must have)."""
    for panel in PANELS:
        for target in panel["targets"]:
            [variable] = set(re.findall(r'job=~"\$(\w+)_job"', target["expr"]))
            expression = target["expr"].replace("$__rate_interval", "1m")
            yield expression, f"pd-{variable}", set(_LEGEND.findall(target["legendFormat"]))
    for rule in RULES:
        annotated = " ".join(rule["annotations"].values())
        yield rule["expr"], "", set(_LEGEND.findall(annotated.replace("$value", "")))
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert match is not None, variable
            expression = re.sub(r"\$\{\w+:regex\}", "x", match[1])
            yield f"count by ({match[2]}) ({expression})", "", set()


def test_queries_name_metrics_and_labels_that_exist(exposed: dict[str, dict[str, set[str]]]) -> None:
    asked = list(queries())
    assert len(asked) > 50
    for expression, job, legend in asked:
        selectors = _SELECTOR.findall(expression)
        assert selectors, expression
        kept = {label.strip() for labels in _BY.findall(expression) for label in labels.split(",")}
        for name, selector in selectors:
            having = [of[name] for of_job, of in exposed.items() if name in of and job in ("", of_job)]
            assert having or name == "up", f"{name} of {job or 'any job'} does not exist: {expression}"
            labels = set().union(*having) | _SCRAPED
            assert set(_LABEL.findall(selector)) <= labels, expression
            assert kept <= labels, expression
            assert legend <= (kept if kept else labels), expression


def test_each_metric_is_in_a_panel() -> None:
    named = re.findall(rf"^\| `({PREFIX}\w+)`", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert len(named) > 30
    shown = "\n".join(target["expr"] for panel in PANELS for target in panel["targets"])
    assert [name for name in named if name not in shown] == []


def test_alerts_look_at_the_jobs_that_are_scraped() -> None:
    jobs = {group["labels"]["job"] for group in yaml.safe_load((FOLDER / "targets.yml").read_text())}
    assert jobs == {"pd-proxy", "pd-prefill", "pd-decode"}
    for rule in RULES:
        assert {rule["labels"]["severity"]} <= {"info", "warning", "critical"}
        assert all(re.fullmatch(job, "pd-decode") for job in re.findall(r'job=~?"([^"]*)"', rule["expr"]))
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


@needs_prometheus
def test_promtool_reads_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"query:{number}", "expr": query} for number, (query, _, _) in enumerate(queries())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules)} rules found" in checked.stdout


@needs_prometheus
def test_alerts_fire_when_they_should() -> None:
    """The cases are in alerts_cases.yml, in promtool's own format."""
    cases = Path(__file__).with_name("alerts_cases.yml")
    run = subprocess.run(
        [PROMTOOL, "test", "rules", cases.name], cwd=cases.parent, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr


@contextmanager
def prometheus(folder: Path, targets: list[dict[str, Any]]) -> Iterator[str]:
    """The README's command over a copy of the folder with other targets; its URL."""
    copy = folder / "observability"
    shutil.copytree(FOLDER, copy)
    (copy / "targets.yml").write_text(yaml.safe_dump(targets))
    port = reserve_port()
    values = {
        "/tmp/pd-prometheus/usr/bin/prometheus": PROMETHEUS,
        "examples/observability": str(copy),
        "/tmp/pd-prometheus/data": str(folder / "data"),
        "9091": str(port),
    }
    command = documented("examples/observability/README.md", "/tmp/pd-prometheus/usr/bin/prometheus", values)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
            release_port(port)


@needs_prometheus
def test_prometheus_collects_a_proxy_as_the_readme_says(tmp_path: Path) -> None:
    values = {"/tmp/pd-prometheus/usr/bin/promtool": PROMTOOL}
    check = documented("examples/observability/README.md", "/tmp/pd-prometheus/usr/bin/promtool check", values)
    checked = subprocess.run(check, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with running_cluster() as cluster:
        url = cluster.client.base_url
        targets = [{"labels": {"job": "pd-proxy"}, "targets": [f"{url.host}:{url.port}"]}]
        with prometheus(tmp_path, targets) as server, httpx.Client(base_url=server, trust_env=False) as client:

            def asked(query: str) -> dict[str, float]:
                try:
                    answer = client.get("/api/v1/query", params={"query": query}).json()
                except (httpx.TransportError, ValueError):  # still starting
                    return {}
                results = answer.get("data", {}).get("result", [])
                return {each["metric"].get("role", ""): float(each["value"][1]) for each in results}

            healthy: Callable[[], bool] = lambda: (  # noqa: E731
                asked("sum by (role) (vllm:kv_pd_proxy_engine_up)") == {"prefill": 1, "decode": 1}
            )
            assert cluster.client.post("/v1/completions", json=COMPLETION).status_code == 200
            eventually(healthy)
            eventually(lambda: asked("sum(vllm:kv_pd_proxy_requests_total)") == {"": 1})
            values |= {"http://127.0.0.1:9091": server}
            query = documented("examples/observability/README.md", "/tmp/pd-prometheus/usr/bin/promtool query", values)
            printed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
            assert sorted(re.findall(r'^\{role="(\w+)"\} => 1 @', printed, re.MULTILINE)) == ["decode", "prefill"]
            rules = client.get("/api/v1/rules").json()["data"]["groups"]
            assert sum(len(group["rules"]) for group in rules) == len(RULES)
            assert all(rule["state"] == "inactive" for group in rules for rule in group["rules"])
