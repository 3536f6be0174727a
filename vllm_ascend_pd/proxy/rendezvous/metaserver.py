# SPDX-License-Identifier: Apache-2.0
"""The metaserver: the routes to which decode engines post tickets, failures, and questions about open tickets."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from vllm_ascend_pd.core.metaserver import FAILURE_SUFFIX, WAITING_SUFFIX
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.proxy.rendezvous.failure_posts import FailurePosts
from vllm_ascend_pd.proxy.rendezvous.observer import Observer
from vllm_ascend_pd.proxy.rendezvous.open_tickets import OpenTickets
from vllm_ascend_pd.proxy.rendezvous.post_reader import PostReader
from vllm_ascend_pd.proxy.rendezvous.prefill_requests import PrefillRequests
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.rendezvous.ticket_posts import TicketPosts
from vllm_ascend_pd.proxy.routing.checks import StallWatch
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool


class Metaserver:
    """Builds the three routes around one reader of posts and one table of open tickets."""

    def __init__(
        self,
        request_table: RequestTable,
        pool: EnginePool,
        watch: StallWatch,
        observer: Observer,
        *,
        token: str | None,
        read_timeout: float,
        max_ticket_bytes: int,
        prefill_attempts: int,
    ) -> None:
        """
        Args:
            request_table: the client requests that tickets are matched with.
            pool: the prefill engines.
            watch: ends prefills at engines that have stopped.
            observer: receives reports about tickets and prefills.
            token: bearer token of decode engines; None if they need none.
            read_timeout: seconds for a post to arrive.
            max_ticket_bytes: limit of a ticket.
            prefill_attempts: how many prefills one prompt may have.
        """
        reader = PostReader(request_table, token=token, read_timeout=read_timeout)
        prefill_requests = PrefillRequests(pool, watch, observer, attempts=prefill_attempts)
        self.open_tickets = OpenTickets(reader)
        self.tickets = TicketPosts(
            reader, self.open_tickets, prefill_requests, observer, max_ticket_bytes=max_ticket_bytes
        )
        self.failures = FailurePosts(reader, prefill_requests)

    def routes(self) -> list[BaseRoute]:
        return [
            Route(METASERVER_PATH, self.tickets.post_ticket, methods=["POST"]),
            Route(METASERVER_PATH + FAILURE_SUFFIX, self.failures.post_failure, methods=["POST"]),
            Route(METASERVER_PATH + WAITING_SUFFIX, self.open_tickets.post_question, methods=["POST"]),
        ]
