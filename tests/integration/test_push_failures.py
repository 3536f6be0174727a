# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between ranks fails the request it belongs to, with a reason, and no other (R1, R2, R6)."""

import threading
import time
from dataclasses import replace
from functools import reduce
from typing import Any

import msgspec
import pytest

from harness.kv import FLOAT32, GQA, HEAD_MAJOR, Model, Side
from harness.rank_hosts import start_afresh
from harness.rank_programs import PrefillRank
from harness.ranks import MakePair, Pair, expect_delivery, expect_failure, pair_of_each, prefill, prompts, run
from harness.waiting import wait_until
from vllm_ascend_pd.core.step import PrefillStep, Send
from vllm_ascend_pd.observe.stats import BACKPRESSURE_SECONDS, PUSH_FAILURES, WRITE_RETRIES, merged

QUICK = {"grant_timeout_s": 2.0, "control_timeout_s": 1.0}
SHAPES = {
    "gathered": (GQA, Side(2), Side(1), QUICK),
    "direct": (HEAD_MAJOR, Side(2), Side(1), QUICK),
    "split": (GQA, Side(1), Side(2), QUICK),
}


pair = pair_of_each(SHAPES, scope="function")
one_shape = pytest.mark.parametrize("pair", ["gathered"], indirect=True)
"""For tests of what happens before anything is written."""


def counted(pair: Pair) -> dict[str, Any]:
    """What prefill's ranks have counted since the last time, together."""
    return reduce(merged, pair.each(pair.p_ranks, "stats"), {})["counters"]


def test_a_write_that_fails_fails_its_request_alone(pair: Pair) -> None:
    requests = prompts(pair, [40, 50, 60])
    victim = requests[1]
    pair.each(pair.p_ranks, "poison", pair.addresses(1, victim.d_blocks))
    run(pair, requests)
    received, failed = pair.wait_arrivals(3)
    assert failed.keys() == {"request-1"}, failed
    assert received == {"request-0", "request-2"}
    assert "injected by the test" in failed["request-1"]
    rest = [p for p in requests if p is not victim]
    strays = [d for d in pair.differences(rest) if "belongs to nobody" not in d]
    assert strays == []
    assert pair.wait_sent(3).keys() == {"request-1"}
    said = counted(pair)
    causes = said[PUSH_FAILURES.name]
    assert sum(causes.values()) == len(pair.p_ranks), "once on each rank"
    assert causes["write"] >= 1
    assert causes.keys() <= {"write", "revoked", "refused"}, "other ranks may hear of it before they fail themselves"
    assert said[WRITE_RETRIES.name][""] >= 3, "each request by itself"


def test_a_layer_under_way_behind_one_that_fails_is_not_tried_again(make_pair: MakePair) -> None:
    pair = make_pair(GQA, Side(1), Side(1), QUICK)
    [rank] = pair.p_ranks
    rank.call("lose_writes")
    run(pair, prompts(pair, [40]))
    expect_failure(pair, "lost by the test")
    # The first layer, the next one behind it, and the first one by itself, twice.
    assert rank.call("batches_begun") <= 4


def test_a_decode_rank_that_stands_still_is_waited_for_once(make_pair: MakePair) -> None:
    """Not for each of a step's requests in turn: by then their leases have run out."""
    pair = make_pair(GQA, Side(1), Side(1), {"lease_s": 2.0, "write_timeout_s": 3.0, "control_timeout_s": 1.0})
    [p_rank], [d_rank] = pair.p_ranks, pair.d_ranks
    requests = prompts(pair, [40, 50, 60])
    tickets = pair.announce(requests)
    by_id = {prompt.request_id: prompt for prompt in requests}
    p_rank.call("step", PrefillStep(tickets=tickets), by_id)
    wait_until(lambda: p_rank.call("is_granted"), 30)
    d_rank.freeze()
    prefill(pair, requests, {})
    assert pair.wait_sent(3).keys() == by_id.keys()
    d_rank.freeze(False)
    said = counted(pair)
    assert said[PUSH_FAILURES.name] == {"lease": 3}
    assert WRITE_RETRIES.name not in said


def test_who_has_a_grant_is_done_though_another_of_the_step_has_none(make_pair: MakePair) -> None:
    """Decode has all of both prompts' KV, so nothing is written for either."""
    pair = make_pair(GQA, Side(1), Side(1), {"grant_timeout_s": 8.0})
    [p_rank] = pair.p_ranks
    ungranted, granted = requests = [replace(prompt, cached=prompt.num_tokens) for prompt in prompts(pair, [64, 64])]
    by_id = {prompt.request_id: prompt for prompt in requests}
    tickets = {ungranted.request_id: pair.ticket(ungranted)} | pair.announce([granted])  # decode is told of one
    p_rank.call("step", PrefillStep(tickets=tickets), by_id)
    wait_until(lambda: p_rank.call("has_grants", granted.request_id), 30)
    sends = [Send(p.request_id, p.num_tokens, p.num_tokens, ([],), last=True) for p in requests]
    p_rank.call("step", PrefillStep(sends=sends), by_id)
    assert pair.wait_arrivals(1) == ({granted.request_id}, {})
    assert p_rank.call("open_failures") == [], "the other's time is not over"
    p_rank.call("step", PrefillStep(finished=dict.fromkeys(by_id)), by_id)
    sent = pair.wait_sent(2)
    assert sent.keys() == {ungranted.request_id}
    assert "no grant" in sent[ungranted.request_id]


