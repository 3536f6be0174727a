# SPDX-License-Identifier: Apache-2.0
"""The connector's metrics on their way through vLLM: added up, encoded, in its Prometheus registry and in its log."""

import logging
import pickle
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from harness.connectors import NAME, config_of
from harness.engines import Role
from harness.kv import GQA, Model, Side
from harness.multi_connector import transfer_config
from harness.ranks import MakePair, expect_delivery, prefill, prompts
from harness.scheduling import aggregated
from vllm_ascend_pd.connector.connector import LayerwisePushConnector
from vllm_ascend_pd.connector.metrics import LayerwisePushStats
from vllm_ascend_pd.connector.vllm_view import ASKS_SCHEDULER_FOR_STATS
from vllm_ascend_pd.observe.stats import (
    DECODE_METRICS,
    GRANTS_WAITING,
    LAYER_PUSH_SECONDS,
    OVERLAP_RATIO,
    PREFILL_METRICS,
    PREFIX,
    PUSH_FAILURES,
    PUSH_QUEUE_DEPTH,
    PUSHED_BYTES,
    RECEIVE_FAILURES,
    REGROUP_WAIT_SECONDS,
    TICKET_TO_READY_SECONDS,
    Data,
    Stats,
    merged,
)
from vllm_ascend_pd.tools.doctor.pair import kind_by_metrics


@pytest.fixture(params=[False, True], ids=["alone", "below-multi"])
def beside(request: pytest.FixtureRequest) -> bool:
    """Whether another connector is there too."""
    return bool(request.param)


@pytest.fixture(params=[Role.PREFILL, Role.DECODE], ids=["prefill", "decode"])
def config(request: pytest.FixtureRequest, beside: bool, model: Path, tmp_path: Path) -> Any:
    """Returns vLLM's configuration of an engine of a role."""
    if beside:
        return config_of(model, transfer_config(request.param, True, tmp_path))
    return config_of(model, {"kv_role": "kv_producer" if request.param is Role.PREFILL else "kv_consumer"})


@pytest.fixture
def prometheus(config: Any) -> Iterator[PrometheusStatLogger]:
    yield PrometheusStatLogger(config, [0])
    unregister_vllm_metrics()


def of_ranks(config: Any, *said: Data | None, scheduler: Data | None = None) -> SchedulerStats:
    """Returns a step's stats in the front end. Ranks and scheduler have `said` this in the engine core."""
    connector = KVConnectorFactory.get_connector_class(config.kv_transfer_config)

    def wrapped(data: Data | None) -> Any:
        if data is None:
            return None
        ours = pickle.loads(pickle.dumps(LayerwisePushStats(data)))  # ranks are processes
        return ours if connector is LayerwisePushConnector else connector.build_kv_connector_stats({NAME: ours})

    told = [KVConnectorOutput(kv_connector_stats=wrapped(data)) for data in said]
    whole: Any = aggregated(KVOutputAggregator(len(said)), told)
    stats = whole.kv_connector_output.kv_connector_stats
    if scheduler is not None:
        stats = stats.aggregate(wrapped(scheduler))
    payload = stats.to_dict() if ASKS_SCHEDULER_FOR_STATS else stats.data
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=payload))
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    assert received.scheduler_stats is not None
    return received.scheduler_stats


def registered() -> dict[str, float]:
    """Our samples in vLLM's registry: name{label=value,...} -> value, without labels that all of vLLM's have."""
    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith("_created"):
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                shown = ",".join(f"{k}={v}" for k, v in labels.items())
                found[sample.name.removeprefix(PREFIX) + (f"{{{shown}}}" if shown else "")] = sample.value
    return found


def said_by(rank: str, *recorded: tuple[Any, Any], gauges: Any = None) -> Data:
    stats = Stats(rank)
    for metric, value in recorded:
        if isinstance(value, str):
            stats.add(metric, reason=value)
        else:
            stats.add(metric, value)
    return stats.take(lambda: gauges or {})


