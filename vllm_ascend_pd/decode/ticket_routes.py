# SPDX-License-Identifier: Apache-2.0
"""The ways of a ticket to prefill: over a metaserver, or straight to the engine that holds the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from vllm_ascend_pd.core.metaserver import TransferFailure
from vllm_ascend_pd.core.prompt_digest import NamesPrompt
from vllm_ascend_pd.core.ticket import Ticket, names_prefill
from vllm_ascend_pd.decode.metaserver import MetaserverClient, PostOutcome
from vllm_ascend_pd.decode.prefill_client import PrefillClient
from vllm_ascend_pd.decode.routed_prompt import PromptNameError, RoutedPrompt


class RouteError(ValueError):
    """A request names no way that its ticket may take. The text is the reason."""


class TicketRoute(Protocol):
    """The way of one request's ticket. No method waits for the network."""

    def send(self, ticket: Ticket, token_ids: Sequence[int]) -> None:
        """Sends the ticket. `TicketRoutes.poll` returns the outcome. `token_ids`: the prompt, if it is wanted."""

    def ended(self, ticket: Ticket, failure: str | None) -> None:
        """The transfer has ended, before or after the outcome. `failure`: why it failed; None: the KV is there."""

    def report(self, failure: TransferFailure) -> None:
        """A rank noticed that the transfer has failed."""


class TicketRoutes:
    """Finds the route of each ticket. The scheduler's thread owns it.

    metaserver: posts tickets to metaservers.
    prefill: hands tickets to prefill engines that hold their prompts.
    """

    def __init__(self, metaserver: MetaserverClient, prefill: PrefillClient) -> None:
        self._metaserver = metaserver
        self._prefill = prefill

    def of(self, params: Mapping[str, Any]) -> TicketRoute:
        """Returns the way that a request's `kv_transfer_params` name. Raises RouteError."""
        if names_prefill(params):
            try:
                return _ToPrefill(self._prefill, self._prefill.parse(params))
            except PromptNameError as error:
                raise RouteError(str(error)) from None
        url = params.get("metaserver")
        if not isinstance(url, str):
            raise RouteError("kv_transfer_params has do_remote_prefill but no metaserver URL")
        if (refused := self._metaserver.check(url)) is not None:
            raise RouteError(refused)
        return _OverMetaserver(self._metaserver, url)

    def no_ticket(self, params: Mapping[str, Any], named: NamesPrompt, reason: str) -> None:
        """No ticket will be issued for a request whose prompt a prefill engine holds: tells that engine."""
        with suppress(PromptNameError):  # nobody that this engine may talk to
            self._prefill.release(self._prefill.parse(params), named, reason)

    def poll(self) -> list[PostOutcome]:
        """The outcomes since the last call."""
        return [*self._metaserver.poll(), *self._prefill.poll()]

    def close(self) -> None:
        try:
            self._metaserver.close()
        finally:
            self._prefill.close()


class _OverMetaserver:
    def __init__(self, client: MetaserverClient, url: str) -> None:
        self._client = client
        self._url = url

    def send(self, ticket: Ticket, token_ids: Sequence[int]) -> None:
        self._client.post(ticket.ticket_id, self._url, {**msgspec.to_builtins(ticket), "token_ids": token_ids})

    def ended(self, ticket: Ticket, failure: str | None) -> None:
        if failure is not None:
            self._client.cancel(ticket.ticket_id)

    def report(self, failure: TransferFailure) -> None:
        self._client.report_failure(self._url, failure)


class _ToPrefill:
    """The engine that holds the prompt has computed it: no other one is asked."""

    def __init__(self, client: PrefillClient, prompt: RoutedPrompt) -> None:
        self._client = client
        self._prompt = prompt

    def send(self, ticket: Ticket, token_ids: Sequence[int]) -> None:
        self._client.offer(ticket, self._prompt)

    def ended(self, ticket: Ticket, failure: str | None) -> None:
        self._client.end(ticket.ticket_id)
        if failure is not None:
            self._client.release(self._prompt, ticket, failure)

    def report(self, failure: TransferFailure) -> None:
        """`ended` tells the engine."""
