# SPDX-License-Identifier: Apache-2.0
"""The connector in a rank of a decode engine."""

from collections.abc import Mapping
from contextlib import ExitStack

from vllm_ascend_pd.connector.metadata import HandshakeMetadata
from vllm_ascend_pd.connector.role import ConnectorRole, TransferResults
from vllm_ascend_pd.core.step import DecodeStep, WorkerReport
from vllm_ascend_pd.decode.worker import DecodeWorker, encode_description
from vllm_ascend_pd.observe.stats import Data


class DecodeWorkerRole(ConnectorRole):
    """A decode rank.

    settings: of the model, as `EngineDescription` has them.
    fails_by_request: whether vLLM learns of failures by request. Otherwise it learns of them by lost blocks.
    closing: closes the worker and what it uses.
    always_has_stats: whether there are statistics in every step.
    """

    def __init__(
        self,
        worker: DecodeWorker,
        settings: Mapping[str, str],
        fails_by_request: bool,
        closing: ExitStack,
        always_has_stats: bool,
    ) -> None:
        self._worker = worker
        self._settings = dict(settings)
        self._fails_by_request = fails_by_request
        self._closing = closing
        self._always_has_stats = always_has_stats
        self._lost_blocks: set[int] = set()

    def handshake(self) -> HandshakeMetadata:
        return HandshakeMetadata(encode_description(self._worker.description), self._settings)

    def start_step(self, step: DecodeStep) -> None:
        self._worker.start_step(step)

    def take_results(self, error: BaseException | None) -> TransferResults:
        arrivals = self._worker.take_arrivals()
        if self._fails_by_request:  # vLLM learns of a failure when the transfer has ended
            return TransferResults(received=arrivals.finished, failed=arrivals.failed)
        self._lost_blocks |= arrivals.lost_blocks
        return TransferResults(received=arrivals.finished)

    def take_lost_blocks(self) -> set[int]:
        """vLLM ends or reschedules these requests at once, and keeps their blocks until they count as received."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    def take_report(self) -> WorkerReport | None:
        return self._worker.take_report()

    def take_stats(self) -> Data | None:
        return {} if self._always_has_stats else None

    def close(self) -> None:
        self._closing.close()
