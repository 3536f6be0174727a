# SPDX-License-Identifier: Apache-2.0
"""What scheduler and workers of one engine tell each other, step by step.

Plain data that vLLM carries: downwards as connector metadata, upwards as worker metadata.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_ascend_pd.core.ticket import Ticket


@dataclass(frozen=True)
class Send:
    """Tokens `[start, stop)` of a request become complete in this step. `blocks`: per cache group, the ids of
    the blocks that hold them, from the block that holds token `start` on. `last`: the prompt ends here."""

    request_id: str
    start: int
    stop: int
    blocks: tuple[list[int], ...]
    last: bool


@dataclass
class PrefillStep(KVConnectorMetadata):
    """A prefill step. `cached_tokens`: for each request in `tickets`, how many of its prompt's tokens the engine had in
    its prefix cache. `finished`: request id -> None, or why it ended before its prompt was computed. `wait_s`: how
    long it waits until blocks may be freed, 0 if it computes something. `weight_updates`: rank -> the number of its
    weight updates that the prefix cache was emptied for when this step was made."""

    tickets: dict[str, Ticket] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    sends: list[Send] = field(default_factory=list)
    finished: dict[str, str | None] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    wait_s: float = 0.0
    weight_updates: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Expect:
    """A ticket that decode issued, with its first attempt. `blocks`: what is lost if it fails (the uncached part, of
    all cache groups). `cached_tokens`: of the prompt, what decode has in its own prefix cache."""

    request_id: str
    ticket_id: str
    attempt: int
    digest: str
    blocks: list[int]
    cached_tokens: int = 0


@dataclass
class DecodeStep(KVConnectorMetadata):
    """A decode step. `cancelled`: ticket id -> reason; `prefilled`: tickets whose prefill ended. `wait_s`: how long
    it waits for KV, 0 if it computes something. `doorbell`: see `transport/wakeup.py`; "": there is none.
    `weight_updates`: as in `PrefillStep`."""

    expects: list[Expect] = field(default_factory=list)
    cancelled: dict[str, str] = field(default_factory=dict)
    prefilled: list[str] = field(default_factory=list)
    wait_s: float = 0.0
    doorbell: str = ""
    weight_updates: dict[str, int] = field(default_factory=dict)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What ranks report upwards. `failed`: request id (prefill) or ticket id (decode) -> reason.
    `received`: ticket id -> (bytes, bytes that were here before prefill ended), summed over ranks.
    `given_up`: ticket id -> (attempt, why it failed); another attempt may follow.
    `cached`: ticket id -> tokens that prefill had cached, for each ticket in `received`.
    `weight_updates`: rank -> how often its weights have been updated since it started to serve, if that is new."""

    failed: dict[str, str] = field(default_factory=dict)
    received: dict[str, tuple[int, int]] = field(default_factory=dict)
    given_up: dict[str, tuple[int, str]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    weight_updates: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.failed or self.received or self.given_up or self.weight_updates)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        received = dict(self.received)
        for ticket_id, (num_bytes, before_end) in other.received.items():
            mine = received.get(ticket_id, (0, 0))
            received[ticket_id] = (mine[0] + num_bytes, mine[1] + before_end)
        given_up = dict(self.given_up)
        for ticket_id, other_attempt in other.given_up.items():
            if ticket_id not in given_up or given_up[ticket_id][0] < other_attempt[0]:
                given_up[ticket_id] = other_attempt
        cached = dict(self.cached)
        for ticket_id, tokens in other.cached.items():
            cached[ticket_id] = min(tokens, cached.get(ticket_id, tokens))
        updates = {**self.weight_updates, **other.weight_updates}  # of other ranks
        return WorkerReport({**other.failed, **self.failed}, received, given_up, cached, updates)


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """A decode rank's `RankDescription`, encoded: it crosses processes and is read by no one in between."""

    encoded: bytes
    settings: dict[str, str] = field(default_factory=dict)
    """As `EngineDescription` has them. All ranks have the same."""
