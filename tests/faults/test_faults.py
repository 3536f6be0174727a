# SPDX-License-Identifier: Apache-2.0
"""Injects every fault while requests are in flight.

Each request ends in the right tokens or a clear error. Processes that did not die go on without a restart. Nothing
leaks.
"""

import time
from collections import Counter

import pytest

from faults.report import Report, Row
from faults.scenario import Scenario
from faults.scenarios import SCENARIOS
from faults.traffic import Outcome
from faults.world import Worlds
from harness.routers import HAS_VLLM_ROUTER, NEEDS_VLLM_ROUTER

pytestmark = pytest.mark.timeout(900)

MEMORY_BYTES = 128 << 20
"""A server may hold so much more than when it was warmed up: allocators keep pages. A leak would go on growing."""


def _param(scenario: Scenario) -> object:
    return pytest.param(scenario, id=f"{scenario.number}-{scenario}", marks=() if scenario.short else pytest.mark.long)


@pytest.mark.parametrize("scenario", [_param(scenario) for scenario in SCENARIOS])
def test_fault(worlds: Worlds, report: Report, scenario: Scenario) -> None:
    if scenario.shape.routed and not HAS_VLLM_ROUTER:
        pytest.skip(NEEDS_VLLM_ROUTER)
    world = worlds.get(scenario.shape)
    print(f"--- {scenario.name}", flush=True)
    probes, later = world.requests(4), world.requests(4)
    try:
        answers = scenario.run(world)
    except BaseException:
        worlds.close()  # who knows what still runs, and how
        raise
    recovery_s, failures = world.first_right_answer(time.monotonic(), probes)
    after = world.send(later).answers()
    leaked_blocks = world.leaked_blocks()
    leaks, growth = world.leaks()
    row = Row(
        scenario.number,
        scenario.name,
        scenario.shape.name,
        dict(Counter(answer.outcome.value for answer in answers)),
        leaked_blocks,
        leaks,
        recovery_s,
        growth,
        dict(Counter(answer.detail for answer in answers + failures if answer.detail)),
    )
    report.rows.append(row)
    print(row, flush=True)

    by_outcome = {outcome: [a.detail for a in answers if a.outcome is outcome] for outcome in Outcome}
    assert not by_outcome[Outcome.WRONG]
    assert not by_outcome[Outcome.HUNG]
    assert scenario.reasonless or not by_outcome[Outcome.UNCLEAR]
    assert scenario.disconnects or not by_outcome[Outcome.BROKEN_OFF]
    if scenario.absorbed:
        assert len(by_outcome[Outcome.RIGHT]) == len(answers), by_outcome[Outcome.FAILED]
    assert [answer.outcome for answer in after] == [Outcome.RIGHT] * 4, after
    assert leaked_blocks == 0
    assert leaks == {}
    assert max(growth.values()) < MEMORY_BYTES, growth
