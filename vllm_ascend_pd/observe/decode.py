# SPDX-License-Identifier: Apache-2.0
"""What decode traces of a request, in its scheduler and in each rank. Without a folder, all of it does nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.protocol import WriterId
from vllm_ascend_pd.observe.events import Mark, MarkEvent, fingerprint, short_name
from vllm_ascend_pd.observe.prefill import process_of
from vllm_ascend_pd.observe.trace_file import TraceFile

if TYPE_CHECKING:
    from vllm_ascend_pd.core.rank_info import RankInfo


class DecodeTrace:
    """Nothing is traced."""

    def mark(self, what: str, request_id: str, ticket_id: str, writer: WriterId | None = None) -> None:
        """`what` of `observe/events.py` happens to a request now; `writer`: the prefill rank concerned."""

    def close(self, timeout_s: float) -> None:
        pass


UNTRACED = DecodeTrace()


class TracedDecode(DecodeTrace):
    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._lane = file.lane("requests")

    def mark(self, what: str, request_id: str, ticket_id: str, writer: WriterId | None = None) -> None:
        about = "" if writer is None else short_name(f"{writer.pp_rank}/{writer.rank} of {writer.engine_id}")
        args = Mark(short_name(request_id), fingerprint(ticket_id), about)
        self._file.put(MarkEvent(name=what, ph="i", ts=time.monotonic() * 1e6, tid=self._lane, args=args))

    def close(self, timeout_s: float) -> None:
        self._file.close(timeout_s)


def rank_trace(config: ConnectorConfig, identity: RankInfo) -> DecodeTrace:
    """Raises TraceError when it cannot be written."""
    if config.trace_dir is None:
        return UNTRACED
    process = process_of("decode rank", identity.engine_id, identity.pp_rank, identity.rank)
    return TracedDecode(TraceFile(config.trace_dir, process, config.trace_max_bytes))


def scheduler_trace(config: ConnectorConfig, engine_id: str) -> DecodeTrace:
    """Raises TraceError when it cannot be written."""
    if config.trace_dir is None:
        return UNTRACED
    return TracedDecode(TraceFile(config.trace_dir, process_of("decode scheduler", engine_id), config.trace_max_bytes))
