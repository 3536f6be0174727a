# SPDX-License-Identifier: Apache-2.0
"""Faults while prefill computes prompts that have no blocks on decode, or holds them (`prefill_first_tokens`)."""

import dataclasses

from faults.request_faults import leave_at_every_stage
from faults.scenario import FEW_BLOCKS, ROUTED, SOON_S, Scenario
from faults.traffic import Answer
from faults.world import World, blocks_in_use
from harness.engines import Server
from harness.waiting import wait_until
from harness.wire import Rule
from vllm_ascend_pd.core.protocol import GrantRequest

FIRST_TOKENS = 300
"""Half of the prompts are longer."""
LONG_FIRST = dataclasses.replace(
    FEW_BLOCKS,
    name="TP 2 to TP 1, 14 blocks on decode, `prefill_first_tokens`",
    prefill=dataclasses.replace(ROUTED.prefill, max_model_len=FEW_BLOCKS.prefill.max_model_len),
    decode=dataclasses.replace(
        FEW_BLOCKS.decode,
        connector_extra=(*FEW_BLOCKS.decode.connector_extra, ("prefill_first_tokens", FIRST_TOKENS)),
        load_failure_policy="fail",
    ),
)


def kill_computing(world: World, server: Server) -> list[Answer]:
    """Intents are out, and prefill computes their prompts."""
    volley = world.send(world.requests())
    wait_until(lambda: world.running(world.prefill) > 0, SOON_S)
    server.process.kill()
    answers = volley.answers()
    world.restart(server)
    return answers


def kill_prefill_that_holds(world: World) -> list[Answer]:
    """Prefill has computed all prompts. No grant comes through, so decode has no room for some of them."""
    requests = world.requests()
    with world.channel.ruled(Rule(GrantRequest, "hold")):
        volley = world.send(requests)
        wait_until(lambda: world.channel.held and is_done(world), SOON_S)
        assert volley.in_flight >= 8
        world.prefill.process.kill()
    answers = volley.answers()
    world.restart(world.prefill)
    return answers


def is_done(world: World) -> bool:
    """Whether prefill has computed all that it was asked for, and keeps some of it."""
    waits = world.prefill.metric("vllm:num_requests_running") + world.prefill.metric("vllm:num_requests_waiting")
    return waits == 0 and blocks_in_use(world.prefill) > 4


SCENARIOS = [
    Scenario(11, "prefill killed while it computes long prompts", lambda w: kill_computing(w, w.prefill), LONG_FIRST),
    Scenario(
        11, "prefill killed while it holds prompts that decode has no room for", kill_prefill_that_holds, LONG_FIRST
    ),
    Scenario(
        11, "decode killed while prefill computes long prompts", lambda w: kill_computing(w, w.decode), LONG_FIRST
    ),
    Scenario(11, "clients of long prompts leave at every stage", leave_at_every_stage, LONG_FIRST),
]
