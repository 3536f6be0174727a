# SPDX-License-Identifier: Apache-2.0
"""What tests of MultiConnector check on every backend: ours beside another on an engine's scheduler.

The other is vLLM's ExampleConnector, which supports one cache group only and reports nothing.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from harness.engines import EngineConfig, Role
from harness.scheduling import Scheduled, aggregated, make_output, make_request, make_ticket, remembered
from vllm_ascend_pd.connector.metrics import ReportMetadata
from vllm_ascend_pd.core.step import DecodeStep, PrefillStep, WorkerReport

PROMPT = 300
BLOCKS = ([5, 6, 7],)
TP = 2

OF_ANOTHER: dict[str, Any] = {
    "none": None,
    "empty": {},
    "pulled-from-prefill": {"do_remote_decode": True, "remote_engine_id": None, "remote_block_ids": None},
    "pulled-by-decode": {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2]]},
    "unknown": {"lookup": {"in": "a store"}},
}
"""`kv_transfer_params` of requests that are not for ours."""


def transfer_config(role: Role, ours_first: bool, folder: Path) -> dict[str, Any]:
    """`kv_transfer_config` of an engine with both; the other keeps its files in `folder`."""
    beside = (("shared_storage_path", str(folder)),)
    ours = (("trust_network", True),)  # tickets of these tests come from other hosts
    return EngineConfig(role=role, beside=beside, ours_first=ours_first, connector_extra=ours).transfer_config(30001)


def hooks_of(connector: type) -> set[str]:
    """Methods for vLLM that its class defines itself."""
    members = vars(connector).items()
    hooks = {name for name, member in members if inspect.isfunction(member) or isinstance(member, classmethod)}
    return {name for name in hooks if not name.startswith("_")}


def hooks_left_out(multi: type, ours: type) -> set[str]:
    """Hooks of `ours` that `multi` does not hand on, as it leaves them to its base classes."""
    bases = (KVConnectorBase_V1, SupportsHMA)
    asked = {name for name in hooks_of(ours) if any(hasattr(base, name) for base in bases)}
    return {name for name in asked if any(getattr(multi, name) is getattr(base, name, None) for base in bases)}


@dataclass
class Both:
    """A MultiConnector on an engine's scheduler, and what it is made of."""

    multi: MultiConnector
    ours_first: bool

    @property
    def index(self) -> int:
        return 0 if self.ours_first else 1

    @property
    def ours(self) -> Any:
        return self.multi._connectors[self.index]

    def allocated(self, request: Request, blocks: tuple[list[int], ...], external: int) -> None:
        self.multi.update_state_after_alloc(
            request, KVCacheBlocks(tuple([KVCacheBlock(block_id) for block_id in ids] for ids in blocks)), external
        )

    def step(self, *new: Scheduled) -> Any:
        """Our part of the step."""
        return self.multi.build_connector_meta(make_output(new)).metadata[self.index].step

    def report(self, *reports: WorkerReport | None, **finished: set[str]) -> None:
        """Every rank's, of one step, the way they come."""
        told = [KVConnectorOutput(kv_connector_worker_meta=self._worker_meta(each), **finished) for each in reports]
        whole = aggregated(KVOutputAggregator.from_connector(self.multi, TP), told)
        assert whole.kv_connector_output is not None
        self.multi.update_connector_output(whole.kv_connector_output)

    def _worker_meta(self, report: WorkerReport | None) -> MultiKVConnectorWorkerMetadata | None:
        if report is None:
            return None
        ours = ReportMetadata(report)
        return MultiKVConnectorWorkerMetadata((ours, None) if self.ours_first else (None, ours))


def decode_is_served(both: Both) -> None:
    metaserver = "http://127.0.0.1:9/v1/metaserver"
    request = make_request("cmpl-1-0-0a1b2c3d", PROMPT, {"do_remote_prefill": True, "metaserver": metaserver})
    assert both.multi.get_num_new_matched_tokens(request, 0) == (PROMPT, True)
    both.allocated(request, BLOCKS, PROMPT)
    step = both.step()
    assert isinstance(step, DecodeStep)
    [expect] = step.expects
    assert (expect.request_id, expect.blocks) == (request.request_id, BLOCKS[0])

    ranks = (WorkerReport(received={expect.ticket_id: part}) for part in ((20, 8), (10, 3)))
    both.report(*ranks, finished_recving={request.request_id})
    both.allocated(request, BLOCKS, 0)  # decode begins
    assert both.step(Scheduled(request, BLOCKS, PROMPT - 1, 1)).expects == []
    assert both.multi.request_finished_all_groups(request, BLOCKS) == (
        False,
        {"received_bytes": 30, "bytes_before_prefill_end": 11},
    )
    assert remembered(both.ours._role) == {}


def prefill_pushes(both: Both) -> None:
    ticket = make_ticket(PROMPT, [1, 2, 3])
    request = make_request("cmpl-1-0-0a1b2c3d", PROMPT, msgspec.to_builtins(ticket))
    plain = make_request("cmpl-2-0-0a1b2c3d", PROMPT, None)
    for each, blocks in ((request, BLOCKS), (plain, ([2, 3, 4],))):
        assert both.multi.get_num_new_matched_tokens(each, 0) == (0, False)
        both.allocated(each, blocks, 0)
    step = both.step(Scheduled(request, BLOCKS, 0, PROMPT), Scheduled(plain, ([2, 3, 4],), 0, PROMPT))
    assert isinstance(step, PrefillStep)
    [send] = step.sends
    assert (send.request_id, send.start, send.stop, send.blocks) == (request.request_id, 0, PROMPT, BLOCKS)

    assert both.multi.request_finished_all_groups(request, BLOCKS) == (True, None)
    assert both.multi.request_finished_all_groups(plain, ([2, 3, 4],)) == (False, None)
    both.report(None, WorkerReport(failed={"another": "reason"}), finished_sending={request.request_id})
    both.step()
    assert remembered(both.ours._role) == {}


def others_are_left_alone(both: Both, params: Any) -> None:
    """However many blocks ours is told of: vLLM 0.23 and vllm-ascend tell it of none."""
    other = make_request("cmpl-2-0-0a1b2c3d", PROMPT, params)
    assert both.multi.get_num_new_matched_tokens(other, 0) == (0, False)
    both.allocated(other, ([],), 0)
    both.allocated(other, ([5, 6, 7, 8, 9],), 0)
    step = both.step(Scheduled(other, BLOCKS, 0, PROMPT))
    assert not (step.sends if isinstance(step, PrefillStep) else step.expects)
    both.report(None, None, finished_recving={other.request_id})
    assert both.multi.request_finished_all_groups(other, BLOCKS) == (False, None)
    both.report(None, None, finished_sending={other.request_id})
    assert remembered(both.ours._role) == {}
