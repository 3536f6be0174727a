# SPDX-License-Identifier: Apache-2.0
"""What the schedulers of both sides ask of the engine that they run in.

`connector/vllm_requests.py` and `connector/vllm_blocks.py` answer for vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm_ascend_pd.core.prompt_digest import NamesPrompt, PromptDigest


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

    def preemptions(self, request: ScheduledRequest) -> tuple[int, bool]:
        """Returns how often the request was preempted, and whether it is preempted now."""

    def cached_tokens(self, request: ScheduledRequest) -> int:
        """Returns how many tokens of its prompt were cached when it was last scheduled from the beginning."""

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
        """Shortens the prompt by a token. Call it before the request is allocated."""


class EngineBlocks(Protocol):
    """The engine's KV blocks and its prefix cache."""

    @property
    def weight_updates(self) -> dict[str, int]:
        """By rank: the number of its latest weight update after which the prefix cache was emptied."""

    def weights_updated(self, updates: dict[str, int]) -> None:
        """Takes the ranks' numbers of weight updates. Empties the prefix cache if one of them is new."""

    def allocated(self, request: ScheduledRequest) -> None:
        """Takes note of a request's blocks. After the next weight update no later request may find them."""

    def are_cached(self, request: ScheduledRequest, group: int, span: int, first: int, stop: int) -> bool:
        """Whether the prefix cache has the prompt's blocks `[first, stop)` of a cache group.

        `span`: tokens per block. False if prefix caching is off.
        """

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keeps the blocks from being reused until `release`."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Undoes one `hold` of each block."""
