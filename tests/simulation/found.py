# SPDX-License-Identifier: Apache-2.0
"""Short scenarios in which a guard of the product matters: they fail without it.

To add one: `python -m simulation shrink` prints it. Add the guard that mends it to mutants.py, or here.
"""

from simulation.mutants import Edit, Mutant
from simulation.scenario import Event, Faults, Scenario, Shape

GUARDS: dict[str, Mutant] = {
    "a ticket waits for a prompt that was freed": Mutant(
        (
            Edit(
                "prefill.ticket_listener:TicketListener.refuse",
                "self._freed[transfer_id] = reason",
                "return",
            ),
        ),
    ),
    "a held prompt gets a second ticket": Mutant(
        (
            Edit(
                "decode.scheduler:DecodeScheduler.matched_tokens",
                "if is_freed or (earlier is not None and names_prefill(params or {})):",
                "if False:",
            ),
        ),
    ),
    "intents that wait for room at prefill take all its slots": Mutant(
        (
            Edit(
                "proxy.rendezvous.metaserver:Metaserver._ask",
                "prefill.gives_way = ticket.header.ticket_follows",
                "pass",
            ),
        ),
    ),
}
"""Of scenarios that mutants.py does not have."""

ORDERS_WITHOUT_GUARD = 40
"""In one of so many orders of threads a scenario fails without its guard. After a change of the code, an order means
another history."""

