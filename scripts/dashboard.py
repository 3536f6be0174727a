# SPDX-License-Identifier: Apache-2.0
"""Writes examples/observability/dashboard.json, Grafana's dashboard, from a list of panels."""

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).resolve().parents[1] / "examples" / "observability" / "dashboard.json"

PD = "vllm:kv_pd_"
PROXY = "vllm:kv_pd_proxy_"
WIDTH, HEIGHT, PER_ROW = 8, 8, 3  # of a grid 24 wide


class Query(NamedTuple):
    expression: str
    """`SELECT` stands for the row's label selector."""
    legend: str


class Panel(NamedTuple):
    title: str
    unit: str
    description: str
    queries: tuple[Query, ...]
    maximum: float | None = None


class Row(NamedTuple):
    title: str
    job: str
    """The dashboard's variable that has its jobs."""
    panels: tuple[Panel, ...]


def quantiles(metric: str, *quantile: float, by: str = "") -> tuple[Query, ...]:
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return tuple(
        Query(
            f"histogram_quantile({each}, sum by ({labels}) (rate({metric}_bucket{{SELECT}}[$__rate_interval])))",
            f"p{each * 100:g}{legend}",
        )
        for each in quantile
    )


def rate(metric: str, by: str, legend: str) -> Query:
    return Query(f"sum by ({by}) (rate({metric}{{SELECT}}[$__rate_interval]))", legend)


def level(metric: str, by: str, legend: str, how: str = "sum") -> Query:
    return Query(f"{how} by ({by}) ({metric}{{SELECT}})", legend)


LATENCY = (0.5, 0.9, 0.99)

ROWS = (
    Row(
        "Proxy",
        "proxy_job",
        (
            Panel(
                "Engine health",
                "bool_yes_no",
                "Whether each engine answers the proxy's health probe. With several proxies: whether all say so.",
                (level(PROXY + "engine_up", "role, engine", "{{role}} {{engine}}", "min"),),
                1,
            ),
            Panel(
                "Requests",
                "reqps",
                "Requests that ended, by the HTTP status that the client saw. 499: it left.",
                (rate(PROXY + "requests_total", "status", "{{status}}"),),
            ),
            Panel(
                "Time to first token",
                "s",
                "Streams only: from a request's arrival until its first token was sent on.",
                quantiles(PROXY + "time_to_first_token_seconds", *LATENCY),
            ),
            Panel(
                "Request duration",
                "s",
                "From a request's arrival until its end, by path.",
                quantiles(PROXY + "request_duration_seconds", 0.5, 0.99, by="route"),
            ),
            Panel(
                "Prefill, as the proxy sees it",
                "s",
                "From sending a ticket to a prefill engine until that answered: its queue, and the computation.",
                quantiles(PROXY + "prefill_seconds", *LATENCY),
            ),
            Panel(
                "Failures by reason",
                "ops",
                "Attempts at an engine that failed. The client may have been served all the same: see retries.",
                (rate(PROXY + "failures_total", "role, kind", "{{role}}: {{kind}}"),),
            ),
            Panel(
                "Retries and refusals",
                "ops",
                "Attempts made again, and requests that no engine was asked for.",
                (
                    rate(PROXY + "retries_total", "role", "retry of {{role}}"),
                    rate(PROXY + "refused_requests_total", "status", "refused with {{status}}"),
                ),
            ),
            Panel(
                "In flight and waiting",
                "short",
                "Client requests being served, tickets whose prefill runs, and requests that wait for a place.",
                (
                    level(PROXY + "requests_in_flight", "instance", "in flight at {{instance}}"),
                    level(PROXY + "tickets_waiting", "instance", "tickets at {{instance}}"),
                    level(PROXY + "queue_depth", "role", "wait for a {{role}} engine"),
                ),
            ),
            Panel(
                "Seats taken",
                "short",
                "What each engine has from the proxies: prompts at prefill, sequences at decode.",
                (level(PROXY + "engine_requests", "role, engine", "{{role}} {{engine}}"),),
            ),
        ),
    ),
    Row(
        "Prefill engines",
        "prefill_job",
        (
            Panel(
                "KV pushed",
                "Bps",
                "Written to decode engines and acknowledged, over all ranks of an engine.",
                (rate(PD + "pushed_bytes_total", "instance", "{{instance}}"),),
            ),
            Panel(
                "Push of a layer",
                "s",
                "Writing one layer of a step to one decode engine, from one rank.",
                quantiles(PD + "layer_push_seconds", *LATENCY),
            ),
            Panel(
                "Wait for regrouping",
                "s",
                "How long a computed layer's writing still waited for its heads to be regrouped. Empty without that.",
                quantiles(PD + "regroup_wait_seconds", *LATENCY),
            ),
            Panel(
                "Overlap of computing and pushing",
                "percentunit",
                "Share of a request's bytes that were written before its last layer had been computed, on average.",
                (
                    Query(
                        f"sum by (instance) (rate({PD}overlap_ratio_sum{{SELECT}}[$__rate_interval])) / "
                        f"sum by (instance) (rate({PD}overlap_ratio_count{{SELECT}}[$__rate_interval]))",
                        "{{instance}}",
                    ),
                ),
                1,
            ),
            Panel(
                "Push queue",
                "short",
                "Layers that wait for the ones before them to be written, at the rank that has most.",
                (level(PD + "push_queue_depth", "instance", "{{instance}}", "max"),),
            ),
            Panel(
                "Grants waiting",
                "short",
                "Transfers that wait for a decode engine's grant, over all ranks.",
                (level(PD + "grants_waiting", "instance", "{{instance}}"),),
            ),
            Panel(
                "Push failures by reason",
                "ops",
                "Requests whose KV was not delivered; each rank counts. docs/operations.md has each reason's cause.",
                (
                    rate(PD + "push_failures_total", "reason", "{{reason}}"),
                    rate(PD + "write_retries_total", "instance", "write made again at {{instance}}"),
                ),
            ),
            Panel(
                "Requests in the engine",
                "short",
                "vLLM's own figures.",
                (
                    level("vllm:num_requests_running", "instance", "running at {{instance}}"),
                    level("vllm:num_requests_waiting", "instance", "waiting at {{instance}}"),
                ),
            ),
            Panel(
                "Prompt tokens",
                "short",
                "Computed, or found in the prefix cache, in a second.",
                (rate("vllm:prompt_tokens_total", "instance", "{{instance}}"),),
            ),
        ),
    ),
    Row(
        "Decode engines",
        "decode_job",
        (
            Panel(
                "Who computes prompts",
                "reqps",
                "Prompts by who computed what decode had not cached, and why. docs/metrics.md explains the reasons.",
                (rate(PD + "prompts_total", "by, reason", "{{by}}: {{reason}}"),),
            ),
            Panel(
                "Prompt tokens by who computes them",
                "short",
                "In a second, without those that decode had cached.",
                (rate(PD + "prompt_tokens_total", "by", "{{by}}"),),
            ),
            Panel(
                "Longest prompt that decode computes",
                "short",
                "Tokens beyond the cache that are cheap for an idle decode engine, as tuned by measuring. 0: none.",
                (level(PD + "decode_prompt_threshold_tokens", "instance", "{{instance}}"),),
            ),
            Panel(
                "Ticket to ready",
                "s",
                "From a ticket's issue until all its KV is there: the proxy, prefill's queue, prefill, the transfer.",
                quantiles(PD + "ticket_to_ready_seconds", *LATENCY),
            ),
            Panel(
                "Receive failures by reason",
                "ops",
                "Requests whose KV did not come. docs/operations.md has each reason's cause.",
                (rate(PD + "receive_failures_total", "reason", "{{reason}}"),),
            ),
            Panel(
                "Posts made again",
                "ops",
                "Tickets that the proxy had to be sent again.",
                (rate(PD + "ticket_post_retries_total", "instance", "posted again by {{instance}}"),),
            ),
            Panel(
                "Requests in the engine",
                "short",
                "vLLM's own figures: those that wait for KV are among the waiting.",
                (
                    level("vllm:num_requests_running", "instance", "running at {{instance}}"),
                    level("vllm:num_requests_waiting", "instance", "waiting at {{instance}}"),
                ),
            ),
            Panel(
                "KV cache in use",
                "percentunit",
                "At the data-parallel rank that uses most.",
                (level("vllm:kv_cache_usage_perc", "instance", "{{instance}}", "max"),),
                1,
            ),
            Panel(
                "Time between tokens",
                "s",
                "Of one sequence.",
                quantiles("vllm:inter_token_latency_seconds", *LATENCY),
            ),
            Panel(
                "Time to first token, as decode sees it",
                "s",
                "From the request's arrival at decode; the proxy's own time and retries are not in it.",
                quantiles("vllm:time_to_first_token_seconds", *LATENCY),
            ),
            Panel(
                "Tokens generated",
                "short",
                "In a second.",
                (rate("vllm:generation_tokens_total", "instance", "{{instance}}"),),
            ),
            Panel(
                "Preemptions",
                "ops",
                "Requests that lost their blocks: the cache is too small for what runs.",
                (rate("vllm:num_preemptions_total", "instance", "{{instance}}"),),
            ),
        ),
    ),
)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def query_variable(name: str, label: str, query: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        **more,
    }


