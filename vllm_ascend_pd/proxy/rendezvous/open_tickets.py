# SPDX-License-Identifier: Apache-2.0
"""Which tickets wait for prefill, for the decode engines that ask. Time in a queue for prefill does not count there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vllm_ascend_pd.core.metaserver import WaitingAnswer, WaitingQuestion
from vllm_ascend_pd.proxy.rendezvous.post_reader import PostReader, PostRefused

# `MAX_ASKED` ids of 64 characters, and what is around them.
_MAX_QUESTION_BYTES = 128 * 1024
_decode = msgspec.json.Decoder(WaitingQuestion).decode


class OpenTickets:
    def __init__(self, inbox: PostReader) -> None:
        self._inbox = inbox
        self._open: Counter[str] = Counter()

    @contextmanager
    def held(self, ticket_id: str) -> Iterator[None]:
        """While a ticket waits in line, or an engine that is well prefills it: `PrefillWatch` ends the others."""
        self._open[ticket_id] += 1
        try:
            yield
        finally:
            self._open[ticket_id] -= 1
            if not self._open[ticket_id]:
                del self._open[ticket_id]

    async def post_question(self, request: Request) -> Response:
        """200 with those of the tickets that are held; 400, 401 and 503 as for a ticket. An id is known to those alone
        who have the ticket."""
        try:
            question = await self._inbox.read(request, _MAX_QUESTION_BYTES, _decode, "question")
        except PostRefused as refused:
            return refused.answer
        waiting = [ticket_id for ticket_id in question.ticket_ids if ticket_id in self._open]
        return Response(msgspec.json.encode(WaitingAnswer(waiting)), media_type="application/json")
