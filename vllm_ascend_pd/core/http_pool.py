# SPDX-License-Identifier: Apache-2.0
"""How long HTTP clients here, decode's and the proxy's, keep a connection that is idle."""

IDLE_CONNECTION_S = 2.0
"""Servers like vLLM's close a connection that was idle for 5 s. Ours are dropped well before that, so
that a request is hardly ever sent into a connection that is just being closed."""
