# SPDX-License-Identifier: Apache-2.0
"""Names the clock that this process's monotonic times are of."""

import hashlib
import os
import secrets
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _host_clock() -> str:
    """Returns a name that is the same for all processes of a host in the same time namespace."""
    try:
        source = _BOOT_ID.read_text() + os.readlink("/proc/self/ns/time")
    except OSError:
        source = secrets.token_hex(16)  # a clock that no other process is known to share
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()


HOST_CLOCK = _host_clock()
