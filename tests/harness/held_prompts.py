# SPDX-License-Identifier: Apache-2.0
"""A prefill engine's scheduler whose prompts a router asks for first, and a decode engine that offers tickets to it."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.clock import Clock
from harness.engines import Role
from harness.real_scheduler import BLOCK, RealScheduler
from harness.scheduling import FOR_A_PULLING_CONNECTOR, make_request, remembered
from harness.tickets import ticket_with
from harness.waiting import wait_for
from vllm_ascend_pd.connector.vllm_requests import VllmRequests
from vllm_ascend_pd.core.protocol import AskTicket, Message, OfferTicket, ReleasePrompt, TicketRefused
from vllm_ascend_pd.core.step import PrefillStep, WorkerReport
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.prefill.ticket_listener import EARLY_S
from vllm_ascend_pd.transport.side_channel import SideChannelClient

PREFILL_FIRST = FOR_A_PULLING_CONNECTOR["prefill"]
"""As vLLM's NixlConnector has it, and its routers send it."""

PROMPT = list(range(100, 140))
OTHER = list(range(200, 240))


class Prefill(RealScheduler):
    """A prefill engine's scheduler, and a decode engine that offers tickets to it."""

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__(Role.PREFILL, model, **options)
        self.client = SideChannelClient()
        self.held = self.connector._role._held
        self.clock = Clock()
        self.held._clock = self.held.listener._clock = self.clock.monotonic
        self.all_free = self.pool.get_num_free_blocks()

    def ask(self, message: Message) -> Any:
        """What prefill's listener answers."""
        answers: list[Any] = []
        self.client.request(f"tcp://{self.held.listener.host}:{self.held.listener.port}", message, 10.0, answers.append)
        return until(lambda: answers and answers[0])

    def offer(self, transfer_id: str, ticket: Ticket) -> Any:
        return self.ask(OfferTicket(self.engine_id, transfer_id, ticket))

    def release_of(self, transfer_id: str, ticket: Ticket, reason: str = "decode computes it") -> ReleasePrompt:
        """Says that this ticket will not come."""
        named = (ticket.ticket_id, ticket.num_tokens, ticket.prompt)
        return ReleasePrompt(self.engine_id, transfer_id, reason, *named)

    def fate(self, transfer_id: str, ticket: Ticket) -> Any:
        return self.ask(AskTicket(self.engine_id, transfer_id, ticket.ticket_id))

    @property
    def engine_id(self) -> str:
        return self.held._engine_id

    def run(self, report: WorkerReport | None = None, sent: set[str] = frozenset()) -> tuple[PrefillStep, list[Any]]:
        """A step of vLLM: what the ranks are told, and its outputs."""
        said = {"finished_sending": sent} if sent else {}
        output, outputs = self.step(report, **said)
        return output.kv_connector_metadata.step, outputs

    def wait_for_prompts(self) -> None:
        """A step of vLLM once no ticket may wait for its prompt any longer."""
        self.clock.now += EARLY_S
        self.run()

    def answered(self, request_id: str, prompt: list[int] = PROMPT, params: Any = PREFILL_FIRST) -> dict[str, Any]:
        """Computes a prompt in one step, and returns the `kv_transfer_params` of its response."""
        self.add(request_id, prompt, params)
        _, [output] = self.run()
        assert output.finished
        return output.kv_transfer_params

    @property
    def free(self) -> int:
        return self.pool.get_num_free_blocks()

    def close(self) -> None:
        self.client.close()
        super().close()


@pytest.fixture
def prefill(scheduled_model: Path) -> Iterator[Prefill]:
    scheduler = Prefill(scheduled_model)
    yield scheduler
    scheduler.close()


def until(wanted: Callable[[], Any]) -> Any:
    return wait_for(wanted, bool, 10.0, every_s=0.005)


def ticket_for(prompt: list[int], groups: int = 1, **changes: Any) -> Ticket:
    """Decode's ticket for this prompt, for blocks of the same length as prefill's."""
    ticket_id = secrets.token_hex(16)
    num_tokens = changes.get("num_tokens", len(prompt))
    request = make_request("d", prompt)
    made = ticket_with(
        request_id="d",
        remote_block_ids=[[100 + n for n in range(-(-num_tokens // BLOCK))] for _ in range(groups)],
        remote_block_size=[BLOCK] * groups,
        ticket_id=ticket_id,
        num_tokens=num_tokens,
        prompt=VllmRequests().digest(request, num_tokens, ticket_id),
    )
    return msgspec.structs.replace(made, **changes)


def remembered_of(prefill: Prefill) -> dict[str, Any]:
    """What is kept of requests and tickets."""
    return remembered(prefill.connector._role, prefill.held)


def refused(prefill: Prefill, transfer_id: str, ticket: Ticket) -> str:
    """Why prefill does not serve the ticket, for good."""
    answer = until(lambda: isinstance(found := prefill.fate(transfer_id, ticket), TicketRefused) and found)
    assert not answer.retry
    return answer.reason
