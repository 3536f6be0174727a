# SPDX-License-Identifier: Apache-2.0
"""Guards of the product that can be taken out, one at a time. `try_mutants.py` looks who notices.

A mutant is an edit of a function's source. So it fails loudly when that source has changed. Add one with each guard:
name what goes wrong without it, and what of the scenarios must be fixed for seeds to show it.
"""

import __future__

import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType, MappingProxyType
from typing import Any

from simulation.scenario import Event, Scenario, draw


@dataclass(frozen=True)
class Edit:
    """`function`: `module:name` or `module:Class.name`, below `vllm_ascend_pd`. `old` occurs once in its source."""

    function: str
    old: str
    new: str

    @contextmanager
    def made(self) -> Iterator[None]:
        """Changes the function wherever it was imported. Raises ValueError if its source is not as expected."""
        path, _, name = self.function.partition(":")
        module = importlib.import_module(f"vllm_ascend_pd.{path}")
        owner: Any = module
        *classes, name = name.split(".")
        for each in classes:
            owner = getattr(owner, each)
        function = _innermost(vars(owner)[name])
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.old) != 1:
            raise ValueError(f"{self.function} has {source.count(self.old)} times {self.old!r}")
        made: dict[str, Any] = {}
        edited = source.replace(self.old, self.new)
        exec(compile(edited, self.function, "exec", __future__.annotations.compiler_flag), vars(module), made)
        before = function.__code__
        function.__code__ = _innermost(made[name]).__code__
        try:
            yield
        finally:
            function.__code__ = before


def _innermost(function: Any) -> FunctionType:
    """Returns the function without its decorators."""
    if isinstance(function, property):
        function = function.fget
    if isinstance(function, classmethod):
        function = function.__func__
    unwrapped = inspect.unwrap(function)
    assert isinstance(unwrapped, FunctionType)
    return unwrapped


@dataclass(frozen=True)
class Mutant:
    edits: tuple[Edit, ...]
    # What of the scenarios is not drawn.
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # How many seeds are tried. 0: the simulation does not run this code, or cannot show what is wrong.
    seeds: int = 60
    # What happens beside requests. None: it is drawn.
    events: tuple[Event, ...] | None = None

    @property
    def where(self) -> str:
        """The product's folder."""
        return self.edits[0].function.partition(".")[0]

    def scenario(self, seed: int) -> Scenario:
        drawn = draw(seed, **self.fixed)
        if self.events is None:
            return drawn
        requests = [event for event in drawn.events if event.what == "request"]
        return replace(drawn, events=tuple(sorted([*requests, *self.events], key=lambda event: event.at)))

    @contextmanager
    def made(self) -> Iterator[None]:
        with ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(edit.made())
            yield


def _without(
    function: str, old: str, new: str, seeds: int = 60, events: tuple[Event, ...] | None = None, **fixed: Any
) -> Mutant:
    return Mutant((Edit(function, old, new),), fixed, seeds, events)


_SLOW = {"slow": 0.5, "slow_by": 50.0}
_FAILING = {"write_fails": 0.2}
_STAGED = {"prefill_tp": 2, "decode_tp": 1}
_ROOM = {"prefill_blocks": 80, "decode_blocks": 80}
_ONE = {"prefills": 1, "decodes": 1, "prefill_tp": 1, "decode_tp": 1, **_ROOM}
# Of `_ONE`'s shape. The prefill rank stands still, and its engine is killed.
_STOP = (Event(0.03, "stop", (0.3, 20.0)),)
_KILL = (Event(0.02, "kill", (0.0, 2.0)),)
_RESETS = tuple(Event(0.01 * n, "reset", (0.0,)) for n in range(1, 20))
# Decode's weights are updated 10 ms after prefill's.
_WEIGHTS = tuple(Event(0.02 * n, "weights", (0.01,)) for n in range(1, 6))
_TIGHT = {**_ONE, "prefill_blocks": 16, "prefix_caching": False}
# Nothing goes wrong, so each request must have its answer.
_CALM = {
    **_ONE,
    "interrupts": 0.0,
    "loss": 0.0,
    "repetition": 0.0,
    "delay": 0.0,
    "write_fails": 0.0,
    "slow": 0.0,
    "other_prompt": 0.0,
    "two_prefills": 0.0,
    "load_fails": 0.0,
}
_POOL = {"pool": True, "load_fails": 0.5, **_ROOM}

