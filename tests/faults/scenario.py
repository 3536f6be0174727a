# SPDX-License-Identifier: Apache-2.0
"""One fault: what is broken, when, and what may become of the requests in flight."""

import contextlib
import dataclasses
import re
import signal
from collections.abc import Callable, Iterator

from faults.traffic import Answer, Volley
from faults.world import DECODE, PREFILL, Shape, World
from harness.engines import Server
from harness.models import TINY
from harness.waiting import wait_until
from harness.wire import Rule, SideChannel
from vllm_ascend_pd.core.protocol import Message

SOON_S = 60.0
"""Within which something that must happen does."""
SLOW_S = 0.15
"""A batch then takes so much longer: there is a middle to interrupt."""

BLOCK_BYTES = 128 * TINY.kv_bytes_per_token
FAIL = Shape(
    "TP 2 to TP 1, `kv_load_failure_policy` fail", decode=dataclasses.replace(DECODE, load_failure_policy="fail")
)
RECOMPUTE = Shape(
    "TP 2 to TP 1, `kv_load_failure_policy` recompute",
    decode=dataclasses.replace(DECODE, load_failure_policy="recompute"),
)
ROUTED = Shape(
    "TP 2 to TP 1, behind vllm-router",
    prefill=dataclasses.replace(PREFILL, connector_extra=(*PREFILL.connector_extra, ("hold_timeout_s", 20.0))),
    routed=True,
)
FEW_BLOCKS = Shape(
    "TP 2 to TP 1, 14 blocks each",
    # Per rank: prefill's two have half of the heads each.
    prefill=dataclasses.replace(PREFILL, kv_cache_bytes=14 * BLOCK_BYTES // 2, max_model_len=1500),
    decode=dataclasses.replace(DECODE, kv_cache_bytes=14 * BLOCK_BYTES, max_model_len=1500),
    longest=1450,
)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One fault.

    number: its number in the list of faults that must be survived.
    run: breaks something and repairs it. Returns how the requests in flight ended.
    """

    number: int
    name: str
    run: Callable[[World], list[Answer]]
    shape: Shape = FAIL
    short: bool = False
    absorbed: bool = False
    """All answers are right: nobody notices."""
    disconnects: bool = False
    """Clients may see their connections break."""
    reasonless: bool = False
    """Clients may get an error without a reason: a router knows none, and decode's log has it."""

    def __str__(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())


def kill_holding(
    world: World, server: Server, channel: SideChannel, kind: type[Message], held: int = 2
) -> list[Answer]:
    """Kills an engine when so many messages of a kind are held on their way, and restarts it."""
    requests = world.requests()
    with channel.ruled(Rule(kind, "hold")):
        volley = world.send(requests)
        wait_until(lambda: len(channel.held) >= held, SOON_S)
        assert volley.in_flight >= 8
        server.process.kill()
    answers = volley.answers()
    world.restart(server)
    return answers


@contextlib.contextmanager
def pushing(world: World) -> Iterator[Volley]:
    """Requests in flight, of which prefill has written some batches and will write more, slowly."""
    with world.writes("slow", seconds=SLOW_S):
        before = sum(world.tell(world.prefill, "batches"))
        volley = world.send(world.requests())
        wait_until(lambda: sum(world.tell(world.prefill, "batches")) > before + 2, SOON_S)
        assert volley.in_flight >= 8
        yield volley


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    server.process.signal_group(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.signal_group(signal.SIGCONT)
