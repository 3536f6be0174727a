# SPDX-License-Identifier: Apache-2.0
"""What a forward pass that failed did not compute is not delivered (R1), told by vLLM's own model runner."""

from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from harness.kv import Model, Prompt, Side, layer_name
from harness.rank_programs import PrefillRank
from harness.ranks import Pair, expect_delivery, prompts, run
from vllm_ascend_pd.connector import LayerwisePushConnector
from vllm_ascend_pd.step import ProducerStep, Send


def runs_out_of_memory(rank: PrefillRank, step: ProducerStep, by_id: dict[str, Prompt]) -> str:
    """After the first layer. What vLLM's runner raises."""
    connector: Any = object.__new__(LayerwisePushConnector)  # around this rank's worker
    vars(connector).update(_worker=rank.worker, _connector_metadata=None, _brings_stats=False, _lost_blocks=set())
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = step
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    try:
        with (
            set_forward_context(None, VllmConfig()),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output),
        ):
            rank.compute(0, rank.values(0, step, by_id))
            connector.save_kv_layer(layer_name(0), None, None)
            raise MemoryError("the NPU has none left")
    except MemoryError as error:
        return str(error)
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = None


@pytest.mark.parametrize("tp", [1, 2], ids=["direct", "regrouped"])
def test_what_was_not_computed_is_not_delivered(tp: int) -> None:
    """Every rank still takes part in the step's collectives, and goes on."""
    pair = Pair(Model(), Side(tp), Side(1))
    requests = prompts(pair, [40, 50])
    tickets = pair.announce(requests)
    by_id = {prompt.request_id: prompt for prompt in requests}
    sends = [Send(p.request_id, 0, p.num_tokens, (p.p_blocks,), last=True) for p in requests]
    step = ProducerStep(tickets=tickets, sends=sends)
    assert set(pair.each(pair.p_ranks, "do", runs_out_of_memory, step, by_id)) == {"the NPU has none left"}
    received, failed = pair.wait_arrivals(2)
    assert (received, failed.keys()) == (set(), by_id.keys())
    why = "prefill's forward pass failed: MemoryError('the NPU has none left')"
    assert all(why in reason for reason in failed.values())
    pair.each(pair.p_ranks, "step", ProducerStep(finished=dict.fromkeys(by_id)), by_id)
    assert pair.wait_sent(2).keys() == by_id.keys()
    later = prompts(pair, [60])
    run(pair, later)
    expect_delivery(pair, later)
    assert pair.close() == []
