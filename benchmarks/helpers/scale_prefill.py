# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/scale.py: a prefill engine without a model: a scheduler's connector, and a rank and its threads."""

from typing import Any

from harness.waiting import wait_until
from helpers.scale_parts import (
    BLOCKS,
    STEPS,
    TIMEOUT_S,
    TOKENS,
    Blocks,
    Configs,
    Meter,
    blocks_of,
)

PER_STEP = TOKENS // STEPS


class Prefill:
    def __init__(self, configs: Configs, engine_id: str) -> None:
        from vllm_ascend_pd.core.config import parse_config
        from vllm_ascend_pd.device.cpu import CpuDevice
        from vllm_ascend_pd.observe.stats import PrefillStats
        from vllm_ascend_pd.prefill.worker import PrefillWorker

        self.meter = Meter("pd-control", "pd-sender")
        self._device = CpuDevice()
        self._layers = list(configs.caches.layers)
        with self.meter.owning():
            self._connector = configs.scheduler("kv_producer", engine_id, 0)
            rank_info, engine = configs.rank_info(engine_id), configs.engine()
            self._measured = PrefillStats(rank_info)
            self._worker = PrefillWorker(
                rank_info,
                parse_config({}),
                self._device,
                engine,
                configs.caches,
                step_tokens=TOKENS,
                observer=self._measured,
            )
        self._requests: list[Any] = []

    def begin(self, tickets: list[dict[str, Any]]) -> None:
        """Requests arrive, with their tickets."""
        from harness.scheduling import make_request

        self._requests = [make_request(ticket["request_id"], TOKENS, ticket) for ticket in tickets]

    def start(self) -> None:
        """The first step, in which all requests are new; waits until decode lets them write."""
        from harness.scheduling import Scheduled, make_output

        timed, connector, new = self.meter.timed, self._connector, []
        for i, request in enumerate(self._requests):
            ids = blocks_of(i, BLOCKS // STEPS)
            timed("get_num_new_matched_tokens", connector.get_num_new_matched_tokens, request, 0)
            timed("update_state_after_alloc", connector.update_state_after_alloc, request, Blocks(ids), 0)
            new.append(Scheduled(request, (ids,), 0, PER_STEP))
        with self.meter.owning():  # an engine's first ticket starts a sender
            self._step(make_output(new=new))
        wait_until(self._is_granted, TIMEOUT_S, "decode grants")

    def go_on(self) -> None:
        """Takes the other steps, to the end of the prompts. Then the requests end."""
        from harness.scheduling import Scheduled, make_output

        for step in range(1, STEPS):
            part = slice(step * BLOCKS // STEPS, (step + 1) * BLOCKS // STEPS)
            running = [
                Scheduled(request, (blocks_of(i)[part],), step * PER_STEP, PER_STEP)
                for i, request in enumerate(self._requests)
            ]
            self._step(make_output(running=running))
        for i, request in enumerate(self._requests):
            finished = self._connector.request_finished_all_groups
            kept, answer = self.meter.timed("request_finished_all_groups", finished, request, (blocks_of(i),))
            if not kept or answer is not None:
                raise RuntimeError(f"prefill does not send {request.request_id}: {answer}")
        self._step(make_output())

    def finish(self) -> dict[str, Any]:
        """Waits until all blocks are sent. Returns what the wave has cost."""
        from harness.scheduling import make_output

        wait_until(
            lambda: all(t.state.phase.value == "ended" for t in self._worker._transfers.values()),
            TIMEOUT_S,
            "KV is sent",
        )
        self._step(make_output())
        left = len(self._worker._transfers) + len(self._connector._role._transfers)
        if left:
            raise RuntimeError(f"{left} requests did not end at prefill")
        self._requests = []
        return self.meter.costs()

    def empty_steps(self, count: int) -> None:
        from harness.scheduling import make_output

        for _ in range(count):
            with self.meter.aside():
                self._step(make_output())

    def close(self) -> None:
        self._worker.close(TIMEOUT_S)
        self._connector.shutdown()
        self._device.close()

    def _step(self, output: Any) -> None:
        from vllm.v1.outputs import KVConnectorOutput

        from vllm_ascend_pd.connector.metrics import ReportMetadata

        meter, worker = self.meter, self._worker
        output.total_num_scheduled_tokens = max(1, output.total_num_scheduled_tokens)
        step = meter.timed("build_connector_meta", self._connector.build_connector_meta, output)
        step = meter.carried("down", step).step
        meter.timed("rank", worker.preempted, step)
        meter.timed("rank", worker.start_step, step)
        for layer in self._layers:  # what a layer costs is benchmarks/plan.py's question
            worker.push_layer(layer)
        meter.timed("rank", worker.end_step)
        sent = meter.timed("rank", worker.take_results).sent
        report = meter.timed("rank", worker.take_report)
        metadata = meter.carried("up", None if report is None else ReportMetadata(report))
        meter.timed("rank", self._measured.take, worker.status)
        if report is not None and report.failed:
            raise RuntimeError(f"prefill failed: {report.failed}")
        news = KVConnectorOutput(finished_sending=sent or None, kv_connector_worker_meta=metadata)
        meter.timed("update_connector_output", self._connector.update_connector_output, news)

    def _is_granted(self) -> bool:
        return not any(transfer.state.waits_for_grant for transfer in self._worker._transfers.values())
