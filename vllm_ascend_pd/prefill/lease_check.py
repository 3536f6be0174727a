# SPDX-License-Identifier: Apache-2.0
"""Checks whether bytes of several requests may be sent to one decode rank now (R2), mostly by one comparison.

The sender's thread owns a check. It reads the latest views of the requests' tickets.
"""

import math
import time
from collections.abc import Sequence

from vllm_ascend_pd.core.prefill_ticket import RankKey
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.prefill.transfer import Transfer, Withdrawals


class LeaseCheck:
    """Checks the leases of `transfers` for decode rank `key`. The transfers share one `Withdrawals`.

    It keeps the earliest end of their leases, because a lease never gets shorter. Asking each of 32 requests for every
    layer instead adds a fifth to the sender's time (71 to 86 microseconds, benchmarks/plan.py).
    """

    def __init__(self, transfers: Sequence[Transfer], key: RankKey) -> None:
        self._transfers = transfers
        self._key = key
        self._withdrawals = transfers[0].withdrawals if transfers else Withdrawals()
        # The count of withdrawals at which all transfers could be written.
        self._withdrawn = -1
        # When the first of the leases ends.
        self._until = -math.inf

    @owned
    def may_plan(self) -> bool:
        """Whether a write for all transfers may be planned. If not, ask `Transfer.await_grant` for each of them.

        Looks at the transfers only if a lease may have ended, or a permission may have been withdrawn, since the last
        call.
        """
        withdrawn = self._withdrawals.count
        if withdrawn != self._withdrawn or time.monotonic() >= self._until:
            until = min(transfer.writable_until(self._key) for transfer in self._transfers)
            self._until = max(self._until, until)
            if time.monotonic() >= until:
                return False
            self._withdrawn = withdrawn
        return True

    @owned
    def may_begin(self) -> bool:
        """Whether bytes of all transfers may be sent now. Call it before each batch."""
        if time.monotonic() < self._until:
            return True
        self._until = min(transfer.lease_until(self._key) for transfer in self._transfers)
        return time.monotonic() < self._until
