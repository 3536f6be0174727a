# SPDX-License-Identifier: Apache-2.0
"""Checks what happens in a run against the rules of docs/design.md. Each violation begins with the rule's name."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.scheduling import remembered
from simulation.kernel import Process, kernel
from vllm_ascend_pd.core.ticket_params import carries_ticket

if TYPE_CHECKING:
    from simulation.engine import Engine, EngineStep, Rank
    from simulation.world import World

_RESTS = "a slot that rests"

# How long a prompt with a ticket may find only prompts without one in its way (R11). Less than `hold_timeout_s`.
_WAITS_FOR_HELD_S = 1.5
# How long a ticket may wait for a prompt that no prefill engine has: a question every 2 s, and `settle_timeout_s`.
_WAITS_FOR_NONE_S = 9.0
# Beside the sum of all timeouts: threads look at their clocks now and then.
_SLACK_S = 5.0
# Rounding of virtual times.
_EPSILON_S = 1e-6


class Held(NamedTuple):
    """What a block of a prefill rank holds."""

    block: int
    content: int | None
    # As `Rank.taken` counts.
    taken: int


class Oracle:
    """The rules, for one run. `World` checks R4."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.violations: list[str] = []
        # The prefill engine that has written for each ticket, by decode rank and request.
        self._writers: dict[tuple[str, str], str] = {}
        # Since when a prompt with a ticket waits for prompts without one, by engine.
        self._waits_since: dict[str, float] = {}
        # Since when requests wait with their tickets, by ticket id and how often the engine has been stopped.
        self._tickets_since: dict[tuple[str, int], float] = {}
        # Since when tickets wait for prompts that no prefill engine has, by ticket id.
        self._without_prompt: dict[str, float] = {}
        # How often prefill was asked for each prompt.
        self._asked: Counter[tuple[int, ...]] = Counter()

    def violated(self, what: str) -> None:
        self.violations.append(what)
        kernel().halted = True
        kernel().tell("VIOLATION: {}", what)

    # R1.

    def reads(self, rank: "Rank", step: "EngineStep", states: bool) -> None:
        """A rank computes, and reads the KV of earlier tokens. Other requests may compute it in the same step.

        `states`: the states instead, as they are before the step.
        """
        for layer in rank.caches.layers:
            group = rank.caches.groups[layer.group]
            if group.is_state is not states or not rank.caches.wrong_slots(layer, step.places("read", layer.group)):
                continue
            for part in step.parts:
                read = part.read[layer.group]
                if wrong := rank.caches.wrong_slots(layer, read):
                    span = 1 if group.is_state else group.span
                    blocks = sorted({int(read.slots[index]) // span for index in wrong})
                    self.violated(
                        f"R1: {part.request_id} computes from wrong KV on {rank.name}: {len(wrong)} tokens, "
                        f"{layer.name}, blocks {blocks}"
                    )
                    return

    # R8. R1 says that it is the same prompt's.

    def starts(self, rank: "Rank", step: "EngineStep") -> None:
        """Requests compute for the first time after their KV has come.

        All of it was computed with the same weights: those that this rank has, or had while the ticket was open.
        """
        for part in step.parts:
            if part.updates is None:
                continue
            found: set[int] = set()
            for layer in rank.caches.layers:
                if not rank.caches.groups[layer.group].is_state:  # the step has changed these
                    found |= rank.caches.updates_of(layer, part.read[layer.group])
            since = part.updates[rank.index]
            if len(found) > 1 or not all(since <= each <= rank.caches.updates for each in found):
                self.violated(
                    f"R8: {part.request_id} starts on {rank.name}, which has had {rank.caches.updates} weight updates, "
                    f"and {since} when it asked. Its KV is of weights after {sorted(found)}"
                )

    # R2 and R10.

    def arrives(self, rank: "Rank", address: int, num_bytes: int, writer: "Rank") -> None:
        """Bytes of a prefill rank arrive in a decode rank's memory."""
        engine = rank.engine
        for block in rank.caches.blocks_at(address, num_bytes):
            request_id = engine.open_blocks.get(block)
            if request_id is None:
                self.violated(
                    f"R2: bytes of {writer.name} arrive in block {block} of {rank.name}, which no open ticket names"
                )
                return
            first = self._writers.setdefault((rank.name, request_id), writer.engine.started_as)
            if first != writer.engine.started_as:
                self.violated(f"R10: both {first} and {writer.engine.started_as} write for {request_id}")

    def ticket_issued(self, engine: "Engine", request_id: str) -> None:
        for rank in engine.ranks:  # each rank decides for itself, and a ticket succeeds only if all decide alike
            self._writers.pop((rank.name, request_id), None)

    # R3.

    def owner(self, rank: "Rank", address: int) -> object:
        """Returns what the memory at `address` of a prefill rank holds: a prefix, or a step send's regrouped KV."""
        for block in rank.caches.blocks_at(address, 1):
            return Held(block, rank.content.get(block), rank.taken[block])
        ring = rank.worker._regrouper.ring
        offset = (address - ring.buffer.data_ptr()) // ring.slot_bytes * ring.slot_bytes
        if any(slot.offset == offset for _, slot in ring._resting):
            return _RESTS
        return next((id(holder) for slot, holder in ring._holders.items() if slot.offset == offset), None)

    def is_read(self, rank: "Rank", address: int, owner: object) -> None:
        """Mooncake reads memory. `owner`: what it held when the write began."""
        now, where = self.owner(rank, address), "a staging slot"
        if isinstance(owner, Held) and isinstance(now, Held):
            if now.taken > owner.taken:  # its transfer has failed since then, and decode keeps its blocks
                return
            now, where = now._replace(taken=owner.taken), f"block {owner.block}"
        if now not in (owner, _RESTS):
            self.violated(f"R3: a write of {rank.name} reads {where}, which has other KV by now")

    # R4. The bound of each wait is checked here, that of all together by `World`.

    def look(self) -> None:
        """Is called once a second."""
        for engine in self._world.decodes:
            self._look_at_tickets(engine)
        if not self._world.loses_messages:
            self._look_for_prompts()

    @property
    def _ticket_s(self) -> float:
        """How long a request may wait with one ticket, on a decode engine whose processes run."""
        config = self._world.config
        return config.queue_timeout_s + config.transfer_timeout_s + config.lease_s + self._world.settle_s + _SLACK_S

    def _look_at_tickets(self, engine: "Engine") -> None:
        if not engine.is_up or engine.is_asleep or any(process.stopped or process.dead for process in engine.processes):
            return
        stops = sum(process.stops for process in engine.processes)
        for transfer in list(engine.role._transfers.values()):
            if transfer.ranks_ended or transfer.request_ended:
                continue
            key = transfer.ticket.ticket_id, stops
            since = self._tickets_since.setdefault(key, kernel().now)
            if kernel().now - since > self._ticket_s:
                self.violated(f"R4: {transfer.request_id} has waited for {self._ticket_s:g} s with one ticket")

    def _look_for_prompts(self) -> None:
        world = self._world
        waiting: dict[str, float] = {}
        for engine in world.decodes:
            if not engine.is_up or any(process.stopped or process.dead for process in engine.processes):
                continue
            for transfer in engine.role._transfers.values():
                named = getattr(transfer.recipient, "_holder", None)
                if named is None or transfer.failure is not None or transfer.ranks_ended:
                    continue
                ticket_id = transfer.ticket.ticket_id
                holder = next((each for each in world.prefills if each.started_as == named.engine_id), None)
                if holder is not None and not _has_prompt(holder, named.transfer_id, ticket_id):
                    waiting[ticket_id] = since = self._without_prompt.get(ticket_id, kernel().now)
                    if kernel().now - since > _WAITS_FOR_NONE_S:
                        self.violated(f"R4: {transfer.request_id} waits for a prompt that no prefill engine has")
        self._without_prompt = waiting

    # R5.

    def exchange(self, rank: "Rank", purposes: list[tuple[int, object]]) -> None:
        """A rank takes part in a collective. `purposes`: of all ranks so far."""
        if any(each != purposes[0] for each in purposes):
            self.violated(f"R5: ranks of {rank.engine.name} exchange different things: {purposes}")

    # R7.

    @property
    def backpressure_s(self) -> float:
        """How long a layer may wait for room, as `PrefillWorker.push_layer` says."""
        config = self._world.config
        return config.control_timeout_s + 2 * config.write_timeout_s + self._world.settle_s

    def hook(self, process: Process, name: str, longest_s: float) -> "_Hook":
        """Around a hook that takes `longest_s` at most, unless its process is stopped."""
        return _Hook(self, process, name, longest_s)

    # R11.

    def prefill_scheduled(self, engine: "Engine") -> None:
        """Looks whether a prompt with a ticket has no blocks while only prompts without one have any."""
        role, vllm = engine.role, engine.vllm
        waiting = [
            request
            for request in [*vllm.waiting, *getattr(vllm, "skipped_waiting", ())]
            if carries_ticket(request.kv_transfer_params) and request.request_id not in role._refused
        ]
        held = [prompt for prompt in role._prompts.values() if prompt.hold_until is not None]
        busy = vllm.running or role._transfers or engine.is_asleep
        if not waiting or not held or busy:
            self._waits_since.pop(engine.started_as, None)
            return
        since = self._waits_since.setdefault(engine.started_as, kernel().now)
        if kernel().now - since > _WAITS_FOR_HELD_S:
            self.violated(
                f"R11: {waiting[0].request_id} has a ticket and waits for {held[0].request.request_id}, which has none"
            )

    # What is computed twice.

    def prefill_asked(self, tokens: Sequence[int]) -> None:
        """A prefill engine gets a request for a prompt."""
        self._asked[tuple(tokens)] += 1

    def _look_for_repetition(self) -> None:
        """Where nothing went wrong, each client's prompt is computed once.

        A decode engine that never computes may ask again for a request that it preempted.
        """
        if self._world.may_fail or self._world.scenario.shape.never:
            return
        wanted = Counter(tuple(client.tokens) for client in self._world.router.clients.values())
        for tokens, asked in self._asked.items():
            if asked > (clients := wanted[tokens]):
                self.violated(f"{asked} prefill requests for {clients} clients with one prompt of {len(tokens)} tokens")

    # At the end.

    def at_rest(self) -> None:
        """Nothing is left of the requests that have ended."""
        world = self._world
        for engine in world.engines:
            if (taken := engine.all_free - engine.free_blocks) != 0:
                self.violated(f"leak: {taken} blocks of {engine.name}")
            for what, kept in self._kept(engine).items():
                self.violated(f"leak: {engine.name} keeps {what}: {kept}")
        for what, kept in self.kept_by_proxy().items():
            self.violated(f"leak: the proxy keeps {what}: {kept}")
        self._look_for_repetition()
        if not world.may_fail:
            for client in world.router.clients.values():
                if client.outcome != "right":
                    self.violated(f"R4: {client.name} {client.outcome}, although nothing went wrong")

    def kept_by_proxy(self) -> dict[str, Any]:
        proxy = self._world.proxy
        return {} if proxy is None else {what: value for what, value in proxy.kept.items() if value}

    def is_at_rest(self, engine: "Engine") -> bool:
        return engine.is_idle and not self._kept(engine)

    def _kept(self, engine: "Engine") -> dict[str, Any]:
        """Returns what an engine still keeps of requests."""
        kept: dict[str, Any] = {name: list(value)[:3] for name, value in remembered(engine.role).items()}
        if not engine.prefills:
            kept |= {f"intents' {name}": value for name, value in remembered(engine.role._intents).items()}
            recipients = engine.role._recipients
            kept |= {
                "tickets under way": list(getattr(recipients._metaserver, "_open", ())),
                "offers": list(recipients._prefill._open),
            }
        held = getattr(engine.role, "_held", None)
        if held is not None:
            kept |= {f"held prompts' {name}": value for name, value in remembered(held.room).items()}
            kept["held prompts"] = list(held._prompts)
        for rank in engine.ranks:
            if engine.prefills:
                kept[f"transfers of {rank.name}"] = list(rank.worker._transfers)
                writer = rank.transfer._writer
                queues = {} if writer is None else writer._queues
                kept[f"batches in flight of {rank.name}"] = sum(each._batches for each in queues.values())
                if (regrouper := rank.worker._regrouper) is not None:
                    kept[f"staging slots of {rank.name}"] = len(regrouper.ring.holders)
            else:
                kept[f"open tickets of {rank.name}"] = list(rank.worker._grants._open)
        return {what: value for what, value in kept.items() if value}


def _has_prompt(engine: "Engine", transfer_id: str, ticket_id: str) -> bool:
    """Whether a prefill engine has, or may have, the prompt that a ticket is for."""
    if not engine.is_up or any(process.stopped for process in engine.processes):
        return True
    role = engine.role
    return transfer_id in role._held._prompts or ticket_id in role._served


class _Hook:
    """See `Oracle.hook`."""

    def __init__(self, oracle: Oracle, process: Process, name: str, longest_s: float) -> None:
        self._oracle = oracle
        self._process = process
        self._name = name
        self._longest_s = longest_s

    def __enter__(self) -> None:
        self._began, self._stops = kernel().now, self._process.stops

    def __exit__(self, kind: object, *_: object) -> None:
        took = kernel().now - self._began
        if kind is None and took > self._longest_s + _EPSILON_S and self._process.stops == self._stops:
            self._oracle.violated(f"R7: {self._process.name}: {self._name} takes {took:g} s")


class LogWatch(logging.Handler):
    """Finds exceptions that the product did not expect: they are logged with a traceback."""

    def __init__(self, violated: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._violated = violated

    def emit(self, record: logging.LogRecord) -> None:
        kernel().tell("logs: {}", record.getMessage()[:200])
        if record.exc_info and record.exc_info[1] is not None:
            self._violated(f"R4: an exception that nobody expects: {record.getMessage()[:80]}: {record.exc_info[1]!r}")
