# SPDX-License-Identifier: Apache-2.0
"""Decode's scheduler with requests whose prompts a prefill engine holds. The side channel is real, that engine is
played."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from decode_requests import BLOCK, BLOCKS, CONFIG, ENGINE, PROMPT, eventually, issue, step_with

from harness.schedulers import decode_scheduler
from harness.scheduling import make_request, remembered
from harness.ticket_takers import REFUSED, TAKEN, TicketTaker
from vllm_ascend_pd.core.caches import TokenGroup
from vllm_ascend_pd.core.hosts import prefill_hosts
from vllm_ascend_pd.core.prompt_digest import digest_of_tokens
from vllm_ascend_pd.core.protocol import OfferTicket, ReleasePrompt
from vllm_ascend_pd.core.step import WorkerReport
from vllm_ascend_pd.decode import prefill_client
from vllm_ascend_pd.decode.metaserver import MetaserverClient
from vllm_ascend_pd.decode.prefill_client import PrefillClient
from vllm_ascend_pd.decode.scheduler import DecodeScheduler


@pytest.fixture(autouse=True)
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_client, "_ASK_EVERY_S", 0.05)


@pytest.fixture
def scheduler() -> Iterator[DecodeScheduler]:
    metaserver = MetaserverClient(CONFIG, own_host="127.0.0.1")
    prefill = PrefillClient(prefill_hosts((), "127.0.0.1"))
    scheduler = decode_scheduler(ENGINE, [TokenGroup(BLOCK)], metaserver, prefill=prefill)
    yield scheduler
    scheduler.close()


@pytest.fixture
def prefill(request: pytest.FixtureRequest) -> Iterator[TicketTaker]:
    taker = TicketTaker(*getattr(request, "param", ()))
    yield taker
    taker.close()


def routed(prefill: TicketTaker, **changes: Any) -> Any:
    return make_request("r", PROMPT, prefill.params | changes)


def prompt_of(release: ReleasePrompt) -> tuple[Any, ...]:
    """What says which prompt is released: the same as in a ticket for it."""
    assert (len(release.ticket_id), release.num_tokens) == (32, PROMPT)
    assert release.prompt is not None
    assert release.prompt.tokens == digest_of_tokens(release.ticket_id, list(range(PROMPT)))
    return release.ticket_id, release.num_tokens, release.prompt


def test_the_ticket_goes_straight_to_prefill_with_the_step_that_tells_the_ranks(
    scheduler: DecodeScheduler, prefill: TicketTaker
) -> None:
    request = routed(prefill)
    scheduler.allocated(request, BLOCKS, scheduler.matched_tokens(request, 0))
    time.sleep(0.1)
    assert prefill.got == []
    [expect] = scheduler.build_step({"other": 1}).expects
    eventually(lambda: prefill.got)
    offer = prefill.got[0]
    assert isinstance(offer, OfferTicket)
    assert (offer.engine_id, offer.transfer_id) == ("prefill-0-12ab", "t-1")
    assert (offer.ticket.ticket_id, offer.ticket.digest()) == (expect.ticket_id, expect.digest)
    assert offer.ticket.token_ids == []
    scheduler.update(None, {"r"})
    assert scheduler.finished(request) == {"received_bytes": 0, "bytes_before_prefill_end": 0}
    time.sleep(0.2)
    assert prefill.of(ReleasePrompt) == []
    assert remembered(scheduler) == {}


@pytest.mark.parametrize("prefill", [([REFUSED], [TAKEN]), ([TAKEN], [REFUSED])], indirect=True)
def test_prefill_that_refuses(scheduler: DecodeScheduler, prefill: TicketTaker) -> None:
    request = routed(prefill)
    [expect] = issue(scheduler, request).expects
    [(ticket_id, reason)] = step_with(scheduler, lambda step: step.cancelled).cancelled.items()
    assert ticket_id == expect.ticket_id
    assert "it is for another prompt" in reason
    eventually(lambda: prefill.of(ReleasePrompt))
    scheduler.update(None, {"r"})
    assert "it is for another prompt" in scheduler.finished(request)["error"]
    assert remembered(scheduler) == {}


def test_a_failure_that_a_rank_notices_releases_the_prompt(scheduler: DecodeScheduler, prefill: TicketTaker) -> None:
    request = routed(prefill)
    [expect] = issue(scheduler, request).expects
    scheduler.update(WorkerReport({expect.ticket_id: "a lease ran out"}), set())
    assert scheduler.build_step({"other": 1}).cancelled == {expect.ticket_id: "a lease ran out"}
    eventually(lambda: prefill.of(ReleasePrompt))
    assert prefill.of(ReleasePrompt)[0].reason == "a lease ran out"
    assert prefill.of(ReleasePrompt)[0].ticket_id == expect.ticket_id


def test_a_prompt_that_decode_computes_is_released(scheduler: DecodeScheduler, prefill: TicketTaker) -> None:
    request = routed(prefill)
    assert scheduler.matched_tokens(request, PROMPT - 1) == 0
    scheduler.allocated(request, BLOCKS, 0)
    scheduler.allocated(request, BLOCKS, 0)  # once more, after a preemption
    assert scheduler.finished(request) is None
    eventually(lambda: prefill.got)
    time.sleep(0.2)
    [release] = prefill.got
    assert release == ReleasePrompt("prefill-0-12ab", "t-1", "decode computes the prompt", *prompt_of(release))
    assert remembered(scheduler) == {}


def test_a_request_that_ends_before_it_starts_releases_its_prompt(
    scheduler: DecodeScheduler, prefill: TicketTaker
) -> None:
    assert scheduler.finished(routed(prefill)) is None
    eventually(lambda: prefill.got)
    [release] = prefill.got
    assert release == ReleasePrompt("prefill-0-12ab", "t-1", "the request was aborted", *prompt_of(release))
    assert remembered(scheduler) == {}


def test_an_aborted_request_releases_its_prompt(scheduler: DecodeScheduler, prefill: TicketTaker) -> None:
    request = routed(prefill)
    [expect] = issue(scheduler, request).expects
    eventually(lambda: prefill.of(OfferTicket))
    assert scheduler.finished(request) == {"error": "the request was aborted"}
    assert scheduler.build_step({"other": 1}).cancelled == {expect.ticket_id: "the request was aborted"}
    eventually(lambda: prefill.of(ReleasePrompt))
    scheduler.update(None, {"r"})
    assert remembered(scheduler) == {}
