# SPDX-License-Identifier: Apache-2.0
"""One decode engine that a prefill rank is in contact with, and when it can be forgotten."""

from dataclasses import dataclass, field

from vllm_ascend_pd.prefill.decode_layout import DecodeLayout
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.transfer import Transfer

# An engine nobody sent anything to for this long is forgotten; it is described again at next contact.
_FORGET_AFTER_S = 600.0


@dataclass
class Peer:
    """One decode engine. `layout` is None until it has answered; `gone`: why it will never answer again; `users`:
    tickets of it that were acquired and not yet released."""

    endpoint: str
    engine_id: str
    sender: Sender
    layout: DecodeLayout | None = None
    waiting: list[Transfer] = field(default_factory=list)  # for its description
    describing: bool = False
    describe_at: float = 0.0  # not before
    gone: str | None = None
    users: int = 0
    used_at: float = 0.0
    endpoints: set[str] = field(default_factory=set)  # connections opened for it

    @property
    def busy(self) -> bool:
        """Something is expected from the engine."""
        return self.users > 0 or self.describing

    def is_over(self, now: float) -> bool:
        """Whether what is known of the engine can be dropped. One that never described itself, or whose address
        belongs to another engine by now, is dropped as soon as no transfer needs it."""
        if self.busy:
            return False
        return self.layout is None or self.gone is not None or now - self.used_at > _FORGET_AFTER_S
