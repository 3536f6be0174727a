# SPDX-License-Identifier: Apache-2.0
"""One request's transfer on a prefill rank.

Whether it may write, and whether it has failed, is in its `PrefillTicket`, which three threads share. The other fields
name the thread that owns them. The control thread reports to the model's thread by an `Outcome` how a transfer ended.
"""

from __future__ import annotations

import functools
import secrets
from typing import TYPE_CHECKING, TypeAlias

from vllm_ascend_pd.core.prefill_ticket import PrefillTicket
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.weights import NOTHING_KNOWN, Weights
from vllm_ascend_pd.device.event import Event
from vllm_ascend_pd.prefill.checksums import StepChecksums

if TYPE_CHECKING:
    from vllm_ascend_pd.prefill.sender import Sender


class Transfer:
    """What becomes of one ticket on one prefill rank."""

    def __init__(
        self,
        request_id: str,
        ticket: Ticket,
        sender: Sender,
        state: PrefillTicket,
        cached_tokens: int = 0,
        weights: Weights = NOTHING_KNOWN,
    ) -> None:
        # Fixed. Any thread reads it.

        self.request_id = request_id
        self.ticket = ticket
        # Writes to the decode engine that issued the ticket.
        self.sender = sender
        # A secret of this rank and the decode ranks that it asks.
        self.number = secrets.randbits(63)
        # How many tokens of the prompt this engine had in its prefix cache.
        self.cached_tokens = cached_tokens
        # The weights that prefill had when the transfer began.
        self.weights = weights
        # Whether it may write, and why it has failed.
        self.state = state

        # The model's thread owns it.

        # The end of the step in which the prompt ends, draft included. None before. The sender reads it when a write
        # has ended.
        self.prompt_end: Event | None = None
        # What was taken of its KV for `verify_kv`: one entry for each step and geometry. Empty if it is not verified.
        # The control thread reads it when no write follows.
        self.checksums: list[StepChecksums] = []
        # As in `Send`. The control thread reads it when no write follows.
        self.grows = False
        # Whether tokens were sent before that vLLM took back. The sender reads it, too.
        self.again = False
        # Whether vLLM is done with the request.
        self.released = False
        # Whether nothing reads the request's blocks any more.
        self.is_over = False

        # The sender's thread owns it.

        # Whether no write follows. The control thread reads it.
        self.writing_ended = False

        # The control thread owns it.

        # Whether decode has been notified, or cannot be reached.
        self.is_notified = False

    @functools.cached_property
    def digest(self) -> str:
        """The ticket's digest. Computed when decode is first asked, so not on the model's thread."""
        return self.ticket.digest()


Outcome: TypeAlias = tuple[Transfer, bool]
"""A transfer that decode was notified of, and whether nothing reads the request's blocks any more. If something may,
the transfer has failed, and another outcome follows."""
