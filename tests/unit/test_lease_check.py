# SPDX-License-Identifier: Apache-2.0
"""What the sender asks without a lock, once for many requests, says what each ticket would say."""

from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from harness.tickets import ticket_with
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.prefill_ticket import Destination, Phase, PrefillTicket
from vllm_ascend_pd.core.protocol import Granted, GrantRefused, Message, RankDescription
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.prefill.transfer import LeaseCheck, Transfer, Withdrawals

KEY = (0, 0)
RANK = RankDescription(*KEY, "", "", RankCaches((), ()))
NEVER = 1000.0
TICKET = ticket_with(
    request_id="request", remote_block_ids=[[1]], remote_engine_id="decode", remote_port=1, num_tokens=16
)

ANSWERS = st.one_of(
    st.integers(1, 10).map(lambda seconds: Granted(float(seconds))),
    st.just(GrantRefused("later", retry=True)),
    st.just(GrantRefused("no", retry=False)),
)
EVENTS = st.one_of(ANSWERS, st.sampled_from(["contacted", "fail", "finish"]))


def happen(state: PrefillTicket, event: Message | str, now: float) -> None:
    if event == "contacted":
        if state.destinations is None:
            state.contacted({KEY: Destination(RANK, (0,))})
    elif event == "fail":
        state.fail("for the test", PushFailure.ABORTED)
    elif event == "finish":
        state.finish(now)
    elif state.destinations is not None:
        state.asked(KEY, now)
        state.answered(KEY, now, event)


@given(st.lists(st.tuples(st.integers(0, 2), EVENTS | st.none(), st.integers(0, 6)), max_size=40))
def test_many_are_asked_like_one_after_the_other(events: list[tuple[int, Message | str | None, int]]) -> None:
    """`events`: what happens to which transfer, and how many seconds pass then."""
    withdrawals = Withdrawals()
    sender: Any = None  # nothing is waited for
    transfers = [Transfer(str(i), TICKET, sender, PrefillTicket(NEVER), withdrawals) for i in range(3)]
    states = [transfer.state for transfer in transfers]
    now, check, asked_again = 0.0, None, LeaseCheck(transfers, KEY)
    leases = [float("-inf")] * len(states)
    with mock.patch("time.monotonic", side_effect=lambda: now):
        for which, event, seconds in events:
            if event is not None:
                with transfers[which].changing() as state:
                    happen(state, event, now)
            now += seconds
            plain = LeaseCheck(transfers, KEY).may_plan()
            assert plain == all(s.destinations is not None and s.writable_until(KEY) > now for s in states)
            if all(state.phase is Phase.WRITING for state in states):  # nothing is asked for a transfer that has ended
                assert asked_again.may_plan() == plain
            if plain:
                assert all(state.may_write(KEY, now) for state in states)
            if all(state.destinations is not None for state in states):
                check = check or LeaseCheck(transfers, KEY)  # kept, as if for a long write
                assert check.may_begin() == all(state.holds(KEY, now) for state in states)
                assert all(state.lease_until(KEY) >= before for state, before in zip(states, leases, strict=True))
                leases = [state.lease_until(KEY) for state in states]