def test_a_cancelled_ticket_is_written_no_more(pair: Pair) -> None:
    requests = prompts(pair, [64])
    tickets = pair.announce(requests)
    pair.cancel({t.ticket_id: "the test lost interest" for t in tickets.values()})
    assert pair.wait_arrivals(1) == (set(), {"request-0": "the test lost interest"})
    prefill(pair, requests, tickets)
    assert "the test lost interest" in pair.wait_sent(1)["request-0"]
    assert counted(pair)[PUSH_FAILURES.name] == {"refused": len(pair.p_ranks)}
    assert pair.differences([]) == []  # not one byte


def test_staging_is_not_left_to_requests_without_a_grant(make_pair: MakePair) -> None:
    """Their decode engine does not answer, say; here its ranks do not know of their tickets. Who comes after them is
    served long before their time to be granted is over, and what comes of them then waits for nobody any more."""
    config = {"staging_slots": 2, "control_timeout_s": 1.0, "grant_timeout_s": 60.0}
    pair = make_pair(Model(layers=5), Side(2), Side(1), config)
    requests = prompts(pair, [40, 50, 60])
    for ungranted in requests[:2]:
        ticket = {ungranted.request_id: pair.ticket(ungranted)}
        prefill(pair, [ungranted], ticket)
        reason = pair.wait_sent(1)[ungranted.request_id]
        assert reason == "no grant came while all staging slots were taken: other requests need them"
    run(pair, requests[2:])
    expect_delivery(pair, requests[2:])
    assert set(counted(pair)[PUSH_FAILURES.name]) == {"no_grant"}


def test_a_slot_that_rests_is_given_back_to_who_waits_for_it(make_pair: MakePair) -> None:
    """After a failed write, until its bytes can arrive no more; the sender itself has to wait for it."""
    start_afresh()
    config = {"staging_slots": 1, "write_timeout_s": 1.0, "collective_timeout_s": 30.0}
    pair = make_pair(Model(layers=3), Side(2), Side(1), config)
    pair.p_ranks[0].call("lose_writes", 1, True)
    began = time.monotonic()
    requests = prompts(pair, [40])
    run(pair, requests)
    expect_delivery(pair, requests)
    assert time.monotonic() - began >= 5.0, "it has rested"


def close_worker(rank: PrefillRank) -> list[str]:
    rank.worker.close(5.0)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pd-sender")]


@one_shape
def test_closing_waits_for_nobodys_grants(pair: Pair) -> None:
    requests = prompts(pair, [64])
    prefill(pair, requests, {p.request_id: pair.ticket(p) for p in requests})  # decode is never told
    assert pair.each(pair.p_ranks, "do", close_worker) == [[] for _ in pair.p_ranks]


@one_shape
def test_a_made_up_ticket_gets_no_grant(pair: Pair) -> None:
    requests = prompts(pair, [64])
    tickets = {p.request_id: pair.ticket(p) for p in requests}  # decode is never told
    prefill(pair, requests, tickets)
    assert "no grant" in pair.wait_sent(1)["request-0"]
    assert counted(pair)[PUSH_FAILURES.name] == {"no_grant": len(pair.p_ranks)}
    assert pair.differences([]) == []


@one_shape
def test_a_made_up_engine_shares_nothing_with_a_real_one(pair: Pair) -> None:
    """Though its address and id, one behind the other, read the same."""
    made_up, real = requests = prompts(pair, [64, 50])
    tickets = {p.request_id: pair.ticket(p) for p in requests}
    pair.expect([real], {real.request_id: tickets[real.request_id]})
    ticket = tickets[made_up.request_id]
    tickets[made_up.request_id] = msgspec.structs.replace(
        ticket,
        remote_port=ticket.remote_port // 10,
        remote_engine_id=f"{ticket.remote_port % 10}{ticket.remote_engine_id}",
    )
    prefill(pair, requests, tickets)
    assert pair.wait_arrivals(1) == ({real.request_id}, {})
    assert pair.wait_sent(2).keys() == {made_up.request_id}
    assert pair.differences([real]) == []


