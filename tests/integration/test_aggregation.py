# SPDX-License-Identifier: Apache-2.0
"""vLLM's own aggregation of the ranks' reports: a request ends once, after the last rank is done with it."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from harness.kv import Model, Side
from harness.models import TINY, make_model
from harness.ports import release_port, reserve_port
from harness.ranks import Pair, prompts, run
from vllm_ascend_pd.connector.connector import LayerwisePushConnector
from vllm_ascend_pd.connector.metrics import ReportMetadata
from vllm_ascend_pd.core.step import WorkerReport

MLA = Model(widths=(128, 16), replicated=True)
SHAPES = {
    "MLA_TP4_TO_TP2": (MLA, Side(4), Side(2)),
    "MLA_TP2_TO_TP2": (MLA, Side(2), Side(2)),
    "GQA_TP2_TO_TP4": (Model(), Side(2), Side(4)),
    "PP2_TP2_TO_TP1": (Model(), Side(2, stages=(1, 2)), Side(1)),
}
LENGTHS = [1, 16, 17, 100, 64]


@pytest.fixture(scope="module")
def connector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Side], LayerwisePushConnector]]:
    """Makes the connector of an engine's scheduler, in vLLM's own configuration."""
    model = make_model(TINY, tmp_path_factory.mktemp("model"))
    made: list[LayerwisePushConnector] = []
    ports = []

    def make(role: str, side: Side) -> LayerwisePushConnector:
        ports.append(reserve_port())
        config = _engine_config(model, role, side, ports[-1])
        spec = FullAttentionSpec(block_size=side.block_size, num_kv_heads=4, head_size=32, dtype=torch.float32)
        caches = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        made.append(LayerwisePushConnector(config, KVConnectorRole.SCHEDULER, caches))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()
    for port in ports:
        release_port(port)


def _engine_config(model: Path, role: str, side: Side, port: int) -> Any:
    return EngineArgs(
        model=str(model),
        enforce_eager=True,
        max_model_len=512,
        tensor_parallel_size=side.tp,
        pipeline_parallel_size=side.pp,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LayerwisePushConnector", kv_role=role, engine_id=f"{role} {port}", kv_port=port
        ),
    ).create_engine_config()


def output(**fields: Any) -> ModelRunnerOutput:
    """Returns what a rank returns from a step, also from an empty one and on an intermediate pipeline stage."""
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(**fields))


def collect(aggregator: KVOutputAggregator, step: Callable[[], list[ModelRunnerOutput]], count: int) -> dict[str, int]:
    """Returns how often each request ended, in the steps until `count` have ended and in a few more."""
    ended: dict[str, int] = {}
    deadline = time.monotonic() + 60
    after = itertools.count()
    while sum(ended.values()) < count or next(after) < 5:
        assert time.monotonic() < deadline, f"only {ended} ended"
        whole = aggregator.aggregate(step())
        assert whole is not None
        if (report := whole.kv_connector_output) is not None:
            for request_id in (report.finished_sending or set()) | (report.finished_recving or set()):
                ended[request_id] = ended.get(request_id, 0) + 1
            assert not report.invalid_block_ids
        time.sleep(0.01)
    return ended


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_requests_end_after_exactly_the_reports_that_come(connector: Any, shape: tuple[Model, Side, Side]) -> None:
    model, prefill, decode = shape
    pair = Pair(model, prefill, decode)
    try:
        requests = prompts(pair, LENGTHS)
        run(pair, requests)
        once = dict.fromkeys((prompt.request_id for prompt in requests), 1)

        def decode_step() -> list[ModelRunnerOutput]:
            return [output(finished_recving=done or None) for done, *_ in pair.each(pair.d_ranks, "arrivals")]

        def prefill_step() -> list[ModelRunnerOutput]:
            return [output(finished_sending=done or None) for done, _ in pair.each(pair.p_ranks, "sent")]

        for role, side, step in (("kv_consumer", decode, decode_step), ("kv_producer", prefill, prefill_step)):
            one = connector(role, side)
            assert one.get_finished_count() == side.tp * side.pp
            assert collect(KVOutputAggregator.from_connector(one, side.tp * side.pp), step, len(requests)) == once
        assert pair.differences(requests) == []
    finally:
        assert pair.close() == []


def test_ranks_that_have_nothing_to_report(connector: Any) -> None:
    """Most steps' reports are None. They must neither count nor hide another rank's."""
    aggregator = KVOutputAggregator.from_connector(connector("kv_producer", Side(2)), 2)
    report = ReportMetadata(WorkerReport(failed={"ticket": "the link is down"}))
    none = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=None)
    first = aggregator.aggregate([none, output(finished_sending={"r"}, kv_connector_worker_meta=report)])
    assert first is not None
    assert first.kv_connector_output is not None
    assert not first.kv_connector_output.finished_sending
    assert first.kv_connector_output.kv_connector_worker_meta == report
    nothing = aggregator.aggregate([none, none])
    assert nothing is not None
    assert nothing.kv_connector_output is None or not nothing.kv_connector_output.finished_sending
    last = aggregator.aggregate([output(finished_sending={"r"}), none])
    assert last is not None
    assert last.kv_connector_output is not None
    assert last.kv_connector_output.finished_sending == {"r"}
