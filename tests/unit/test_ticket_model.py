# SPDX-License-Identifier: Apache-2.0
"""R1 to R4 and R10 hold whatever happens to a ticket, and each guard is needed.

`ticket_model.py` says what may happen. Here are the sizes of the worlds that are explored, and the guards that are
taken out.
"""

import math

import msgspec
import pytest
from explore import Wrong, explore
from ticket_model import TicketModel
from ticket_ranks import Bounds

from vllm_ascend_pd.core.decode_ticket import DecodeTicket, TicketState
from vllm_ascend_pd.core.prefill_ticket import Phase, PrefillTicket

PAIR = Bounds(writers=1, readers=1, tickets=2, faults=2, fine=True)
STOPPED_DECODE = Bounds(writers=1, readers=1, tickets=2, faults=2, stops=True)
TWO_WRITERS = Bounds(writers=2, readers=1, tickets=1, faults=1)
TWO_BY_TWO = Bounds(writers=2, readers=2, tickets=1, faults=1)
TWO_ENGINES = Bounds(writers=1, readers=1, tickets=1, engines=2, faults=2)
TWO_ENGINES_OF_TWO = Bounds(writers=2, readers=1, tickets=1, engines=2, faults=0)
TWO_ENGINES_TO_TWO = Bounds(writers=1, readers=2, tickets=1, engines=2, faults=1)
MOST_STATES = 400_000


def check(bounds, producer=PrefillTicket, consumer=DecodeTicket):
    model = TicketModel(bounds, producer, consumer)
    return explore(model.initial(), model.moves, model.wrong, MOST_STATES)


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param(PAIR, id="one pair, step by step"),
        pytest.param(STOPPED_DECODE, id="one pair, with a decode rank that may be stopped"),
        pytest.param(TWO_BY_TWO, id="two by two"),
        pytest.param(TWO_ENGINES, id="two engines"),
        pytest.param(TWO_ENGINES_OF_TWO, id="two engines of two writers"),
        pytest.param(TWO_ENGINES_TO_TWO, id="two engines for two readers", marks=pytest.mark.long),
    ],
)
def test_every_interleaving(bounds):
    assert check(bounds) > 2_000


# Prefill's guards.


class BeginsOldPlans(PrefillTicket):
    """Checks a lease when a write is planned, and not when it begins."""

    def lease_until(self, key):
        return math.inf


class LeavesWithoutEnd(PrefillTicket):
    """Lets a writer write for ever after one grant."""

    def answered(self, key, asked_at, answer):
        refused = super().answered(key, asked_at, answer)
        if self.destinations[key].granted:
            self.destinations[key].until = math.inf
        return refused


class CountsFromTheAnswer(PrefillTicket):
    def answered(self, key, asked_at, answer):
        return super().answered(key, 0, answer)


class ClaimsSuccess(PrefillTicket):
    """Reports success even after a failure."""

    def finish(self, now):
        self.failure = None
        self.phase = Phase.FINISHED
        return True


class TellsSuccessTooSoon(PrefillTicket):
    """Reports success while bytes of a first attempt may still arrive."""

    def begin_notifying(self, running):
        if self.phase is not Phase.FINISHED or self.failure is not None:
            return super().begin_notifying(running)
        told = super().begin_notifying(math.inf)
        self.final = running >= self.settled_at
        return told

    def settle_s(self, running):
        return 0.0 if self.failure is None else super().settle_s(running)


class ForgetsStrays(PrefillTicket):
    """Reports a failure as if no byte could arrive any more."""

    def settle_s(self, running):
        return 0.0


class FreesTooSoon(PrefillTicket):
    """Frees prefill's blocks as soon as decode has been notified."""

    def end(self):
        self.final = True
        return super().end()


class AsksForEver(PrefillTicket):
    def next_round(self):
        self.rounds = 0
        return super().next_round()


# Decode's guards.


class ForgetsWhatIsOnItsWay(DecodeTicket):
    """Takes a lease for ended on decode when it ends on prefill."""

    def grant(self, request, now):
        answer = super().grant(request, now)
        if (lease := self._leases.get(request.writer)) is not None:
            lease.until = min(lease.until, now + self.lease_s)
        return answer


class ReleasesAtOnce(DecodeTicket):
    """Releases blocks of an ended ticket without waiting for its writers."""

    def is_quiesced(self, now):
        return self.state in (TicketState.RECEIVED, TicketState.FAILED)


class TakesOneForAll(DecodeTicket):
    """Counts a ticket as received after one writer's report."""

    def report(self, report, now):
        if report.reason is None:
            self._missing = {pair for pair in self._missing if pair[1] == report.writer.rank}
        return super().report(report, now)


class WaitsForEver(DecodeTicket):
    def tick(self, now):
        return


class WaitsInTheQueueForEver(DecodeTicket):
    """Has no deadline until a prefill engine begins."""

    @property
    def deadline(self):
        return math.inf if self._begun_at is None else super().deadline


class TrustsLeases(DecodeTicket):
    """Gives blocks back when leases are over, although stopped processes may still write."""

    def is_quiesced(self, now):
        over = all(lease.settled or now >= lease.until for lease in self._leases.values())
        return self.state in (TicketState.RECEIVED, TicketState.FAILED) and over


class TrustsTheFirstReport(DecodeTicket):
    """Assumes that bytes of a failed writer arrive in time, even if its process is stopped."""

    def is_quiesced(self, now):
        over = all(lease.is_over(now) or (lease.reported and now >= lease.until) for lease in self._leases.values())
        return self.state in (TicketState.RECEIVED, TicketState.FAILED) and over


class SettlesAtTheFirstReport(DecodeTicket):
    """Assumes that no byte of a writer that reports failure is in flight."""

    def report(self, report, now):
        return super().report(msgspec.structs.replace(report, settle_s=0.0), now)


class GivesBackAtOnceAfterAStop(DecodeTicket):
    """Forgets that bytes may lie in socket buffers when this rank has been stopped."""

    def resumed(self, now, apply_s):
        return


class TakesAnyEngine(DecodeTicket):
    """Grants writes to each engine that asks."""

    def grant(self, request, now):
        self._engine = (request.writer.engine_id, request.sharding)
        return super().grant(request, now)


class CountsReportsOfOthers(DecodeTicket):
    """Counts reports of other engines' ranks with the same number."""

    def report(self, report, now):
        for writer in self._leases:
            if writer.rank == report.writer.rank:
                report = msgspec.structs.replace(report, writer=writer)
        return super().report(report, now)


@pytest.mark.parametrize(
    ("guard", "bounds", "rule"),
    [
        (BeginsOldPlans, PAIR, "R2"),
        (LeavesWithoutEnd, PAIR, "R2"),
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
        (WaitsInTheQueueForEver, PAIR, "R4"),
        (TrustsLeases, PAIR, "R2"),
        (TrustsTheFirstReport, PAIR, "R2"),
        (SettlesAtTheFirstReport, PAIR, "R2"),
        (GivesBackAtOnceAfterAStop, STOPPED_DECODE, "R2"),
        (TakesAnyEngine, TWO_ENGINES_OF_TWO, "R10"),
        (CountsReportsOfOthers, TWO_ENGINES, "R2"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_without_a_guard(guard, bounds, rule):
    side = {"producer": guard} if issubclass(guard, PrefillTicket) else {"consumer": guard}
    with pytest.raises(Wrong) as found:
        check(bounds, **side)
    print(found.value)
    assert found.value.reason.startswith(rule)