@one_shape
def test_an_altered_ticket_gets_no_grant(pair: Pair) -> None:
    requests = prompts(pair, [64])
    [ticket] = [pair.ticket(p) for p in requests]
    pair.expect(requests, {"request-0": ticket})
    elsewhere = [[block + 1 if block + 1 < 64 else 0 for block in ticket.remote_block_ids[0]]]
    altered = msgspec.structs.replace(ticket, remote_block_ids=elsewhere)
    prefill(pair, requests, {"request-0": altered})
    assert "altered" in pair.wait_sent(1)["request-0"]
    assert counted(pair)[PUSH_FAILURES.name] == {"refused": len(pair.p_ranks)}
    assert pair.differences([]) == []


@one_shape
def test_an_aborted_prefill_fails_decode_at_once(pair: Pair) -> None:
    requests = prompts(pair, [64])
    tickets = pair.announce(requests)
    by_id = {p.request_id: p for p in requests}
    pair.each(pair.p_ranks, "step", PrefillStep(tickets=tickets), by_id)
    pair.each(pair.p_ranks, "step", PrefillStep(finished={"request-0": "the prefill request was aborted"}), by_id)
    expect_failure(pair, "was aborted")
    assert counted(pair)[PUSH_FAILURES.name]["aborted"] >= 1


@pytest.mark.parametrize(
    ("p_model", "named"),
    [(FLOAT32, ("dtype", "float32", "bfloat16")), (Model(layers=2), ("layers.2", "prefill lacks"))],
    ids=["dtype", "layers"],
)
def test_engines_that_do_not_fit_are_refused(p_model: Model, named: tuple[str, ...], make_pair: MakePair) -> None:
    """tests/unit/test_compatibility.py has all that may differ."""
    pair = make_pair(GQA, Side(1), Side(1), QUICK, p_model=p_model)
    pair.model = p_model
    run(pair, prompts(pair, [48]))
    expect_failure(pair, *named)
    assert counted(pair)[PUSH_FAILURES.name] == {"unfit": 1}


def test_a_link_that_does_not_keep_up_fails_requests_and_holds_nothing(make_pair: MakePair) -> None:
    """More layers wait than the queue takes: the step does not wait for ever, and slots come back."""
    config = {**QUICK, "push_queue_size": 1, "staging_slots": 2, "write_timeout_s": 1.0}
    pair = make_pair(Model(layers=6), Side(2), Side(1), config)
    pair.each(pair.p_ranks, "slow_down", 1.5)
    requests = prompts(pair, [40])
    run(pair, requests)
    expect_failure(pair, "does not keep up", timeout_s=60)
    measured = reduce(merged, pair.each(pair.p_ranks, "stats"), {})
    assert measured["counters"][PUSH_FAILURES.name]["queue_full"] >= 1
    assert BACKPRESSURE_SECONDS.name in measured["histograms"]
    pair.each(pair.p_ranks, "slow_down", 0.0)
    pair.each(pair.d_ranks, "clear")
    run(pair, requests)
    expect_delivery(pair, requests)


def hold_up_the_side_stream(rank: PrefillRank, seconds: float) -> None:
    rank.device.submit(lambda: time.sleep(seconds), rank.device.record_event())


def await_the_side_stream(rank: PrefillRank) -> None:
    rank.device.submit(lambda: None, rank.device.record_event()).wait(60.0)


def free_slots(rank: PrefillRank) -> int:
    assert rank.worker._regrouper is not None
    return len(rank.worker._regrouper.ring._free)


def test_what_is_regrouped_for_nobody_keeps_no_slot(make_pair: MakePair) -> None:
    """The sender waits for a layer as long as a collective and a write may take, here two seconds."""
    config = {**QUICK, "collective_timeout_s": 1.0, "write_timeout_s": 1.0, "staging_slots": 2}
    pair = make_pair(Model(layers=3), Side(1), Side(2), config)
    requests = prompts(pair, [40])
    pair.each(pair.p_ranks, "do", hold_up_the_side_stream, 7.0)
    run(pair, requests)
    expect_failure(pair, "could not be read")
    pair.each(pair.p_ranks, "do", await_the_side_stream)
    assert pair.each(pair.p_ranks, "do", free_slots) == [2]
    pair.each(pair.d_ranks, "clear")
    run(pair, requests)
    expect_delivery(pair, requests)


def fail_to_report(rank: PrefillRank) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    rank.worker._control.writing_ended = fail


def test_an_error_that_ends_a_sender_ends_the_engine(make_pair: MakePair) -> None:
    """Nobody else would ever hear of its transfers."""
    pair = make_pair(GQA, Side(1), Side(1), QUICK)
    pair.each(pair.p_ranks, "do", fail_to_report)
    run(pair, prompts(pair, [40]))
    with pytest.raises(RuntimeError, match="a sender has ended by an error of its own"):
        pair.wait_sent(1)