def variables() -> list[dict[str, Any]]:
    jobs = "|".join(f"${{{row.job}:regex}}" for row in ROWS)
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        query_variable("proxy_job", "Proxy job", f"label_values({PROXY}requests_in_flight, job)"),
        query_variable("prefill_job", "Prefill job", f"label_values({PD}pushed_bytes_total, job)"),
        query_variable("decode_job", "Decode job", f"label_values({PD}ticket_to_ready_seconds_count, job)"),
        query_variable("instance", "Instance", f'label_values(up{{job=~"{jobs}"}}, instance)', allValue=".*"),
    ]


def shown(panel: Panel, row: Row, number: int, x: int, y: int) -> dict[str, Any]:
    selector = f'job=~"${row.job}", instance=~"$instance"'
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "custom": {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never", "spanNulls": False},
    }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query.expression.replace("SELECT", selector),
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        header = {"id": len(made) + 1, "type": "row", "title": row.title, "collapsed": False, "panels": []}
        made.append({**header, "gridPos": {"x": 0, "y": y, "w": WIDTH * PER_ROW, "h": 1}})
        y += 1
        for index, panel in enumerate(row.panels):
            at = (index % PER_ROW * WIDTH, y + index // PER_ROW * HEIGHT)
            made.append(shown(panel, row, len(made) + 1, *at))
        y += -(-len(row.panels) // PER_ROW) * HEIGHT
    return made


def dashboard() -> str:
    return (
        json.dumps(
            {
                "uid": "vllm-ascend-pd",
                "title": "vLLM prefill and decode apart",
                "description": "Proxy, prefill and decode engines of vllm-ascend-pd.",
                "tags": ["vllm", "prefill-decode"],
                "schemaVersion": 38,
                "editable": True,
                "graphTooltip": 1,
                "refresh": "10s",
                "time": {"from": "now-1h", "to": "now"},
                "templating": {"list": variables()},
                "panels": panels(),
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    FILE.write_text(dashboard())
