# SPDX-License-Identifier: Apache-2.0
"""vLLM's own aggregation of the ranks' reports: a request ends after the last rank is done with it. The engines
of tests/e2e show that no block is kept then, and those of tests/npu/e2e with pipelines."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from vllm_ascend_pd.connector.metrics import ReportMetadata
from vllm_ascend_pd.core.step import WorkerReport


def output(**fields: Any) -> ModelRunnerOutput:
    """Returns what a rank returns from a step, also from an empty one and on an intermediate pipeline stage."""
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(**fields))


def test_ranks_that_have_nothing_to_report() -> None:
    """Most steps' reports are None. They must neither count nor hide another rank's."""
    aggregator = KVOutputAggregator(2)
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
