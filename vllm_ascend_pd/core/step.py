# SPDX-License-Identifier: Apache-2.0
"""Messages between the scheduler and the ranks of one engine: a step goes down, a report comes up.

Plain data. `connector/metrics.py` wraps it in the classes that vLLM carries.
"""

from collections import Counter
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
    # Per cache group: (start, stop) of the tokens that it completes. A group with longer blocks is behind others. Empty
    # if all complete `[start, stop)`.
    parts: tuple[tuple[int, int], ...] = ()
    # Whether later steps write KV of further tokens behind the prompt's, in its last block.
    grows: bool = False
    # Whether vLLM takes nothing of the prompt back any more. If it may, the transfer does not end with the prompt, but
    # when `PrefillStep.finished` names the request.
    confirmed: bool = True
    # Whether tokens were sent before that vLLM took back.
    again: bool = False
    # Whether earlier steps have computed them: the ticket came after the prompt had ended.
    was_computed: bool = False

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
    # Requests that ended: None, or why their KV is not complete.
    finished: dict[str, str | None] = field(default_factory=dict)
    # Requests in `tickets` of whose prompts a part was there before this step.
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
    # Requests whose end each rank reports again, or for the first time if it has not heard of them: earlier steps were
    # lost on their way to the ranks or back. None: no step was lost.
    report_again: set[str] | None = None

    @property
    def has_news(self) -> bool:
        """Whether a request begins, goes on or ends."""
        return bool(self.tickets or self.sends or self.finished or self.unsent)


@dataclass(frozen=True)
class VerifiedBlocks:
    """The blocks of a ticket whose KV is compared with prefill's checksums."""

    # Per cache group: blocks from that of the first token on that decode does not have cached.
    blocks: tuple[list[int], ...]
    # The ticket's.
    num_tokens: int
    # As `core/checksum.py` has it.
    column_tokens: int


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
    # What to compare with prefill's checksums (`verify_kv`). None: nothing.
    verified: VerifiedBlocks | None = None


@dataclass
class DecodeStep:
    """What the scheduler of a decode engine tells its ranks in one step."""

    # Tickets issued since the last step.
    expects: list[Expect] = field(default_factory=list)
    # Ticket id -> why the scheduler no longer wants its KV.
    cancelled: dict[str, str] = field(default_factory=dict)
    # Ids of tickets whose prefill has ended.
    prefilled: list[str] = field(default_factory=list)
    # Ids of verified tickets whose requests read the KV that has arrived for the first time in this step.
    begun: list[str] = field(default_factory=list)
    # Seconds that this step waits for KV. 0 if it computes something.
    wait_s: float = 0.0
    # Address that wakes the scheduler (`transport/wakeup.py`). "": none.
    wakeup_address: str = ""
    # As in `PrefillStep`.
    weight_updates: dict[str, int] = field(default_factory=dict)
    report_again: set[str] | None = None


@dataclass
class WorkerReport:
    """What the ranks of an engine report to its scheduler after a step."""

    # Request id (prefill) or ticket id (decode) -> why its transfer failed.
    failed: dict[str, str] = field(default_factory=dict)
    # Those of the failed tickets whose failure prefill has reported itself, so its engine is alive.
    by_prefill: set[str] = field(default_factory=set)
    # Those of the failed tickets whose KV has arrived and is not what prefill computed.
    wrong: set[str] = field(default_factory=set)
    # Id of a request that must end -> why, and its blocks: its KV was right on arrival, and is not when it is read.
    overwritten: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    # Results of `verify_kv` (`core/reasons.py`, `Verified`) -> requests, summed over ranks.
    verified: dict[str, int] = field(default_factory=dict)
    # Ticket id -> (bytes, bytes that arrived before prefill ended), summed over ranks.
    received: dict[str, tuple[int, int]] = field(default_factory=dict)
    # For each ticket in `received`: how many tokens prefill had in its prefix cache.
    cached: dict[str, int] = field(default_factory=dict)
    # Rank -> number of weight updates since it started to serve, if that number is new.
    weight_updates: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.failed or self.received or self.overwritten or self.verified or self.weight_updates)

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
        wrong, overwritten = self.wrong | other.wrong, {**other.overwritten, **self.overwritten}
        verified = dict(Counter(self.verified) + Counter(other.verified))
        failed, by_prefill = {**other.failed, **self.failed}, self.by_prefill | other.by_prefill
        return WorkerReport(failed, by_prefill, wrong, overwritten, verified, received, cached, updates)
