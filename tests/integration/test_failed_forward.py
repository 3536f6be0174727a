# SPDX-License-Identifier: Apache-2.0
"""A failed forward pass delivers nothing that it did not compute (R1). vLLM's own model runner reports the failure."""

import enum
from contextlib import nullcontext
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from harness.kv import GQA, Prompt, Side, layer_name
from harness.rank_programs import PrefillRank
from harness.ranks import MakePair, expect_delivery, prompts, run
from vllm_ascend_pd.connector.build import Connected
from vllm_ascend_pd.connector.connector import LayerwisePushConnector
from vllm_ascend_pd.connector.metrics import StepMetadata
from vllm_ascend_pd.core.step import PrefillStep, Send


class Runner(enum.Enum):
    """Who calls the connector, and how."""

    PLAIN = "one whose step ends with the forward pass"
    DRAFTS = "one that drafts after the forward pass, and ends the step then"
    TELLS_NOTHING = "one that tells nothing of what failed, as vLLM's second does"


def runs_out_of_memory(rank: PrefillRank, runner: Runner, step: PrefillStep, by_id: dict[str, Prompt]) -> str:
    """Raises, after the first layer, the error that vLLM's runner raises."""
    connector: Any = object.__new__(LayerwisePushConnector)  # around this rank's worker
    connector._connect(Connected(rank.worker))
    vars(connector).update(_connector_metadata=None)
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = metadata = StepMetadata(step)
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    told = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output, defer_finalize=runner is Runner.DRAFTS)
    if runner is Runner.TELLS_NOTHING:
        connector.bind_connector_metadata(metadata)
        told = nullcontext()
    try:
        with set_forward_context(None, VllmConfig()), told:
            rank.compute(0, rank.values(0, step, by_id))
            connector.save_kv_layer(layer_name(0), None, None)
            raise MemoryError("the NPU has none left")
    except MemoryError as error:
        return str(error)
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = None


def has_imported(_: PrefillRank) -> None:
    """Comes back when this process has imported vLLM. Another rank would not wait so long in a collective."""


def test_what_was_not_computed_is_not_delivered(make_pair: MakePair) -> None:
    """Every rank still takes part in the step's collectives, and runs the next step, whoever calls the connector."""
    pair = make_pair(GQA, Side(2), Side(1))
    pair.each(pair.p_ranks, "do", has_imported)
    for runner in Runner:
        requests = prompts(pair, [40, 50])
        tickets = pair.announce(requests)
        by_id = {prompt.request_id: prompt for prompt in requests}
        sends = [Send(p.request_id, 0, p.num_tokens, (p.p_blocks,), last=True) for p in requests]
        step = PrefillStep(tickets=tickets, sends=sends)
        assert set(pair.each(pair.p_ranks, "do", runs_out_of_memory, runner, step, by_id)) == {"the NPU has none left"}
        pair.each(pair.p_ranks, "step", PrefillStep(finished=dict.fromkeys(by_id)), by_id)
        received, failed = pair.wait_arrivals(2)
        assert (received, failed.keys()) == (set(), by_id.keys())
        error = (
            "RuntimeError('vLLM did not report its end')"
            if runner is Runner.TELLS_NOTHING
            else "MemoryError('the NPU has none left')"
        )
        assert all(f"prefill's forward pass failed: {error}" in reason for reason in failed.values()), failed
        assert pair.wait_sent(2).keys() == by_id.keys()
        pair.each(pair.d_ranks, "clear")  # of the first layer
        later = prompts(pair, [60])
        run(pair, later)
        expect_delivery(pair, later)
        pair.each(pair.d_ranks, "clear")
