# SPDX-License-Identifier: Apache-2.0
"""Ranks whose steps go through vLLM's own connector classes of Model Runner V2, and through this connector's hooks."""

import inspect
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import override_forward_context
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from harness.kv import Prompt, layer_name
from harness.rank_programs import ONCE, DecodeRank, Hooks, PrefillRank
from vllm_ascend_pd.connector.build import Connected
from vllm_ascend_pd.connector.connector import LayerwisePushConnector
from vllm_ascend_pd.connector.metrics import StepMetadata
from vllm_ascend_pd.core.step import DecodeStep, PrefillStep

FINALIZES_LATER = "defer_finalize" in inspect.signature(ActiveKVConnector.post_forward).parameters
"""Whether the runner takes transfer results before the draft runs, and ends the step after it."""


class _ConnectorOfRank(LayerwisePushConnector):
    """The connector in a worker. vLLM's configuration is not read: the rank has made its worker."""

    def __init__(self, worker: Any, prefills: bool) -> None:
        self._connector_metadata = None
        self._setup: Any = SimpleNamespace(prefills=prefills)
        self._is_worker = True
        self._worker = worker
        self._connect(Connected())

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._connect(Connected(role=self._worker))

    def reset_capture_state(self) -> None: ...


class _Runner:
    """What vLLM's runner has of a connector, and what it has heard from it."""

    def __init__(self, worker: Any, prefills: bool) -> None:
        self.connector = _ConnectorOfRank(worker, prefills)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.vllm = ActiveKVConnector(None, {})
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.lost: set[str] = set()
        self.reports: list[Any] = []

    def take(self, output: Any) -> None:
        if output is None:  # nothing has happened
            return
        self.sent |= output.finished_sending or set()
        self.received |= output.finished_recving or set()
        self.lost |= output.failed_recving or set()
        if output.kv_connector_worker_meta is not None:
            self.reports.append(output.kv_connector_worker_meta.report)

    def empty_step(self, step: Any) -> None:
        with override_forward_context(SimpleNamespace()):
            self.take(self.vllm.no_forward(_scheduled(step)).kv_connector_output)


def _scheduled(step: Any) -> Any:
    return SimpleNamespace(kv_connector_metadata=StepMetadata(step), has_sync_kv_loads=False, finished_req_ids=set())


class RunnerV2Prefill(PrefillRank):
    """A draft's layers run after the target's, as `Hooks.saved` has them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runner = _Runner(self.worker, prefills=True)

    def _step(self, step: Any, prompts: dict[str, Prompt], hooks: Hooks = ONCE) -> None:
        if not step.computes:
            self.runner.empty_step(step)
            return
        values = {layer: self.values(layer, step, prompts) for layer in self.side.layers_of(self.pp_rank, self.model)}
        saved = [*values] if hooks.saved is None else [*hooks.saved]
        drafts = set(self.model.draft_layers)
        with override_forward_context(SimpleNamespace()):
            vllm = self.runner.vllm
            scheduled = _scheduled(step)
            self.runner.connector.handle_preemptions(scheduled.kv_connector_metadata)  # vllm-ascend calls it once more
            vllm.pre_forward(scheduled)
            self._layers([layer for layer in saved if layer not in drafts], set(values) - drafts, values)
            vllm.finish_forward()
            if FINALIZES_LATER and drafts:
                self.runner.take(vllm.post_forward(set(), defer_finalize=True))
            self._layers([layer for layer in saved if layer in drafts], set(values) & drafts, values)
            if FINALIZES_LATER and drafts:
                vllm.finalize_step()
            else:
                self.runner.take(vllm.post_forward(set()))

    def _layers(self, saved: list[int], own: set[int], values: dict[int, Any]) -> None:
        connector = self.runner.connector
        for layer in saved:
            if layer in own:
                connector.wait_for_layer_load(layer_name(layer))
                self.compute(layer, values.pop(layer, []))
                connector.save_kv_layer(layer_name(layer), None, None)
        for layer in own & set(values):
            connector.wait_for_layer_load(layer_name(layer))
            self.compute(layer, values.pop(layer))

    def sent(self) -> tuple[set[str], dict[str, str]]:
        """Takes an empty step."""
        self.runner.empty_step(PrefillStep(computes=False))
        sent, self.runner.sent = self.runner.sent, set()
        reports, self.runner.reports = self.runner.reports, []
        return sent, {name: why for report in reports for name, why in report.failed.items()}

    def metadata_is_bound(self) -> bool:
        return bool(self.runner.connector.has_connector_metadata())


class RunnerV2Decode(DecodeRank):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.runner = _Runner(self.worker, prefills=False)

    def step(self, step: Any) -> None:
        self.runner.empty_step(step)

    def arrivals(self) -> tuple[set[str], set[str], dict[str, str]]:
        """Takes an empty step."""
        self.runner.empty_step(DecodeStep())
        runner = self.runner
        received, runner.received, lost, runner.lost = runner.received, set(), runner.lost, set()
        reports, runner.reports = runner.reports, []
        return received, lost, {ticket: why for report in reports for ticket, why in report.failed.items()}
