# SPDX-License-Identifier: Apache-2.0
"""What the schedulers of both sides ask of the engine that they run in.

`connector/vllm_blocks.py` and `connector/vllm_requests.py` answer for vLLM.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_ascend_pd.core.prompt_digest import NamesPrompt, PromptDigest


@dataclass(frozen=True)
class EngineSteps:
    """How the engine steps."""

    max_tokens: int  # most prompt tokens of a step
    chunked: bool = True  # whether a prompt may be computed in several steps
    in_flight: int = 1  # most steps that are in flight
    engines: int = 1  # data-parallel engines that step together: each one's prompts hold up the others


class ScheduledRequest(Protocol):
    """A request of the engine: the fields that the schedulers read."""

    request_id: str
    # From outside: of any type and content.
    kv_transfer_params: Any
    num_prompt_tokens: int
    num_output_tokens: int
    # Of the prompt and of what was generated after it.
    num_tokens: int
    # How many of these have KV in the request's blocks, when a step begins.
    num_computed_tokens: int
    max_tokens: int
    # Whether the engine computes the whole prompt, whatever its prefix cache has.
    skip_reading_prefix_cache: bool
    # Whether the client may add to the prompt while the request runs.
    resumable: bool
    # The trace that the request belongs to. None if the engine does not trace.
    trace_headers: Mapping[str, str] | None


class EngineRequests(Protocol):
    """Questions about requests, and the few changes that the schedulers make to them."""

    names_all_preempted: bool
    """Whether a step's output names every request that was preempted."""

    def external_id(self, request: ScheduledRequest) -> str:
        """Returns the id that the API server gave the request, which is how a proxy knows it."""

    def shared_id(self, request: ScheduledRequest) -> str:
        """What `external_id` has in common for all prompts and all answers of one HTTP request."""

    def was_aborted(self, request: ScheduledRequest) -> bool:
        """Whether the client, or the router in its place, ended the request."""

    def ended_in_error(self, request: ScheduledRequest) -> bool:
        """Whether the engine itself ended the request, with an error."""

    def has_output_in_flight(self, request: ScheduledRequest) -> bool:
        """Whether a request that was preempted must not start again yet: it has output in flight."""

    def preemptions(self, request: ScheduledRequest) -> tuple[int, bool]:
        """Returns how often the request was preempted, and whether it is preempted now."""

    def compute_again(self, request: ScheduledRequest, token: int) -> None:
        """Has the engine compute the request's tokens from `token` on again."""

    def cached_tokens(self, request: ScheduledRequest) -> int:
        """Returns how many tokens of its prompt were cached when it was last scheduled from the beginning."""

    def own_cached_tokens(self, request: ScheduledRequest) -> int:
        """As `cached_tokens`, without those that another connector loads."""

    def set_cached_tokens(self, request: ScheduledRequest, tokens: int) -> None:
        """Reports `tokens` of the prompt as cached to the client: prefill delivered the prompt and had them cached."""

    def keep_own_cached_tokens(self, request: ScheduledRequest) -> None:
        """Reports only what this engine had cached itself, since prefill delivered nothing."""

    def digest(self, request: ScheduledRequest, num_tokens: int, ticket_id: str) -> PromptDigest:
        """Returns the digest of the first `num_tokens` tokens of the prompt."""

    def check_prompt(self, request: ScheduledRequest, named: NamesPrompt) -> None:
        """Raises TicketError if another prompt than the request's is meant."""

    def token_ids(self, request: ScheduledRequest) -> list[int] | None:
        """Returns the prompt's token ids if the prompt is nothing but text, else None."""

    def drop_last_prompt_token(self, request: ScheduledRequest) -> None:
        """Shortens the prompt by a token. Call it before the prompt is looked up in the prefix cache."""


class EngineBlocks(Protocol):
    """The engine's KV blocks and its prefix cache."""

    def bind(self, pool: Any) -> None:
        """Takes the engine's block pool."""

    def add_request(self, request: ScheduledRequest) -> None:
        """Takes a new request, before it is looked up in the prefix cache."""

    def take_adapters(self) -> None:
        """Takes what has been read of adapters since the last call."""

    def is_ready(self, request: ScheduledRequest) -> bool:
        """Whether the request's adapter has been read, if it has one. If not, it must not be scheduled."""

    @property
    def weight_updates(self) -> dict[str, int]:
        """By rank: the number of its latest weight update after which the prefix cache was emptied."""

    def weights_updated(self, updates: dict[str, int]) -> bool:
        """Takes the ranks' numbers of weight updates. Empties the prefix cache if one of them is new, and
        returns whether one is."""

    def drop_cached(self) -> int:
        """Empties the prefix cache. Later requests do not find blocks of those that there are. Returns how many blocks
        were cached."""

    def allocated(self, request: ScheduledRequest) -> None:
        """Takes note of a request's blocks. After the next `drop_cached` no later request may find them."""

    def evict(self, block_ids: Collection[int]) -> None:
        """Takes blocks out of the prefix cache: their KV is wrong."""

    def have_prompt(self, request: ScheduledRequest, num_computed_tokens: int) -> bool:
        """Whether the prefix cache has the whole prompt.

        `num_computed_tokens`: how many of the prompt's tokens the engine takes from it. That is never the whole prompt,
        since the engine needs the last token's logits.
        """

    def cached_tokens(self, request: ScheduledRequest) -> int:
        """Returns about how many of the prompt's tokens the prefix cache has. An estimate where there are windows; 0
        where there are states."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keeps the blocks from being reused until `release`."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Undoes one `hold` of each block."""