MUTANTS: dict[str, Mutant] = {
    # connector/unsupported.py
    "a cancelled ticket that no rank knows has no end": _without(
        "connector.unsupported:_reasons",
        "if survives_faults(vllm_config) and not vllm_0_33_lost_steps.fits():",
        "if False:",
        seeds=0,
    ),
    # core/decode_ticket.py
    "KV counts as received after the first of its writers": _without(
        "core.decode_ticket:DecodeTicket.report", "if not self._missing:", "if True:", **_STAGED
    ),
    "two prefill engines write for a ticket": _without(
        "core.decode_ticket:DecodeTicket.grant",
        "if self._engine != (writer.engine_id, request.sharding):",
        "if False:",
        prefills=2,
        two_prefills=1.0,
    ),
    "a failed ticket is closed before its writers have stopped": _without(
        "core.decode_ticket:_Lease.is_over",
        "return now >= self.applied_at and (self.settled or (self.gone and now >= self.until))",
        "return True",
        **_ONE,
        write_fails=0.5,
        requests=12,
    ),
    "a ticket is closed although its writer may go on": _without(
        "core.decode_ticket:_Lease.is_over",
        "(self.gone and now >= self.until)",
        "now >= self.until",
        events=_STOP,
        **_ONE,
        **_SLOW,
        requests=12,
    ),
    "a ticket is closed before the last bytes of a killed writer": _without(
        "core.decode_ticket:_Lease.is_over", "(self.gone and now >= self.until)", "self.gone", seeds=0
    ),
    "a report of bytes under way ends them": _without(
        "core.decode_ticket:DecodeTicket.report",
        "if report.settle_s == 0:",
        "if True:",
        **_ONE,
        write_fails=0.5,
        requests=12,
    ),
    "a ticket that has ended is granted": _without(
        "core.decode_ticket:DecodeTicket.admit", "if self.state is not TicketState.OPEN:", "if False:", seeds=0
    ),
    "a writer that goes silent fails no ticket": _without(
        "core.decode_ticket:_Lease.has_run_out",
        "not self.reported and now >= self.until - self.settle_s",
        "False",
        seeds=0,
    ),
    "a ticket has no deadline": _without(
        "core.decode_ticket:DecodeTicket.tick",
        "elif now >= self.deadline:",
        "elif False:",
        seeds=0,
    ),
    "prefill's end without writing fails no ticket": _without(
        "core.decode_ticket:DecodeTicket.tick",
        "elif now >= self._awaits_writers_until and",
        "elif False and",
        seeds=0,
    ),
    "an altered ticket is granted": _without(
        "core.decode_ticket:DecodeTicket.admit", "if request.digest != self.digest:", "if False:", seeds=0
    ),
    "a writer that has reported gets another grant": _without(
        "core.decode_ticket:DecodeTicket.grant",
        "if lease is not None and lease.reported:",
        "if False:",
        seeds=0,
    ),
    "a rank writes for a ticket in two transfers": _without(
        "core.decode_ticket:DecodeTicket.grant", "self._has_other(writer) or ", "", seeds=0
    ),
    "a report that is repeated counts twice": _without(
        "core.decode_ticket:DecodeTicket.report",
        "if not first or self.state is not TicketState.OPEN:",
        "if self.state is not TicketState.OPEN:",
        seeds=0,
    ),
    "a writer that a closed connection declared dead stays dead": _without(
        "core.decode_ticket:DecodeTicket.grant",
        "    lease.gone = False\n",
        "    pass\n",
        seeds=0,
    ),
    "a report of failure counts as one of success": _without(
        "core.decode_ticket:DecodeTicket.report",
        "if report.reason is not None:\n        self._fail_by(report)\n        return True\n    self.num_bytes",
        "self.num_bytes",
        **_ONE,
        write_fails=0.5,
    ),
    # core/prefill_ticket.py
    "a lease is longer at prefill than at decode": _without(
        "core.prefill_ticket:PrefillTicket.answered",
        "asked_at + answer.lease_s",
        "asked_at + 10 * answer.lease_s",
        seeds=0,
    ),
    "a write is planned after its lease": _without(
        "core.prefill_ticket:PrefillTicket.may_write", "elif now < destination.until:", "elif True:", seeds=0
    ),
    "success is reported while bytes are under way": _without(
        "core.prefill_ticket:PrefillTicket.begin_notifying",
        "if self.failure is None and not settled:",
        "if False:",
        seeds=0,
    ),
    "blocks are freed while a failed write reads them": _without(
        "core.prefill_ticket:PrefillTicket.end", " or not self.final", "", **_TIGHT, write_fails=0.5
    ),
    "decode is told for ever": _without(
        "core.prefill_ticket:PrefillTicket.next_round", " or self.rounds == _REPORT_ROUNDS", "", seeds=0
    ),
    "a transfer ends before decode has granted or refused": _without(
        "core.prefill_ticket:PrefillTicket.finish", "if self.waits_for_grant:", "if False:", seeds=0
    ),
    "a grant may come for ever too late": _without(
        "core.prefill_ticket:PrefillTicket.may_write", "if now < self.grant_deadline:", "if True:", seeds=0
    ),
    "a failure counts although decode is being notified of success": _without(
        "core.prefill_ticket:PrefillTicket.fail",
        "if self.failure is None and self.phase in (Phase.WRITING, Phase.FINISHED):",
        "if self.failure is None:",
        seeds=0,
    ),
    "a preempted request whose writes are over counts as delivered": _without(
        "core.prefill_ticket:PrefillTicket.fail",
        "self.phase in (Phase.WRITING, Phase.FINISHED)",
        "self.phase is Phase.WRITING",
        seeds=1,
    ),
    "a grant wakes no sender": _without(
        "core.prefill_ticket:PrefillTicket.answered", "self._changed.notify_all()", "pass", seeds=0
    ),
    "a failed write is not marked as in flight": _without(
        "core.prefill_ticket:PrefillTicket.delay_settling",
        "self.settled_at = max(self.settled_at, until)",
        "pass",
        **_ONE,
        write_fails=0.5,
        requests=12,
    ),
    "decode is not told that nothing is under way any more": _without(
        "core.prefill_ticket:PrefillTicket.begin_notifying",
        "elif self.phase is Phase.NOTIFIED and settled and not self.final:",
        "elif False:",
        **_ONE,
        write_fails=0.5,
    ),
    # core/running_time.py
    "bytes settle while their process is stopped": _without(
        "core.running_time:RunningTime.__call__",
        "if now - self._last > _STOPPED_S:",
        "if False:",
        events=_STOP,
        **_ONE,
        write_fails=0.5,
        requests=12,
    ),
    # decode/grants.py
    "a stopped decode rank closes tickets at once": _without(
        "decode.grants:GrantService._notice_stop",
        "if self._running_time.stopped_s > self._stopped_s:",
        "if False:",
        events=(Event(0.014, "stop", (0.9, 20.0)),),
        late_bytes=True,
        **_ONE,
        **_SLOW,
    ),
    "nobody is told that a ticket has failed": _without(
        "decode.grants:GrantService._revoke",
        "for writer in dict.fromkeys([*live, *overdue]):",
        "for writer in ():",
        events=_KILL,
        **_ONE,
        **_SLOW,
    ),
    "a broken connection counts as the end of a writer that has another": _without(
        "decode.grants:GrantService._connection_closed",
        "if opened.connections.get(writer) == connection:",
        "if True:",
        seeds=0,
    ),
    "a stranger's report ends a ticket": _without(
        "decode.grants:GrantService._report", " or report.digest != opened.ticket.digest", "", seeds=0
    ),
    "blocks are granted that queued steps still write": _without(
        "decode.grants:GrantService._grant", "if not opened.vacated.is_done():", "if False:", seeds=0
    ),
    "a closed ticket is asked for again and again": _without(
        "decode.grants:GrantService._grant",
        "if (ended := self._closed.get(request.ticket_id)) is not None:",
        "if (ended := None) is not None:",
        seeds=0,
    ),
    "a prefill rank beyond its engine's size is granted": _without(
        "decode.grants:GrantService._grant", "if request.writer.rank >= ranks:", "if False:", seeds=0
    ),
    "KV of other weights is taken": _without(
        "decode.grants:GrantService._refuse_weights",
        "self._config.allow_other_model or are_alike(theirs, ours)",
        "True",
        events=_WEIGHTS,
        **_CALM,
    ),
    "decode sleeps while writers may write": _without(
        "decode.grants:GrantService.sleep", "if not self._open:", "if True:", seeds=0
    ),
    # decode/expected_writers.py
    "shapes of prefill are worked out without end": _without(
        "decode.expected_writers:ExpectedWriters.of",
        "if opened.shapes_worked_out >= MAX_SHAPES_WORKED_OUT:",
        "if False:",
        seeds=0,
    ),
    # decode/intents.py
    "a prompt that prefill has computed stays hidden": _without(
        "decode.intents:Intents.answered",
        "self.awaiting_prefill.discard(prompt.request.request_id)",
        "pass",
        events=(),
        **(_CALM | {"prefill_first": 0}),
    ),
    "a prompt that prefill has failed to compute stays hidden": _without(
        "decode.intents:Intents._fail",
        "self.awaiting_prefill.discard(prompt.request.request_id)",
        "pass",
        events=_KILL,
        **_ONE,
        prefill_first=0,
        windows=(),
        states=False,
        never=False,
    ),
    "a computed prompt waits for blocks for ever": _without(
        "decode.intents:Intents.overdue", "while self._due and", "while False and", seeds=0
    ),
    "any prefill's answer is taken": _without(
        "decode.intents:Intents._ticket_recipient", "if not names_prefill(params) or", "if", seeds=0
    ),
    # decode/scheduler.py
    "intents wait until vLLM asks": _without(
        "decode.scheduler:DecodeScheduler._post_intents",
        "for request in self._intents.unasked():",
        "for request in []:",
        seeds=0,
    ),
    "prefill holds a prompt that gets no ticket": _without(
        "decode.scheduler:DecodeScheduler._intents_end", "long.end(reason)", "pass", seeds=0
    ),
    "a computed prompt's ticket does not go to the engine that holds it": _without(
        "decode.scheduler:DecodeScheduler.allocated",
        "= long.ticket_recipient, True",
        "= long.intent_recipient, True",
        **(_CALM | {"prefill_first": 0, "proxy": False}),
        events=(),
    ),
    "the proxy does not learn that a ticket was refused": _without(
        "decode.scheduler:DecodeScheduler._take_answers", "if transfer.follows_intent:", "if False:", seeds=0
    ),
    "an ended transfer ends again": _without(
        "decode.scheduler:DecodeScheduler.update",
        "if transfer is not None and not transfer.ranks_ended:",
        "if transfer is not None:",
        seeds=0,
    ),
    "the ticket of an aborted request is not cancelled": _without(
        "decode.scheduler:DecodeScheduler._request_ended",
        "self._fail(transfer, _ABORTED, ReceiveFailure.ABORTED)",
        "pass",
        seeds=0,
    ),
    "a request waits for a prefill process that is stopped": _without(
        "decode.scheduler:DecodeScheduler._end_failed_waits",
        "while self._failed_waits and",
        "while False and",
        seeds=0,
    ),
    "decode asks for a prompt that it has had freed": _without(
        "decode.scheduler:DecodeScheduler.matched_tokens",
        "is_freed = request.request_id in self._without_ticket",
        "is_freed = False",
    ),
    "a request that loses its KV again and again never ends": _without(
        "decode.scheduler:_IncomingTransfer.why_not_again",
        "return None if lost < MAX_LOST else",
        "return None if True else",
        seeds=0,
    ),
    "wrong bytes count as any other failure": _without(
        "decode.scheduler:DecodeScheduler._take_failures",
        "ReceiveFailure.WRONG_BYTES if ticket_id in report.wrong else ",
        "",
        seeds=0,
    ),
    "a failed transfer fails again": _without(
        "decode.scheduler:DecodeScheduler._fail",
        "if transfer.ranks_ended or transfer.failure is not None:",
        "if transfer.ranks_ended:",
        seeds=0,
    ),
    "KV that steps lost on decode were to compute stays cached": _without(
        "decode.scheduler:DecodeScheduler.steps_lost", "self._blocks.drop_cached()", "pass", seeds=0
    ),
    "a cancellation that decode's ranks have lost is not repeated": _without(
        "decode.scheduler:DecodeScheduler.steps_lost",
        "self._step.cancelled[transfer.ticket.ticket_id] = transfer.failure or _STEP_LOST",
        "pass",
        seeds=0,
    ),
    # decode/worker.py
    "a ticket that decode's rank has lost has no end": _without(
        "decode.worker:DecodeWorker.start_step",
        "self._again = step.report_again - self._open_requests",
        "pass",
        seeds=0,
    ),
    "an update of decode's weights that was lost is not reported again": _without(
        "decode.worker:DecodeWorker.start_step", "self._updates.report_again()", "pass", seeds=0
    ),
    "a decode rank sleeps although writers have not stopped": _without(
        "decode.worker:DecodeWorker.sleep",
        "if not quiet.wait(self._config.lease_s + self._engine.limits.settle_s + self._config.control_timeout_s):",
        "if False:",
        seeds=0,
    ),
    # decode/checksums.py
    "KV without checksums counts as right": _without(
        "decode.checksums:Verifier._compare", "return found if found or is_known else None", "return found", seeds=0
    ),
    "what was right is remembered without end": _without(
        "decode.checksums:Verifier.take", "while len(self._right) > _MAX_WAITING:", "while False:", seeds=0
    ),
    "a device that takes no checksums ends a step": _without(
        "decode.checksums:Verifier._mismatches", "if wait_s < left_s:", "if True:", seeds=0
    ),
    # decode/prefill_client.py
    "a retry looks its endpoint up anew": _without(
        "decode.prefill_client:PrefillClient._follow",
        "answer = await self._ask(endpoint, question)",
        "answer = await self._ask((await self._addresses.of(prompt))[0], question)",
        seeds=0,
    ),
    "a silent prefill engine is asked for ever": _without(
        "decode.prefill_client:PrefillClient._follow",
        "if silent == SILENT_ROUNDS:",
        "if False:",
        seeds=0,
    ),
    "a prefill engine that takes no ticket is offered it for ever": _without(
        "decode.prefill_client:PrefillClient._offer",
        "if silent == SILENT_ROUNDS:",
        "if False:",
        seeds=0,
    ),
    # prefill/sender.py
    "a layer that was not written counts as written": _without(
        "prefill.sender:Sender._end_write",
        "delivered = self._write_apart(push, target, write) if write.errors else write.live",
        "delivered = write.live",
        **_FAILING,
    ),
    "one request's failed write marks all of the layer": _without(
        "prefill.sender:Sender._write_apart",
        "self._delay_settling(push, (i,), final)",
        "self._delay_settling(push, write.live, final)",
        seeds=0,
    ),
    "layers leave before their bytes can be read": _without(
        "prefill.sender:Sender._take_alike",
        " and task.ready.is_done()",
        "",
        seeds=0,
    ),
    "layers leave together although their writes differ": _without(
        "prefill.sender:Sender._take_alike",
        "if [(t.key, t.portions_id) for t in ours] != [(t.key, t.portions_id) for t in theirs]:",
        "if False:",
        seeds=0,
    ),
    "all layers that have come leave together": _without(
        "prefill.sender:Sender._write_layers",
        "len(layers) < _MOST_JOINED and ",
        "",
        seeds=0,
    ),
    "a layer is written before its bytes can be read": _without(
        "prefill.sender:Sender._write_layers",
        "self._await_bytes(layer)",
        "pass",
        **_STAGED,
    ),
    "a write overtakes KV that vLLM took back": _without(
        "prefill.sender:Sender._await_layout", "self._drain()", "pass", seeds=0
    ),
    "KV that vLLM took back is still being written by another rank": _without(
        "prefill.worker:PrefillWorker.start_step",
        "self._await_replaced_writes()",
        "pass",
        pool=True,
        load_fails=0.5,
        prefill_policy="recompute",
        **_ROOM,
        **_SLOW,
        **_STAGED,
    ),
    "KV that vLLM took back may arrive after what replaces it": _without(
        "prefill.sender:Sender._reach",
        "if transfer.again and transfer.state.settled_at > -math.inf:",
        "if False:",
        seeds=0,
    ),
    "requests that must not be written are": _without(
        "prefill.sender:Sender._write",
        "if time.monotonic() >= (until := step_send.writable_until(key)):",
        "if (until := step_send.writable_until(key)) is None:",
        seeds=0,
    ),
    "a batch begins after its lease": _without(
        "prefill.sender:Sender._write",
        "return time.monotonic() < until or time.monotonic() < step_send.lease_until(key, live)",
        "return True",
        seeds=0,
    ),
    "a write goes on after a batch of it has failed": _without(
        "prefill.sender:Sender._write", "if write.errors:\n", "if False:\n", seeds=0
    ),
    "more batches are under way than a peer's queue takes": _without(
        "prefill.sender:Sender._await_turn", "self._in_flight >= BATCHES_IN_FLIGHT or ", "", seeds=0
    ),
    "an error at the end of a batch is not told": _without(
        "prefill.sender:Sender._settle_oldest",
        "write.errors.append(_failure(flight.session, error))",
        "pass",
        **_ONE,
        write_fails=0.5,
    ),
    "a write ends before all its batches have begun": _without(
        "prefill.sender:Sender._end_what_is_over", " or not first.has_begun", "", seeds=0
    ),
    "an error after which bytes may arrive is not told": _without(
        "prefill.sender:_Write.error",
        "next((e for e in self.errors if e.may_arrive), self.errors[0])",
        "self.errors[0]",
        seeds=0,
    ),
    "KV of updated weights counts as delivered": _without(
        "prefill.sender:Sender._reach",
        "if before.version != now.version:",
        "if False:",
        events=_WEIGHTS,
        **_ONE,
        **_SLOW,
    ),
    "a written layer's room in the queue is not given back": _without(
        "prefill.sender:Sender._end_layer", "push.room.put(None)", "pass", seeds=0
    ),
    "a bug in a sender is not told": _without(
        "prefill.sender:Sender.check", "if self._broken is not None:", "if False:", seeds=0
    ),
    "a layer's slot is given back before it is written": _without(
        "prefill.sender:Sender._write_layers",
        "self._begun.extend(layers)",
        "list(map(self._end_layer, layers))",
        **_STAGED,
        **_SLOW,
    ),
    "a transfer's end overtakes its writes": _without(
        "prefill.sender:Sender._run",
        "self._begun.append(task)",
        "self._reach(task)",
        **_ONE,
        **_SLOW,
    ),
    "a request whose write has failed twice counts as delivered": _without(
        "prefill.sender:Sender._write_apart",
        "transfer.state.fail(reason, PushFailure.WRITE)",
        "pass",
        **_ONE,
        write_fails=0.5,
    ),
    "a failed write for several requests marks none of them": _without(
        "prefill.sender:Sender._write_apart",
        "self._delay_settling(push, write.live, error)",
        "pass",
        **_ONE,
        write_fails=0.5,
    ),
    # prefill/step_send.py
    "a slot is filled for a sender that has given up": _without(
        "prefill.step_send:LayerPush.fill", "return not self._given_up", "return True", seeds=0
    ),
    "a failure does not withdraw the permission to write": _without(
        "prefill.step_send:StepSend.writable_until",
        "if state.failure is not None:",
        "if False:",
        seeds=0,
    ),
    # prefill/step_plan.py
    "a rank leaves failed requests out of an exchange": _without(
        "prefill.step_plan:Planner._plan_geometry",
        "if mapping.serves(each[0].ticket.replica_hash)]",
        "if mapping.serves(each[0].ticket.replica_hash) and each[0].state.failure is None]",
        seeds=0,
    ),
    # prefill/regroup.py
    "a staging slot does not rest after a failed write": _without(
        "prefill.regroup:StagingRing.release", "if settled_at:", "if False:", **_FAILING, **_STAGED
    ),
    "layers that wait for grants keep all staging slots": _without(
        "prefill.regroup:Regrouper._acquire", "holder.give_up_ungranted(reason)", "pass", seeds=0
    ),
    "a layer of failed requests waits for a slot": _without(
        "prefill.regroup:Regrouper._acquire", "if step_send.has_failed:", "if False:", seeds=0
    ),
    "a broken group exchanges on": _without(
        "prefill.regroup:ExchangeGroup.fail", "self._group = None", "pass", seeds=0
    ),
    "a rank without units takes no part in an exchange": _without(
        "prefill.regroup:Regrouper._exchange_heads",
        "section = plane_units * mapping.source_bytes",
        "if len(step_send.units) == 0:\n        return\n    section = plane_units * mapping.source_bytes",
        events=(),
        **(_CALM | _STAGED),
    ),
    # prefill/worker.py
    "the model goes on while preempted blocks are read": _without(
        "prefill.worker:PrefillWorker.preempted",
        "if not passed.wait(max(0.0, deadline - time.monotonic())):",
        "if False:",
        events=_RESETS,
        **_TIGHT,
        **_SLOW,
    ),
    "a failed write reads preempted blocks": _without(
        "prefill.worker:PrefillWorker.preempted",
        "elif transfer.state.settled_at > self._rank.running_time():",
        "elif False:",
        events=_RESETS,
        **_TIGHT,
        **_SLOW,
        write_fails=0.5,
    ),
    "blocks are freed before vLLM is done with the request": _without(
        "prefill.worker:PrefillWorker._take", "if transfer.released:", "if True:", seeds=0
    ),
    "blocks of a failed forward pass are sent": _without(
        "prefill.worker:PrefillWorker.end_forward", "if error is not None:", "if False:", seeds=0
    ),
    "a layer is written before its checksums are taken": _without(
        "prefill.worker:PrefillWorker._put_layer", "ready = submit_layer(", "submit_layer(", seeds=0
    ),
    "the transfer of an ended request goes on": _without(
        "prefill.worker:PrefillWorker._release", "self._finish([transfer])", "pass"
    ),
    # prefill/outgoing_transfer.py, prefill/scheduler.py
    "KV that vLLM takes back counts as computed": Mutant(
        (
            Edit("prefill.outgoing_transfer:OutgoingPrompt.take_back", "self.done = min(self.done, token)", "return"),
            Edit(
                "prefill.outgoing_transfer:OutgoingTransfer.take_back",
                "if token < self.ticket.num_tokens:",
                "if False:",
            ),
        ),
        {**_POOL, "prefill_policy": "recompute"},
    ),
    "a load fails after its request was preempted": _without(
        "prefill.scheduler:PrefillScheduler.loads_failed",
        "transfer.take_back(0)",
        "pass",
        **_POOL,
        prefill_steps=2,
    ),
    "what an aborted request has computed stays cached": _without(
        "prefill.scheduler:PrefillScheduler.end_request", "self._evict_computed(prompt)", "pass", **_POOL
    ),
    "what is computed from a failed load before a preemption stays cached": _without(
        "prefill.scheduler:PrefillScheduler.loads_failed", "wrong |= prompt.earlier_blocks", "pass", seeds=0
    ),
    "what shares a failed load's blocks goes on from them": _without(
        "prefill.scheduler:PrefillScheduler.loads_failed",
        "self._requests.compute_again(prompt.request, token)",
        "pass",
        seeds=0,
    ),
    "tokens behind a gap count as computed": _without(
        "prefill.outgoing_transfer:OutgoingPrompt.compute",
        "if not self.is_lost and (self.taken_back is None or computed <= self.taken_back):",
        "if True:",
        seeds=0,
    ),
    "blocks leave before they are full": _without(
        "prefill.outgoing_transfer:OutgoingTransfer.parts", "done - done % align", "done", events=(), **_CALM
    ),
    "success is reported before the outputs of a step with failed loads": _without(
        "prefill.scheduler:PrefillScheduler._advance",
        "confirmed = prompt.ended or (is_certain and not self._survives_faults)",
        "confirmed = True",
        **_POOL,
        prefill_policy="fail",
    ),
    "what a request sent before a preemption counts without its load": _without(
        "prefill.scheduler:PrefillScheduler._advance",
        " and start == ticket.remote_cached_tokens",
        "",
        seeds=1,
        **_POOL,
        prefill_steps=2,
    ),
    "a state that has seen a token more is sent": _without(
        "prefill.scheduler:PrefillScheduler._serve",
        "if self._has_states and ticket.num_tokens != request.num_prompt_tokens:",
        "if False:",
        seeds=0,
    ),
    "each request waits for a rank that does not answer": _without(
        "prefill.sender:Sender._write_apart", 'reason if final.no_answer else ""', '""', seeds=0
    ),
    "prefill computes another prompt than the ticket's": _without(
        "prefill.scheduler:PrefillScheduler._serve",
        "self._requests.check_prompt(request, ticket)",
        "pass",
        other_prompt=0.5,
    ),
    "blocks of an ended request are freed while they are read": _without(
        "prefill.scheduler:PrefillScheduler.end_request",
        "self._step.finished[request_id] = incomplete\n    return True, params",
        "self._step.finished[request_id] = incomplete\n    return False, params",
        prefill_blocks=16,
        **_SLOW,
    ),
    "a preempted prompt counts as computed": _without(
        "prefill.scheduler:PrefillScheduler._preempted", "self._prompts[request_id].start(())", "pass", seeds=0
    ),
    "preemptions that vLLM does not name go unnoticed": _without(
        "prefill.scheduler:PrefillScheduler._preempted",
        "if not self._requests.names_all_preempted:",
        "if False:",
        seeds=0,
    ),
    "the wrong blocks of a failed load stay cached": _without(
        "prefill.scheduler:PrefillScheduler.loads_failed", "self._blocks.evict(wrong)", "pass", seeds=0
    ),
    "a ticket is served twice at a time": _without(
        "prefill.scheduler:PrefillScheduler._serve",
        "if ticket.ticket_id in self._served:",
        "if False:",
        seeds=0,
    ),
    "any ticket is served": _without(
        "prefill.scheduler:PrefillScheduler._serve",
        "self._admission.admit(ticket)",
        "pass",
        seeds=0,
    ),
    "prompts without a ticket start without room": _without(
        "prefill.scheduler:PrefillScheduler.matched_tokens",
        "self._held is None or self._held.room.may_start(request.request_id)",
        "True",
        seeds=0,
    ),
    "KV that is computed again is not sent again": _without(
        "prefill.scheduler:PrefillScheduler._computes", "if computed < prompt.done:", "if False:", seeds=0
    ),
    "a transfer that no rank knows is waited for": _without(
        "prefill.scheduler:PrefillScheduler.end_request", "if not transfer.announced:", "if False:", seeds=0
    ),
    "a held prompt's blocks are kept once it is sent": _without(
        "prefill.scheduler:PrefillScheduler._take_tickets", "if prompt.ended:", "if False:", events=(), **_CALM
    ),
    "blocks of a prompt that is given up stay": _without(
        "prefill.scheduler:PrefillScheduler._free_expired", "step.unsent.add(prompt.request.request_id)", "pass"
    ),
    "KV that steps lost on prefill were to compute stays cached": _without(
        "prefill.scheduler:PrefillScheduler.steps_lost", "self._blocks.drop_cached()", "pass", seeds=0
    ),
    "an end that prefill's ranks have lost is not repeated": _without(
        "prefill.scheduler:PrefillScheduler.steps_lost",
        "self._step.finished[request_id] = transfer.failure",
        "pass",
        seeds=0,
    ),
    # prefill/held_prompts.py, prefill/holding_room.py
    "a held prompt keeps one with a ticket waiting": _without(
        "prefill.held_prompts:HeldPrompts.make_room",
        "if not (beyond := self.room.beyond):",
        "if True:",
        events=(),
        **(_TIGHT | {"decode_blocks": 16, "prefill_first": None}),
    ),
    "a held prompt makes way for one that waits for others": _without(
        "prefill.held_prompts:HeldPrompts.make_room",
        "> self.room.left",
        "> self.room.left - 2",
        seeds=0,
    ),
    "prompts without a ticket take all blocks": Mutant(
        (
            Edit("prefill.holding_room:HoldingRoom._admit", "if not fits and self._admitted:", "if False:"),
            Edit("prefill.held_prompts:HeldPrompts.make_room", "if not (beyond := self.room.beyond):", "if True:"),
        ),
        {"prefill_blocks": 30},
    ),
    "a prompt is held for ever": _without(
        "prefill.held_prompts:HeldPrompts.overdue", " or now >= prompt.hold_until", ""
    ),
    "a prompt that decode has released stays held": _without(
        "prefill.held_prompts:HeldPrompts._take_releases",
        "prompt.given_up, prompt.is_released = release.reason, True",
        "pass",
        seeds=0,
    ),
    "an ended prompt takes a second ticket": _without(
        "prefill.held_prompts:HeldPrompts.match", "self._remove(prompt)", "pass"
    ),
    "room that becomes free lets no prompt start": _without(
        "prefill.holding_room:HoldingRoom.remove",
        "self._beyond.discard(request_id)\n    self._admit()",
        "self._beyond.discard(request_id)",
        events=(),
        **(_CALM | {"prefill_blocks": 30}),
    ),
    # prefill/ticket_listener.py, prefill/ticket_admission.py
    "a ticket waits for its prompt for ever": _without(
        "prefill.ticket_listener:TicketListener._refuse_late",
        "self._clock() >= ticket.expires_at",
        "False",
        seeds=0,
    ),
    "one host's tickets take all room": _without(
        "prefill.ticket_listener:_Room.has_room", "amount <= self._half and ", "", seeds=0
    ),
    "tickets are remembered without end": _without(
        "prefill.ticket_listener:TicketListener.settle", "if len(self._ended) > _MAX_REMEMBERED:", "if False:", seeds=0
    ),
    "unsigned tickets wait": _without(
        "prefill.ticket_listener:TicketListener._offered", "self._check(ticket)  #", "pass  #", seeds=0
    ),
    "a ticket is replayed": _without(
        "prefill.ticket_admission:TicketAdmission._remember", "if key in seen:", "if False:", seeds=0
    ),
    "an expired ticket is served": _without(
        "prefill.ticket_admission:TicketAdmission._remember",
        "if now >= ticket.expires_at + CLOCK_SKEW_S:",
        "if False:",
        seeds=0,
    ),
    # prefill/control.py
    "an ended transfer's revocation gets no answer": _without(
        "prefill.control:ControlPlane._on_revoked",
        "elif number not in self._disclaimed:",
        "elif False:",
        **_ONE,
        loss=0.3,
    ),
    "a stranger revokes a ticket": _without(
        "prefill.control:ControlPlane._on_revoked",
        "if endpoint in {d.rank.control for d in (transfer.state.destinations or {}).values()}:",
        "if True:",
        seeds=0,
    ),
    "transfers to an engine that has restarted go on": _without(
        "prefill.control:ControlPlane._take_over", "for other in others:", "for other in ():", seeds=0
    ),
    # transport
    "a failed batch counts as written": _without(
        "transport.tcp:_TcpFlight.land", "if code != 0:", "if False:", **_FAILING
    ),
    "nothing of a failed batch is under way": _without(
        "transport.tcp:_TcpFlight.lost", "may_arrive=True", "may_arrive=False", **_ONE, write_fails=0.5, requests=12
    ),
    "a batch begins without leave": _without(
        "transport.tcp:TcpWriter.begin", "if not may_begin():", "if False:", seeds=0
    ),
    "a batch that Mooncake has not taken begins without leave": _without(
        "transport.tcp:TcpWriter.begin", "has_begun = may_begin()", "has_begun = True", seeds=0
    ),
    "a batch without leave keeps its place in the queue": _without(
        "transport.tcp:TcpWriter.begin",
        "except BaseException:\n        queue.leave(len(lengths), failed=False)",
        "except BaseException:\n        pass",
        events=(Event(0.03, "stop", (0.3, 5.0)),),
        **_ONE,
        **_SLOW,
    ),
    "a failed batch leaves the queue at once": _without(
        "transport.tcp:PeerQueue.leave", "if failed:", "if False:", seeds=0
    ),
    "Mooncake's queue to a peer overflows": _without(
        "transport.tcp:PeerQueue.has_room",
        "self._batches < BATCHES_IN_FLIGHT and used + descriptors <= self._capacity",
        "True",
        seeds=0,
    ),
    "a batch without bytes reaches Mooncake": _without(
        "transport.engine:TransferEngine.begin", "if not any(batch[2]):", "if False:", seeds=0
    ),
    "a request on the side channel waits for ever": _without(
        "transport.side_channel:SideChannelClient._on_tick",
        "[seq for seq, each in self._pending.items() if now >= each.deadline]",
        "[]",
        **_ONE,
        loss=0.3,
        requests=12,
    ),
    "another server's answer counts": _without(
        "transport.side_channel:SideChannelClient._receive", " and pending.endpoint == endpoint", "", seeds=0
    ),
    "a batch has more bytes than Mooncake takes": _without(
        "transport.batches:PagedWrite.__init__",
        "min(first + limits.max_descriptors, most)",
        "first + limits.max_descriptors",
        seeds=0,
    ),
    "an empty batch is written": _without(
        "transport.batches:PagedWrite.at", "    if lengths:  #", "    if True:  #", **_STAGED, **_SLOW
    ),
    "a joined batch has too many descriptors": _without(
        "transport.batches:PagedWrite.at",
        "len(lengths) + len(sizes) > self._limits.max_descriptors",
        "False",
        seeds=0,
    ),
    "a joined batch has too many bytes": _without(
        "transport.batches:PagedWrite.at",
        " or num_bytes + more > self._limits.max_bytes",
        "",
        seeds=0,
    ),
}
"""By what goes wrong."""

