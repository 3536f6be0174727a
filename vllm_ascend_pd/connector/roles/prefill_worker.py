# SPDX-License-Identifier: Apache-2.0
"""The connector in a rank of a prefill engine."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from vllm_ascend_pd.connector.role import ConnectorRole, TransferResults
from vllm_ascend_pd.core.step import PrefillStep, WorkerReport
from vllm_ascend_pd.observe.stats import Data, PrefillStats
from vllm_ascend_pd.prefill.worker import PrefillWorker


class PrefillWorkerRole(ConnectorRole):
    """A prefill rank.

    measured: what the worker's observer counts.
    closing: closes the worker and what it uses.
    always_has_stats: whether there are statistics in every step.
    caches_of: the caches of layers that have several, by the name that `layer_computed` gets.
    """

    def __init__(
        self,
        worker: PrefillWorker,
        measured: PrefillStats,
        closing: ExitStack,
        always_has_stats: bool,
        caches_of: Mapping[str, Sequence[str]],
    ) -> None:
        self._worker = worker
        self._measured = measured
        self._closing = closing
        self._always_has_stats = always_has_stats
        self._caches_of = caches_of

    def preempted(self, step: PrefillStep) -> None:
        self._worker.preempted(step.preempted)

    def start_step(self, step: PrefillStep) -> None:
        self._worker.start_step(step)

    def layer_written(self, layer: str) -> None:
        self._worker.layer_written(layer)

    def layer_computed(self, layer: str) -> None:
        for name in self._caches_of.get(layer, (layer,)):
            self._worker.layer_computed(name)

    def end_step(self, error: BaseException | None) -> None:
        self._worker.forward_ended(error)
        self._worker.end_step()

    def take_results(self, error: BaseException | None) -> TransferResults:
        self._worker.forward_ended(error)
        return TransferResults(sent=self._worker.take_sent())

    def take_report(self) -> WorkerReport | None:
        return self._worker.take_report()

    def take_stats(self) -> Data | None:
        return self._measured.take(self._worker.status) or ({} if self._always_has_stats else None)

    def close(self) -> None:
        self._closing.close()
