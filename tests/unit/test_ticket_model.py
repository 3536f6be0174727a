# SPDX-License-Identifier: Apache-2.0
"""R1 to R4 hold whatever happens to a ticket, and each guard that sees to it is needed: `ticket_model.py` says what
may happen, here is how much of it, and what is taken out."""

import math

import pytest
from explore import Wrong, explore
from ticket_model import Bounds, TicketModel

from vllm_ascend_pd.core.producer_ticket import Phase, ProducerTicket
from vllm_ascend_pd.core.ticket import ConsumerTicket, State

PAIR = Bounds(writers=1, readers=1, tickets=2, faults=2, fine=True)
TWO_WRITERS = Bounds(writers=2, readers=1, tickets=1, faults=1)
ALL = Bounds(writers=2, readers=2, tickets=2, faults=1)
MOST_STATES = 400_000


def check(bounds, producer=ProducerTicket, consumer=ConsumerTicket):
    model = TicketModel(bounds, producer, consumer)
    return explore(model.initial(), model.moves, model.wrong, MOST_STATES)


@pytest.mark.parametrize("bounds", [PAIR, ALL], ids=["one pair, step by step", "two by two"])
def test_every_interleaving(bounds):
    explored = check(bounds)
    print(f"{bounds}: {explored}")
    assert explored.states > 10_000


# Prefill's guards.


class BeginsOldPlans(ProducerTicket):
    """A lease is looked at when a write is planned, not when it begins."""

    def may_write(self, key, now):
        if self.destinations[key].granted and not super().holds(key, now):
            self.fail("the lease ran out")
        return super().may_write(key, now)

    def holds(self, key, now):
        return self.destinations[key].granted


class CountsFromTheAnswer(ProducerTicket):
    def answered(self, key, asked_at, answer):
        return super().answered(key, 0, answer)


class ClaimsSuccess(ProducerTicket):
    """Whatever has failed before."""

    def finish(self, now):
        self.failure = None
        self.phase = Phase.FINISHED
        return True


class TellsSuccessTooSoon(ProducerTicket):
    """While bytes of a first attempt may still arrive."""

    def tell(self, now):
        return super().tell(math.inf)

    def settle_s(self, now):
        return 0.0 if self.failure is None else super().settle_s(now)


class ForgetsStrays(ProducerTicket):
    """Reports a failure as if nothing could arrive any more."""

    def settle_s(self, now):
        return 0.0


class FreesTooSoon(ProducerTicket):
    def end(self, now):
        return super().end(math.inf)


class AsksForEver(ProducerTicket):
    def next_round(self):
        self.rounds = 0
        return super().next_round()


# Decode's guards.


class ForgetsWhatIsOnItsWay(ConsumerTicket):
    """A lease ends there when it ends here."""

    def grant(self, request, now):
        answer = super().grant(request, now)
        if (lease := self._leases.get(request.writer)) is not None:
            lease.until = min(lease.until, now + self.lease_s)
        return answer


class ReleasesAtOnce(ConsumerTicket):
    """What has ended is not kept for its writers."""

    def quiet(self, now):
        return self.state is not State.OPEN


class TakesOneForAll(ConsumerTicket):
    """One writer's report is enough."""

    def report(self, report, now):
        if report.reason is None:
            self._missing = {pair for pair in self._missing if pair[1] == report.writer.rank}
        return super().report(report, now)


class WaitsForEver(ConsumerTicket):
    def tick(self, now):
        return


@pytest.mark.parametrize(
    ("guard", "bounds", "rule"),
    [
        (BeginsOldPlans, PAIR, "R2"),
        (CountsFromTheAnswer, PAIR, "R2"),
        (ClaimsSuccess, PAIR, "R1"),
        (TellsSuccessTooSoon, PAIR, "R2"),
        (ForgetsStrays, PAIR, "R2"),
        (FreesTooSoon, PAIR, "R3"),
        (AsksForEver, PAIR, "R4"),
        (ForgetsWhatIsOnItsWay, PAIR, "R2"),
        (ReleasesAtOnce, PAIR, "R2"),
        (TakesOneForAll, TWO_WRITERS, "R1"),
        (WaitsForEver, PAIR, "R4"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_without_a_guard(guard, bounds, rule):
    side = {"producer": guard} if issubclass(guard, ProducerTicket) else {"consumer": guard}
    with pytest.raises(Wrong) as found:
        check(bounds, **side)
    print(found.value)
    assert found.value.reason.startswith(rule)
