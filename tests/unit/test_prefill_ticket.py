# SPDX-License-Identifier: Apache-2.0
"""How answers, failures and time change a ticket on a prefill rank."""

import pytest

from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.prefill_ticket import Destination, PrefillTicket
from vllm_ascend_pd.core.protocol import Granted, GrantRefused, Problem, RankDescription
from vllm_ascend_pd.core.reasons import PushFailure

LEFT, RIGHT = (0, 0), (0, 1)
GRANT_DEADLINE = 20.0
LEASE_S = 9.0


def contacted():
    state = PrefillTicket(GRANT_DEADLINE)
    ranks = [RankDescription(*key, "", "", RankCaches((), ())) for key in (LEFT, RIGHT)]
    state.contacted({(rank.pp_rank, rank.tp_rank): Destination(rank, (0,)) for rank in ranks})
    return state


def granted():
    state = contacted()
    for key in (LEFT, RIGHT):
        state.asked(key, 0.0)
        assert not state.answered(key, 0.0, Granted(LEASE_S))
    return state


def test_waits_for_decodes_description_until_the_grant_deadline():
    state = PrefillTicket(GRANT_DEADLINE)
    assert (state.may_write(None, 19.9), state.finish(19.9), state.due(19.9)) == (None, None, [])
    assert state.finish(GRANT_DEADLINE) is False
    assert state.failure == "the decode engine did not describe itself in time"
    assert not state.begin_notifying(GRANT_DEADLINE)  # whom?
    state.contacted({})
    assert state.begin_notifying(GRANT_DEADLINE)
    assert not state.next_round()
    assert state.end()


def test_waits_for_a_grant_until_the_grant_deadline():
    state = contacted()
    state.asked(LEFT, 0.0)
    state.answered(LEFT, 0.0, Granted(100.0))
    assert (state.may_write(LEFT, 19.9), state.may_write(RIGHT, 19.9), state.finish(19.9)) == (True, None, None)
    assert state.finish(GRANT_DEADLINE) is False
    assert state.failure == "decode rank (0, 1) gave no grant in time"


def test_asks_again_soon_without_a_grant_and_rarely_with_one():
    state = contacted()
    assert state.due(0.0) == [LEFT, RIGHT]
    state.asked(LEFT, 0.0)
    assert state.due(100.0) == [RIGHT]  # one question at a time
    state.answered(LEFT, 0.0, GrantRefused("not known here", retry=True))
    state.asked(RIGHT, 0.0)
    state.answered(RIGHT, 0.0, Granted(LEASE_S))
    assert (state.due(0.0), state.due(0.1), state.due(LEASE_S / 3)) == ([], [LEFT], [LEFT, RIGHT])


@pytest.mark.parametrize("answer", [GrantRefused("later", retry=True), Problem("?"), TimeoutError()])
def test_an_answer_that_neither_grants_nor_refuses_changes_nothing(answer):
    state = contacted()
    state.asked(LEFT, 0.0)
    assert not state.answered(LEFT, 0.0, answer)
    assert (state.failure, state.may_write(LEFT, 0.0), state.due(1.0)) == (None, None, [LEFT, RIGHT])


def test_a_refusal_ends_the_writing_everywhere():
    state = granted()
    state.asked(LEFT, 3.0)
    assert state.answered(LEFT, 3.0, GrantRefused("cancelled", retry=False))
    assert state.failure == "decode rank (0, 0) refused: cancelled"
    assert (state.due(9.0), state.finish(3.0)) == ([], False)
    assert state.lease_until(RIGHT) > 3.0  # what has begun may end


def test_the_first_reason_stays_and_none_comes_once_decode_is_notified():
    state = granted()
    state.fail("first", PushFailure.WRITE)
    state.fail("second", PushFailure.WRITE)
    assert state.failure == "first"
    complete = granted()
    assert complete.finish(1.0)
    assert complete.begin_notifying(1.0)
    complete.fail("too late", PushFailure.WRITE)
    assert complete.failure is None


def test_blocks_that_change_while_a_failed_write_may_read_them_fail_a_finished_ticket():
    state = granted()
    state.delay_settling(8.0)
    assert state.finish(4.0)
    state.fail("preempted", PushFailure.PREEMPTED)
    assert state.begin_notifying(5.0)
    assert state.failure == "preempted"


def test_success_is_reported_after_bytes_in_flight_and_leases_are_renewed_until_then():
    state = granted()
    state.delay_settling(8.0)
    state.delay_settling(7.0)
    assert state.finish(4.0)
    assert not state.begin_notifying(7.9)
    assert state.due(4.0) == [LEFT, RIGHT]
    assert state.begin_notifying(8.0)
    assert state.settle_s(8.0) == 0.0
    assert state.due(20.0) == []


def test_failure_is_reported_at_once_and_blocks_are_kept_until_nothing_reads_them():
    state = granted()
    state.delay_settling(8.0)
    state.fail("it broke", PushFailure.WRITE)
    assert state.finish(4.0) is False
    assert state.begin_notifying(4.0)
    assert state.settle_s(4.0) == 4.0
    for key in state.next_round():
        state.acked(key)
    assert not state.next_round()
    assert not state.begin_notifying(7.9)
    assert not state.end()
    assert state.begin_notifying(8.0)  # once more: nothing can arrive any more
    assert (list(state.next_round()), state.settle_s(8.0)) == ([LEFT, RIGHT], 0.0)
    assert not state.end()
    for key in (LEFT, RIGHT):
        state.acked(key)
    assert not state.next_round()
    assert not state.begin_notifying(9.0)
    assert state.end()


def test_a_rank_that_did_not_acknowledge_a_failure_is_not_notified_again():
    state = granted()
    state.delay_settling(8.0)
    state.fail("it broke", PushFailure.WRITE)
    state.finish(4.0)
    state.begin_notifying(4.0)
    state.next_round()
    state.acked(RIGHT)
    assert [list(state.next_round()) for _ in range(3)] == [[LEFT], [LEFT], []]
    assert state.begin_notifying(8.0)
    assert [list(state.next_round()) for _ in range(4)] == [[RIGHT], [RIGHT], [RIGHT], []], "it never answers"
    assert state.end()


def test_no_write_is_planned_after_a_lease():
    state = granted()
    assert [state.may_write(LEFT, now) for now in (LEASE_S - 0.1, LEASE_S)] == [True, False]