EVERYTHING = "nothing: all guards are there"

# The quick tests that belong to a file. They take some seconds at most.
_QUICK_TESTS: dict[str, tuple[str, ...]] = {
    "connector.unsupported": ("unit/test_unsupported.py",),
    "core.decode_ticket": ("unit/test_decode_ticket.py", "unit/test_grants.py"),
    "core.prefill_ticket": (
        "unit/test_prefill_ticket.py",
        "unit/test_prefill_ticket_threads.py",
        "unit/test_sender.py",
    ),
    "core.running_time": ("unit/test_grants.py",),
    "decode.grants": ("unit/test_grants.py", "unit/test_decode_ticket.py"),
    "decode.expected_writers": ("unit/test_grants.py",),
    "decode.intents": ("unit/test_intents.py", "integration/test_decode_long_prompts.py"),
    "decode.scheduler": (
        "unit/test_decode_scheduler.py",
        "unit/test_lost_steps.py",
        "unit/test_intents.py",
        "integration/test_decode_long_prompts.py",
        "unit/test_prompt_placement.py",
        "integration/test_decode_prefill_only.py",
        "integration/test_decode_pressure.py",
    ),
    "decode.worker": ("unit/test_grants.py", "unit/test_closing.py", "unit/test_lost_steps.py"),
    "decode.checksums": ("unit/test_verifier.py",),
    "decode.prefill_client": ("integration/test_prefill_client.py",),
    "prefill.sender": ("unit/test_sender.py", "unit/test_batches_in_flight.py"),
    "prefill.step_send": ("unit/test_sender.py", "unit/test_rank_mapping.py"),
    "prefill.step_plan": ("unit/test_sender.py",),
    "prefill.regroup": ("unit/test_backpressure.py", "unit/test_sender.py", "unit/test_exchange_group.py"),
    "prefill.worker": ("unit/test_sender.py", "unit/test_closing.py"),
    "prefill.outgoing_transfer": ("unit/test_prefill_scheduler.py", "unit/test_taken_back.py"),
    "prefill.scheduler": (
        "unit/test_prefill_scheduler.py",
        "unit/test_lost_steps.py",
        "unit/test_taken_back.py",
        "unit/test_held_prompts.py",
        "unit/test_holding_room.py",
        "unit/test_prompts.py",
        "unit/test_admission.py",
    ),
    "prefill.held_prompts": ("unit/test_held_prompts.py", "unit/test_holding_room.py"),
    "prefill.holding_room": ("unit/test_holding_room.py",),
    "prefill.ticket_listener": ("unit/test_ticket_listener.py", "unit/test_held_prompts.py"),
    "prefill.ticket_admission": ("unit/test_admission.py",),
    "prefill.control": ("unit/test_revocations.py",),
    "transport.tcp": ("unit/test_tcp.py", "integration/test_transfer_engine.py"),
    "transport.engine": ("unit/test_batches.py",),
    "transport.side_channel": ("integration/test_side_channel.py",),
    "transport.batches": ("unit/test_batches.py", "unit/test_sender.py"),
}


def quick_tests(mutant: Mutant) -> list[str]:
    """Returns the quick tests that belong to a mutant's files, below tests/. Without edits: all of them."""
    modules = [edit.function.partition(":")[0] for edit in mutant.edits] or list(_QUICK_TESTS)
    return list(dict.fromkeys(each for module in modules for each in _QUICK_TESTS[module]))
