# SPDX-License-Identifier: Apache-2.0
"""Tells decode engines which of their tickets still wait for prefill, so that their timeouts exclude that time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vllm_ascend_pd.core.metaserver import WaitingAnswer, WaitingQuestion
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.rendezvous.post_reader import PostReader, PostRefused

# `MAX_ASKED` ids of 64 characters each, and the JSON around them.
_MAX_QUESTION_BYTES = 128 * 1024
_decode = msgspec.json.Decoder(WaitingQuestion).decode


class OpenTickets:
    """The tickets whose prefill has not ended. Only `held` changes it. The event loop's thread owns it."""

    def __init__(self, reader: PostReader) -> None:
        self._reader = reader
        self._open: Counter[str] = Counter()
        """Number of posts that wait, by ticket id. A ticket posted again may count twice."""

    @owned
    @contextmanager
    def held(self, ticket_id: str) -> Iterator[None]:
        """A ticket is open for the time of the `with` block: it waits in the queue, or a healthy engine prefills it.
        `StallWatch` ends prefills at other engines."""
        self._open[ticket_id] += 1
        try:
            yield
        finally:
            self._open[ticket_id] -= 1
            if not self._open[ticket_id]:
                del self._open[ticket_id]

    async def post_question(self, request: Request) -> Response:
        """Answers 200 with those of the asked tickets that are open; 400, 401 and 503 as for a ticket.

        Only engines that have a ticket know its id, so an engine learns nothing about other tickets.
        """
        try:
            question = await self._reader.read(request, _MAX_QUESTION_BYTES, _decode, "question")
        except PostRefused as refused:
            return refused.answer
        waiting = [ticket_id for ticket_id in question.ticket_ids if ticket_id in self._open]
        return Response(msgspec.json.encode(WaitingAnswer(waiting)), media_type="application/json")
