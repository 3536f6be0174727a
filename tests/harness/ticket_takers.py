# SPDX-License-Identifier: Apache-2.0
"""A prefill engine's listener that answers as a test says, on a real side channel."""

from collections import deque
from collections.abc import Callable
from typing import Any

from harness.channels import HOST
from vllm_ascend_pd.core.protocol import (
    Acknowledged,
    AskTicket,
    Message,
    OfferTicket,
    Problem,
    ReleasePrompt,
    TicketRefused,
    TicketTaken,
)
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.transport.side_channel import ClientConnection, SideChannelServer

TAKEN = TicketTaken()
NOT_YET = TicketRefused("no room for it", retry=True)
UNKNOWN = TicketRefused("not known", retry=True)
REFUSED = TicketRefused("it is for another prompt", retry=False)


class TicketTaker:
    """`offers`, `questions`, `releases`: the answers to these, in order. The last one repeats."""

    def __init__(
        self,
        offers: list[Message] | None = None,
        questions: list[Message] | None = None,
        secret: Secret | None = None,
        releases: list[Message] | None = None,
    ) -> None:
        self.got: list[Any] = []
        """All messages, in order."""
        self.hold_s = 480.0
        """How long it says that it holds prompts."""
        self._answers: dict[type, deque[Message]] = {
            OfferTicket: deque(offers or [TAKEN]),
            AskTicket: deque(questions or [TAKEN]),
            ReleasePrompt: deque(releases or [Acknowledged()]),
        }
        self._server = SideChannelServer(HOST, 0, self._handle, name="test-ticket-taker", secret=secret)
        self.port = int(self._server.endpoint.rpartition(":")[2])

    @property
    def params(self) -> dict[str, Any]:
        """What a router hands to decode of this engine's answer."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "prefill-0-12ab",
            "transfer_id": "t-1",
            "ticket_host": HOST,
            "ticket_port": self.port,
            "hold_timeout_s": self.hold_s,
        }

    def of(self, kind: type) -> list[Any]:
        """The messages of one kind."""
        return [message for message in self.got if isinstance(message, kind)]

    def close(self) -> None:
        self._server.close()

    def _handle(self, message: Message, connection: ClientConnection) -> Message:
        self.got.append(message)
        answers = self._answers.get(type(message))
        if answers is None:
            return Problem("unexpected")
        return answers.popleft() if len(answers) > 1 else answers[0]


MakeTaker = Callable[..., TicketTaker]
