# SPDX-License-Identifier: Apache-2.0
"""Counts from the traces of decode's schedulers who computed prompts, and why."""

import re
from dataclasses import dataclass

from vllm_ascend_pd.observe import events
from vllm_ascend_pd.observe.events import MarkEvent
from vllm_ascend_pd.tools.timeline.merge import Timeline

_ABOUT = re.compile(r"(decode|prefill): ([a-z_]{1,40}), (\d{1,9}) tokens")
"""As `DecodeSchedulerTrace.prompt_placed` writes it. Files are untrusted."""

_MAX_REASONS = 32


@dataclass
class Placed:
    """Prompts that one side computed for one reason."""

    # "decode" or "prefill".
    by: str
    # As in the label `reason` of `vllm:kv_pd_prompts_total`.
    reason: str
    prompts: int = 0
    # Tokens of these prompts that decode had not cached.
    tokens: int = 0

    def __str__(self) -> str:
        prompts = f"{self.prompts} prompt{'s' if self.prompts != 1 else ''}"
        return f"{self.by} computed {prompts} ({self.reason}, {self.tokens} tokens)"


def placements(timeline: Timeline) -> list[Placed]:
    """Returns who computed prompts, the most prompts first."""
    found: dict[tuple[str, str], Placed] = {}
    for recording in timeline.recordings:
        for event in recording.events:
            if not isinstance(event, MarkEvent) or event.name != events.PLACED:
                continue
            if (about := _ABOUT.fullmatch(event.args.about)) is None:
                continue
            by, reason, tokens = about[1], about[2], int(about[3])
            if (by, reason) not in found and len(found) == _MAX_REASONS:
                continue
            one = found.setdefault((by, reason), Placed(by, reason))
            one.prompts += 1
            one.tokens += tokens
    return sorted(found.values(), key=lambda one: -one.prompts)
