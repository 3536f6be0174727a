# SPDX-License-Identifier: Apache-2.0
"""How the tests' own httpx clients talk to the tests' servers."""

from typing import Any

PLAIN_HTTP: dict[str, Any] = {"trust_env": False, "verify": False}
"""No proxy, and no certificates for https: to load them takes 0.1 s of a processor for every client, with the GIL held,
and `httpx.get` makes a client each time."""
