# SPDX-License-Identifier: Apache-2.0
"""Messages between the scheduler and the ranks of one engine: a step goes down, a report comes up.

Plain data. `connector/metadata.py` wraps it in the classes that vLLM carries.
"""

from dataclasses import dataclass, field

from vllm_ascend_pd.core.ticket import Ticket


@dataclass(frozen=True)
class Send:
    """Tokens `[start, stop)` of a request's prompt become complete in this step."""

    request_id: str
    start: int
    stop: int
    # Per cache group: ids of the blocks that hold the group's tokens, from the block of its first one on.
    blocks: tuple[list[int], ...]
    # Whether the prompt ends here.
    last: bool
    # Per cache group: its tokens as (start, stop), where they differ: groups with long blocks are behind others.
    parts: tuple[tuple[int, int], ...] = ()

    def tokens(self, group: int) -> tuple[int, int]:
        """Returns (start, stop) of the tokens that a cache group completes."""
        return self.parts[group] if self.parts else (self.start, self.stop)


def rank_address(address: str, pp_rank: int, rank: int) -> str:
    """Returns where a rank is woken. `address`: the engine's. `rank`: of the pipeline stage."""
    return f"{address}-{pp_rank}-{rank}"


@dataclass
class PrefillStep:
    """What the scheduler of a prefill engine tells its ranks in one step. Mappings are by request id."""

    # Requests that start, with their tickets.
    tickets: dict[str, Ticket] = field(default_factory=dict)
    # For each request in `tickets`: how many tokens of its prompt the engine had in its prefix cache.
    cached_tokens: dict[str, int] = field(default_factory=dict)
    # Prompt tokens that this step completes.
    sends: list[Send] = field(default_factory=list)
    # Requests that ended: None, or why they ended before their prompt was computed.
    finished: dict[str, str | None] = field(default_factory=dict)
    # Requests in `tickets` of whose prompts earlier steps have computed a part.
    late: set[str] = field(default_factory=set)
    # Requests that ended and no ticket came for: vLLM may free their blocks.
    unsent: set[str] = field(default_factory=set)
    # Whether requests have ended whose blocks wait for a ticket.
    awaits_tickets: bool = False
    # Where a rank is woken when a ticket comes: `rank_address` makes each rank's of it. "": nowhere.
    wakeup_address: str = ""
    # Whether the model runs in this step.
    computes: bool = True
    # Requests whose blocks change hands in this step.
    preempted: set[str] = field(default_factory=set)
    # Seconds that this step waits for blocks to be sent. 0 if it computes something.
    wait_s: float = 0.0
    # Rank -> number of its latest weight update after which the scheduler emptied the prefix cache.
    weight_updates: dict[str, int] = field(default_factory=dict)

    @property
    def has_news(self) -> bool:
        """Whether a request begins, goes on or ends."""
        return bool(self.tickets or self.sends or self.finished or self.unsent)


@dataclass(frozen=True)
class Expect:
    """A ticket that the scheduler of a decode engine issued: its ranks expect KV for it."""

    request_id: str
    ticket_id: str
    # Digest of the ticket, which grant requests must repeat.
    digest: str
    # Blocks of all cache groups that are lost if the transfer fails: those not in the prefix cache.
    blocks: list[int]
    # How many tokens of the prompt decode has in its own prefix cache.
    cached_tokens: int = 0


@dataclass
class DecodeStep:
    """What the scheduler of a decode engine tells its ranks in one step."""

    # Tickets issued since the last step.
    expects: list[Expect] = field(default_factory=list)
    # Ticket id -> why the scheduler no longer wants its KV.
    cancelled: dict[str, str] = field(default_factory=dict)
    # Ids of tickets whose prefill has ended.
    prefilled: list[str] = field(default_factory=list)
    # Seconds that this step waits for KV. 0 if it computes something.
    wait_s: float = 0.0
    # Address that wakes the scheduler (`transport/wakeup.py`). "": none.
    wakeup_address: str = ""
    # As in `PrefillStep`.
    weight_updates: dict[str, int] = field(default_factory=dict)


@dataclass
class WorkerReport:
    """What the ranks of an engine report to its scheduler after a step."""

    # Request id (prefill) or ticket id (decode) -> why its transfer failed.
    failed: dict[str, str] = field(default_factory=dict)
    # Ticket id -> (bytes, bytes that arrived before prefill ended), summed over ranks.
    received: dict[str, tuple[int, int]] = field(default_factory=dict)
    # For each ticket in `received`: how many tokens prefill had in its prefix cache.
    cached: dict[str, int] = field(default_factory=dict)
    # Rank -> number of weight updates since it started to serve, if that number is new.
    weight_updates: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.failed or self.received or self.weight_updates)

    def merge(self, other: "WorkerReport") -> "WorkerReport":
        """Returns one report for the ranks of both. Changes neither."""
        received = dict(self.received)
        for ticket_id, (num_bytes, before_end) in other.received.items():
            mine = received.get(ticket_id, (0, 0))
            received[ticket_id] = (mine[0] + num_bytes, mine[1] + before_end)
        cached = dict(self.cached)
        for ticket_id, tokens in other.cached.items():
            cached[ticket_id] = min(tokens, cached.get(ticket_id, tokens))
        updates = {**self.weight_updates, **other.weight_updates}  # their ranks differ
        return WorkerReport({**other.failed, **self.failed}, received, cached, updates)
