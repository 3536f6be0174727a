# SPDX-License-Identifier: Apache-2.0
"""How long transfers without a grant keep others of the same sender waiting."""

from vllm_ascend_pd.prefill.grant_wait import GrantWaitLimit

OTHERS_S = 5.0


class Others:
    wait = True

    def __call__(self) -> bool:
        return self.wait


def test_without_others_it_lasts_for_ever() -> None:
    patience = GrantWaitLimit(OTHERS_S)
    assert not patience.is_over(20.0, 1e9)


def test_others_wait_for_that_long_but_not_before_a_transfers_own_end() -> None:
    patience = GrantWaitLimit(OTHERS_S, Others())
    assert patience.next_look(20.0, 0.0) == 15.0
    assert not patience.is_over(20.0, 15.0)
    assert not patience.is_over(20.0, 19.9)
    assert patience.is_over(20.0, 20.0)


def test_who_comes_when_it_has_ended_waits_for_their_own_time_as_well() -> None:
    others = Others()
    others.wait = False
    patience = GrantWaitLimit(OTHERS_S, others)
    assert not patience.is_over(20.0, 30.0)
    others.wait = True
    assert not patience.is_over(20.0, 31.0)
    assert not patience.is_over(20.0, 35.9)
    assert patience.is_over(20.0, 36.0)


def test_several_one_after_the_other_are_waited_for_once() -> None:
    patience = GrantWaitLimit(OTHERS_S, Others())
    assert not patience.is_over(20.0, 16.0)
    assert patience.is_over(20.0, 21.0)
    assert all(patience.is_over(20.0, 21.0 + n / 100) for n in range(20)), "those behind have had their time, too"


def test_after_a_grant_that_was_waited_for_it_begins_anew() -> None:
    patience = GrantWaitLimit(OTHERS_S, Others())
    assert not patience.is_over(20.0, 16.0)
    patience.rewarded()
    assert not patience.is_over(20.0, 21.0)
    assert patience.is_over(20.0, 26.0)


def test_what_was_waited_for_long_ago_does_not_count() -> None:
    """Grants came in time since."""
    patience = GrantWaitLimit(OTHERS_S, Others())
    assert not patience.is_over(20.0, 15.0)
    assert patience.is_over(20.0, 20.0)
    assert not patience.is_over(7220.0, 7230.0)
    assert not patience.is_over(7220.0, 7234.9)
    assert patience.is_over(7220.0, 7235.0)


def test_after_a_time_when_nobody_waited_it_begins_anew() -> None:
    others = Others()
    patience = GrantWaitLimit(OTHERS_S, others)
    assert not patience.is_over(20.0, 18.0)
    others.wait = False
    assert not patience.is_over(20.0, 22.0)
    others.wait = True
    assert not patience.is_over(20.0, 23.5)
    assert patience.is_over(20.0, 28.5)
