# SPDX-License-Identifier: Apache-2.0
"""One decode engine that a prefill rank is in contact with, and when it can be forgotten."""

from dataclasses import dataclass, field

from vllm_ascend_pd.prefill.decode_layout import DecodeLayout
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.transfer import Transfer

# An engine to which nothing was sent for this long is forgotten. It is described again at the next contact.
_FORGET_AFTER_S = 600.0


@dataclass
class Peer:
    """One decode engine. The control thread owns all of it except `sender`, `users` and `used_at`."""

    # The address of its listener, which describes it.
    endpoint: str
    engine_id: str
    # What writes to it. None until its first ticket.
    sender: Sender | None = None
    # How its ranks' caches lie. None until it has described itself.
    layout: DecodeLayout | None = None
    # Transfers that wait for its description.
    waiting: list[Transfer] = field(default_factory=list)
    # Whether a request for its description is in flight.
    describing: bool = False
    # When it may be asked for its description again, on the monotonic clock.
    describe_at: float = 0.0
    # Why it will never answer again.
    gone: str | None = None
    # Addresses that were connected to for it.
    endpoints: set[str] = field(default_factory=set)
    # Tickets of it that were acquired and not yet released. The model's thread writes `sender`, this and the next, the
    # control thread reads them, both under the lock of `Peers`.
    users: int = 0
    # When a ticket of it was released last.
    used_at: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether something is expected from the engine."""
        return self.users > 0 or self.describing

    def is_over(self, now: float) -> bool:
        """Whether the engine can be forgotten.

        An engine that never described itself, or whose address another engine has by now, can be forgotten as soon as
        no transfer needs it.
        """
        if self.busy:
            return False
        return self.layout is None or self.gone is not None or now - self.used_at > _FORGET_AFTER_S
