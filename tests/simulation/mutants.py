# SPDX-License-Identifier: Apache-2.0
"""Guards of the product that are taken out, one at a time, to see whether the oracle notices.

A mutant is an edit of a function's source. So it fails loudly when that source has changed.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Edit:
    """`function`: `module:name` or `module:Class.name`, below `vllm_ascend_pd`. `old` occurs once in its source."""

    function: str
    old: str
    new: str

    @contextmanager
    def made(self) -> Iterator[None]:
        path, _, name = self.function.partition(":")
        owner: Any = importlib.import_module(f"vllm_ascend_pd.{path}")
        *classes, name = name.split(".")
        for each in classes:
            owner = getattr(owner, each)
        before = vars(owner)[name]
        function = inspect.unwrap(before.fget if isinstance(before, property) else before)
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.old) != 1:
            raise ValueError(f"{self.function} has {source.count(self.old)} times {self.old!r}")
        made: dict[str, Any] = {}
        exec(compile(source.replace(self.old, self.new), self.function, "exec"), function.__globals__, made)
        setattr(owner, name, made[name])
        try:
            yield
        finally:
            setattr(owner, name, before)


@dataclass(frozen=True)
class Mutant:
    edits: tuple[Edit, ...]
    # What of the scenarios is not drawn.
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @contextmanager
    def made(self) -> Iterator[None]:
        with ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(edit.made())
            yield


_TAKEN_BACK = (
    Edit(
        "prefill.outgoing_transfer:ComputedPrompt.take_back",
        "self.done = min(self.done, token)",
        "return",
    ),
    Edit("prefill.outgoing_transfer:OutgoingTransfer.take_back", "if token < self.ticket.num_tokens:", "if False:"),
)

MUTANTS: dict[str, Mutant] = {
    "an empty batch is written": Mutant(
        (Edit("transport.batches:PagedWrite.at", "    if lengths:  #", "    if True:  #"),),
        {"prefill_tp": 2, "decode_tp": 1, "slow": 0.5, "slow_by": 50.0},
    ),
    "KV that vLLM takes back counts as computed": Mutant(
        _TAKEN_BACK,
        {"pool": True, "load_fails": 0.5, "prefill_policy": "recompute", "prefill_blocks": 80, "decode_blocks": 80},
    ),
    "success is reported before the outputs of a step with failed loads": Mutant(
        (
            Edit(
                "prefill.scheduler:PrefillScheduler._advance",
                "confirmed = in_one_step or prompt.ended or not self._awaits_outputs",
                "confirmed = True",
            ),
        ),
        {"pool": True, "load_fails": 0.5, "prefill_policy": "fail", "prefill_blocks": 80, "decode_blocks": 80},
    ),
    "a stopped decode rank closes tickets at once": Mutant(
        (
            Edit(
                "decode.grants:GrantService._notice_stop",
                "if self._running_time.stopped_s > self._stopped_s:",
                "if False:",
            ),
        ),
        {"late_bytes": True, "slow": 0.5, "slow_by": 50.0},
    ),
    "a held prompt keeps one with a ticket waiting": Mutant(
        (Edit("prefill.held_prompts:HeldPrompts.make_room", "if not (beyond := self.room.beyond):", "if True:"),),
        {"prefill_blocks": 16},
    ),
    "a layer that was not written counts as written": Mutant(
        (
            Edit(
                "prefill.sender:Sender._end_write",
                "delivered = self._write_apart(push, target, write) if write.errors else write.live",
                "delivered = write.live",
            ),
        ),
        {"write_fails": 0.2},
    ),
    "a staging slot does not rest after a failed write": Mutant(
        (Edit("prefill.regroup:StagingRing.release", "if settled_at:", "if False:"),),
        {"write_fails": 0.2, "prefill_tp": 2, "decode_tp": 1},
    ),
    "a failed ticket is closed before its writers have stopped": Mutant(
        (
            Edit(
                "core.decode_ticket:_Lease.is_over",
                "return now >= self.applied_at and (self.settled or (self.gone and now >= self.until))",
                "return True",
            ),
        ),
        {"write_fails": 0.2},
    ),
    "a failed write is not marked as in flight": Mutant(
        (
            Edit(
                "core.prefill_ticket:PrefillTicket.mark_in_flight",
                "self.settled_at = max(self.settled_at, until)",
                "pass",
            ),
        ),
        {"write_fails": 0.2},
    ),
    "two prefill engines write for a ticket": Mutant(
        (
            Edit(
                "core.decode_ticket:DecodeTicket.grant",
                "if self._engine != (writer.engine_id, request.sharding):",
                "if False:",
            ),
        ),
        {"prefills": 2, "two_prefills": 1.0},
    ),
    "prefill computes another prompt than the ticket's": Mutant(
        (
            Edit(
                "prefill.scheduler:PrefillScheduler._serve",
                "self._requests.check_prompt(request, ticket)",
                "pass",
            ),
        ),
        {"other_prompt": 0.5},
    ),
    "KV counts as received after the first of its writers": Mutant(
        (Edit("core.decode_ticket:DecodeTicket.report", "if not self._missing:", "if True:"),),
        {"prefill_tp": 2, "decode_tp": 1},
    ),
    "blocks of an ended request are freed while they are read": Mutant(
        (
            Edit(
                "prefill.scheduler:PrefillScheduler.end_request",
                "self._step.finished[request_id] = incomplete\n    return True, params",
                "self._step.finished[request_id] = incomplete\n    return False, params",
            ),
        ),
        {"prefill_blocks": 16, "slow": 0.5, "slow_by": 50.0},
    ),
    "prompts without a ticket take all blocks": Mutant(
        (
            Edit("prefill.holding_room:HoldingRoom._admit", "if not fits and self._admitted:", "if False:"),
            Edit("prefill.held_prompts:HeldPrompts.make_room", "if not (beyond := self.room.beyond):", "if True:"),
        ),
        {"prefill_blocks": 30},
    ),
}
"""By what they do wrong."""