FOUND: dict[str, Scenario] = {
    "intents that wait for room at prefill take all its slots": Scenario(
        seed=1,
        shape=Shape(
            proxy=True,
            prefill_first=100,
            prefill_blocks=40,
            decode_blocks=40,
            prefix_caching=False,
            max_per_prefill=3,
        ),
        events=(
            *(Event(0.002 * n, "request", (f"long{n}", 100 + n, 150, 3, "metaserver", 0)) for n in range(8)),
            *(Event(0.0161 + 0.0001 * n, "request", (f"short{n}", 200 + n, 90, 3, "metaserver", 0)) for n in range(8)),
        ),
    ),
    "a preempted request whose writes are over counts as delivered": Scenario(
        seed=1001823,
        shape=Shape(
            prefills=2,
            decodes=2,
            prefill_tp=2,
            decode_tp=4,
            prefill_pp=2,
            states=True,
            prefill_blocks=80,
            decode_blocks=30,
            prefill_steps=2,
        ),
        faults=Faults(write_fails=0.2),
        events=(
            Event(0.0, "request", ("r0", 1, 32, 5, "metaserver", 0)),
            Event(0.0043, "stop", (0.264, 0.2)),
            Event(0.1636, "reset", (0.335,)),
        ),
    ),
    "a ticket waits for a prompt that was freed": Scenario(
        seed=0,
        faults=Faults(late=1.0),
        events=(Event(0.0, "request", ("r0", 100, 40, 1, "prefill first", 0)),),
    ),
    "a held prompt gets a second ticket": Scenario(
        seed=0,
        shape=Shape(never=True),
        events=(
            Event(0.0, "request", ("r0", 100, 40, 5, "prefill first", 0)),
            Event(0.0040, "reset", (0.9,)),
            Event(0.0044, "reset", (0.9,)),
            Event(0.0048, "reset", (0.9,)),
            Event(0.0052, "reset", (0.9,)),
            Event(0.0056, "reset", (0.9,)),
            Event(0.0060, "reset", (0.9,)),
            Event(0.0064, "reset", (0.9,)),
            Event(0.0068, "reset", (0.9,)),
            Event(0.0072, "reset", (0.9,)),
            Event(0.0076, "reset", (0.9,)),
            Event(0.0080, "reset", (0.9,)),
            Event(0.0084, "reset", (0.9,)),
            Event(0.0088, "reset", (0.9,)),
            Event(0.0092, "reset", (0.9,)),
            Event(0.0096, "reset", (0.9,)),
            Event(0.0100, "reset", (0.9,)),
            Event(0.0104, "reset", (0.9,)),
            Event(0.0108, "reset", (0.9,)),
            Event(0.0112, "reset", (0.9,)),
            Event(0.0116, "reset", (0.9,)),
        ),
    ),
    "an empty batch is written": Scenario(
        seed=11,
        shape=Shape(prefill_tp=2, prefill_blocks=30, decode_blocks=80, prefill_steps=2, prefill_policy="recompute"),
        faults=Faults(delay=0.5),
        events=(
            Event(0.058, "request", ("r24", 1, 8, 4, "metaserver", 0)),
            Event(0.0595, "request", ("r25", 1, 12, 1, "metaserver", 0)),
            Event(0.0745, "request", ("r26", 0, 14, 3, "metaserver", 0)),
            Event(0.0837, "leave", ("r26",)),
        ),
    ),
    "KV that vLLM takes back counts as computed": Scenario(
        seed=6,
        shape=Shape(prefill_blocks=80, decode_blocks=80, pool=True, prefill_policy="recompute"),
        faults=Faults(load_fails=0.5),
        events=(Event(0.0089, "request", ("r19", 119, 107, 2, "metaserver", 80)),),
    ),
    "success is reported before the outputs of a step with failed loads": Scenario(
        seed=1,
        shape=Shape(prefill_blocks=80, decode_blocks=80, pool=True),
        faults=Faults(load_fails=0.5),
        events=(Event(0.0213, "request", ("r3", 103, 41, 3, "metaserver", 32)),),
    ),
    "decode asks for a prompt that it has had freed": Scenario(
        seed=950100345,
        shape=Shape(windows=(24,), prefill_blocks=80, decode_blocks=30),
        faults=Faults(),
        events=(
            Event(0.0357, "request", ("r8", 1, 42, 2, "prefill first", 0)),
            Event(0.0984, "request", ("r15", 115, 12, 2, "metaserver", 0)),
            Event(0.0992, "request", ("r16", 116, 4, 1, "metaserver", 0)),
            Event(0.1072, "request", ("r17", 1, 32, 4, "prefill first", 0)),
            Event(0.1184, "reset", (0.869,)),
        ),
    ),
    "a load fails after its request was preempted": Scenario(
        seed=950100776,
        shape=Shape(prefill_blocks=80, decode_blocks=80, prefill_steps=2, pool=True),
        faults=Faults(load_fails=0.5),
        events=(
            Event(0.0236, "request", ("r47", 147, 15, 2, "metaserver", 0)),
            Event(0.0256, "request", ("r50", 1, 32, 1, "metaserver", 16)),
            Event(0.0494, "stop", (0.027, 0.2)),
            Event(0.124, "reset", (0.221,)),
        ),
    ),
    "what a request sent before a preemption counts without its load": Scenario(
        seed=0,
        shape=Shape(prefill_blocks=80, decode_blocks=80, prefill_steps=2, pool=True),
        faults=Faults(load_fails=1.0),
        events=(
            Event(0.0, "request", ("r0", 0, 160, 1, "prefill first", 0)),
            Event(0.0, "request", ("r1", 1, 60, 1, "metaserver", 16)),
            Event(0.0045, "stop", (0.0, 0.5)),
            Event(0.1, "leave", ("r0",)),
            Event(0.2, "reset", (0.0,)),
        ),
    ),
    "what an aborted request has computed stays cached": Scenario(
        seed=0,
        shape=Shape(prefill_blocks=80, decode_blocks=80, pool=True, prefill_policy="recompute"),
        faults=Faults(load_fails=1.0),
        events=(
            Event(0.0, "request", ("r0", 0, 80, 1, "prefill first", 64)),
            Event(0.002, "stop", (0.0, 0.5)),
            Event(0.1, "leave", ("r0",)),
            Event(1.0, "request", ("r1", 0, 66, 1, "metaserver", 0)),
            Event(2.0, "request", ("r2", 0, 132, 1, "metaserver", 0)),
        ),
    ),
    "a held prompt keeps one with a ticket waiting": Scenario(
        seed=0,
        shape=Shape(prefill_blocks=16, decode_blocks=16),
        faults=Faults(),
        events=(
            Event(0.0, "request", ("r0", 100, 100, 1, "prefill first", 0)),
            Event(0.004, "request", ("r1", 101, 150, 1, "metaserver", 0)),
        ),
    ),
    "a layer that was not written counts as written": Scenario(
        seed=1,
        shape=Shape(prefill_blocks=80, decode_blocks=80, pool=True),
        faults=Faults(write_fails=0.2),
        events=(Event(0.0646, "request", ("r9", 109, 104, 4, "metaserver", 0)),),
    ),
    "a staging slot does not rest after a failed write": Scenario(
        seed=0,
        shape=Shape(prefill_tp=2, prefill_blocks=80, decode_blocks=80),
        faults=Faults(write_fails=0.2),
        events=(Event(0.0024, "request", ("r6", 1, 132, 3, "metaserver", 0)),),
    ),
    "a failed ticket is closed before its writers have stopped": Scenario(
        seed=3,
        shape=Shape(
            prefill_tp=4,
            prefill_blocks=80,
            decode_blocks=16,
            prefix_caching=False,
            prefill_policy="recompute",
            decode_policy="recompute",
        ),
        faults=Faults(interrupts=0.02, repetition=0.2, delay=0.5, write_fails=0.2, slow=0.1, slow_by=5.0),
        events=(
            Event(0.0624, "request", ("r16", 116, 80, 3, "metaserver", 0)),
            Event(0.0638, "request", ("r17", 117, 32, 2, "metaserver", 0)),
            Event(0.0692, "request", ("r18", 0, 64, 2, "metaserver", 0)),
            Event(0.0719, "request", ("r19", 1, 64, 2, "metaserver", 0)),
            Event(0.0728, "request", ("r20", 0, 112, 1, "metaserver", 0)),
            Event(0.0811, "request", ("r21", 0, 32, 3, "metaserver", 0)),
            Event(0.0831, "leave", ("r17",)),
            Event(0.0848, "request", ("r22", 122, 1, 4, "metaserver", 0)),
            Event(0.1397, "request", ("r40", 0, 128, 3, "metaserver", 0)),
            Event(0.1428, "request", ("r41", 1, 113, 5, "metaserver", 0)),
            Event(0.1521, "request", ("r46", 146, 96, 3, "metaserver", 0)),
            Event(0.1526, "request", ("r47", 147, 48, 5, "metaserver", 0)),
            Event(0.1537, "request", ("r48", 148, 17, 4, "metaserver", 0)),
            Event(0.1574, "request", ("r49", 1, 112, 4, "metaserver", 0)),
        ),
    ),
    "a failed write is not marked as in flight": Scenario(
        seed=3,
        shape=Shape(prefill_tp=4, prefill_blocks=80, decode_blocks=16),
        faults=Faults(delay=0.5, write_fails=0.2),
        events=(
            Event(0.0991, "request", ("r30", 0, 86, 3, "metaserver", 0)),
            Event(0.1031, "request", ("r31", 131, 21, 2, "metaserver", 0)),
        ),
    ),
    "a failed write reads preempted blocks": Scenario(
        seed=36,
        shape=Shape(windows=(40,), prefill_blocks=30, decode_blocks=80, prefix_caching=False),
        faults=Faults(write_fails=0.5),
        events=(
            Event(0.0142, "request", ("r28", 128, 32, 1, "metaserver", 0)),
            Event(0.02, "reset", (0.0,)),
        ),
    ),
    "two prefill engines write for a ticket": Scenario(
        seed=2,
        shape=Shape(prefills=2, prefill_tp=2, prefill_blocks=80, decode_blocks=16),
        faults=Faults(interrupts=0.02, delay=0.5, two_prefills=1.0),
        events=(Event(0.0189, "request", ("r2", 1, 33, 4, "metaserver", 0)),),
    ),
    "prefill computes another prompt than the ticket's": Scenario(
        seed=1,
        shape=Shape(prefill_blocks=80, decode_blocks=80, pool=True),
        faults=Faults(other_prompt=0.5),
        events=(Event(0.0646, "request", ("r9", 109, 104, 4, "metaserver", 0)),),
    ),
    "KV that vLLM took back is still being written by another rank": Scenario(
        seed=224,
        shape=Shape(
            prefills=2, prefill_tp=2, prefill_blocks=80, decode_blocks=80, pool=True, prefill_policy="recompute"
        ),
        faults=Faults(slow=0.5, slow_by=50.0, load_fails=0.5),
        events=(
            Event(0.0044, "request", ("r3", 103, 14, 3, "metaserver", 0)),
            Event(0.0048, "request", ("r4", 104, 77, 5, "metaserver", 16)),
        ),
    ),
}
"""By the name of the mutant that takes the guard out."""