def test_both_ways_through_vllm(config: Any, prometheus: PrometheusStatLogger, caplog: Any) -> None:
    """Two ranks' and a scheduler's stats of three steps end up in the registry, added up, and in the log."""
    is_prefill = "vllm:kv_pd_pushed_bytes" in {family.name for family in REGISTRY.collect()}
    expected = PREFILL_METRICS if is_prefill else DECODE_METRICS
    names = {family.name for family in REGISTRY.collect() if family.name.startswith(PREFIX)}
    assert names == {PREFIX + metric.name for metric in expected}
    assert set(registered().values()) == {0.0}, "all are there from the start"
    kind = "prefill" if is_prefill else "decode"
    assert kind_by_metrics(generate_latest(REGISTRY)) == kind, "the doctor knows it before the first request"
    log = LoggingStatLogger(config, 0)

    def record(stats: SchedulerStats) -> None:
        log.record(stats, None)
        prometheus.record(stats, None)

    if is_prefill:
        pushed = [(PUSHED_BYTES, 100), (LAYER_PUSH_SECONDS, 0.02), (OVERLAP_RATIO, 1.0)]
        levels = {PUSH_QUEUE_DEPTH: 2, GRANTS_WAITING: 1}
        record(of_ranks(config, said_by("0/0", *pushed, gauges=levels), said_by("0/1", *pushed, gauges=levels)))
        record(of_ranks(config, None, said_by("0/1", (PUSH_FAILURES, "lease"), (LAYER_PUSH_SECONDS, 0.02))))
        quiet: Data = {"gauges": {PUSH_QUEUE_DEPTH.name: {"0/1": 0}, GRANTS_WAITING.name: {"0/0": 0, "0/1": 0}}}
        record(of_ranks(config, quiet, None, scheduler=said_by("", (PUSH_FAILURES, "ticket"))))
        found = registered()
        assert found["pushed_bytes_total"] == 200
        assert [found[f"push_queue_depth{{rank={rank}}}"] for rank in ("0/0", "0/1")] == [2, 0]
        assert [found[f"grants_waiting{{rank={rank}}}"] for rank in ("0/0", "0/1")] == [0, 0]
        assert (found["push_failures_total{reason=lease}"], found["push_failures_total{reason=ticket}"]) == (1, 1)
        assert found["push_failures_total{reason=write}"] == 0
        assert found["layer_push_seconds_count"] == 3
        assert found["layer_push_seconds_sum"] == pytest.approx(0.06)
        assert (found["layer_push_seconds_bucket{le=0.01}"], found["layer_push_seconds_bucket{le=0.025}"]) == (0, 3)
        assert (found["overlap_ratio_bucket{le=0.99}"], found["overlap_ratio_bucket{le=1.0}"]) == (0, 2)
        in_log = "pushed_bytes", 200
    else:
        ready = said_by("", (TICKET_TO_READY_SECONDS, 0.4))
        record(of_ranks(config, {}, None, scheduler=ready))  # with 0.23 a rank says something, be it nothing
        record(of_ranks(config, {}, None, scheduler=merged(ready, said_by("", (RECEIVE_FAILURES, "aborted")))))
        record(of_ranks(config, {}, None))
        found = registered()
        assert found["receive_failures_total{reason=aborted}"] == 1
        assert found["ticket_to_ready_seconds_count"] == 2
        assert found["ticket_to_ready_seconds_sum"] == pytest.approx(0.8)
        in_log = "receive_failures[aborted]", 1
    with caplog.at_level(logging.INFO):
        log.kv_connector_logging.log(logging.getLogger("test").info)
    name, value = in_log  # below MultiConnector vLLM prints a dict
    assert f"{name}={value}" in caplog.text or f"'{name}': {value}" in caplog.text
    assert log.kv_connector_logging.transfer_stats_accumulator is None, "the next line begins anew"


SHAPES = {
    "GATHERED_TP2_TO_TP1": (GQA, Side(2), Side(1)),
    "SPLIT_PP2_TP1_TO_TP2": (GQA, Side(1, stages=(1, 2)), Side(2)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_bytes_counted_are_bytes_moved(shape: tuple[Model, Side, Side], make_pair: MakePair) -> None:
    """Waiting tickets are counted while they wait: decode hears of them only when prefill has computed."""
    model = shape[0]
    pair = make_pair(*shape)
    requests = prompts(pair, [16, 64, 112])  # whole blocks: none has bytes beyond its prompt's end
    tickets = {prompt.request_id: pair.ticket(prompt) for prompt in requests}
    prefill(pair, requests, tickets, chunk=48)
    waiting = reduce(merged, pair.each(pair.p_ranks, "stats"), {})
    assert sum(waiting["gauges"][GRANTS_WAITING.name].values()) == len(requests) * len(pair.p_ranks)
    assert all(waiting["gauges"][PUSH_QUEUE_DEPTH.name].values())
    assert len(waiting["gauges"][PUSH_QUEUE_DEPTH.name]) == len(pair.p_ranks)
    pair.expect(requests, tickets)
    expect_delivery(pair, requests)
    expected = sum(
        prompt.num_tokens * model.layers * model.heads * width * model.dtype.itemsize
        for prompt in requests
        for width in model.widths
    )
    ranks = pair.each(pair.p_ranks, "stats")
    pushed = reduce(merged, ranks, {})
    assert pushed["counters"][PUSHED_BYTES.name] == {"": expected}
    whole = merged(waiting, pushed)
    histograms = {name: sum(of[0]) for name, of in whole["histograms"].items()}
    # One of each rank that wrote some of a request: a rank may have no unit of it.
    assert len(requests) <= histograms[OVERLAP_RATIO.name] <= len(requests) * len(ranks)
    assert not any(whole["histograms"][OVERLAP_RATIO.name][1]), "grants came after the end"
    # Each rank regroups every layer of a step, also where it has no unit to write.
    assert 0 < histograms[LAYER_PUSH_SECONDS.name] <= histograms[REGROUP_WAIT_SECONDS.name]
    assert PUSH_FAILURES.name not in pushed["counters"]
    for name in (GRANTS_WAITING.name, PUSH_QUEUE_DEPTH.name):
        assert whole["gauges"][name] == dict.fromkeys(waiting["gauges"][name], 0), "nothing waits any more"
    assert pair.each(pair.p_ranks, "stats") == [{}] * len(ranks)
