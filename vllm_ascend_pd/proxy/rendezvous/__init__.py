# SPDX-License-Identifier: Apache-2.0
"""Brings a client's request, its tickets and its prefills together, and decides what is retried.

All code here runs in one asyncio event loop, so state needs no locks. Owners:

- `RequestTable` owns the set of requests on their way and the ids by which tickets find them.
- The task that serves a client owns its `ProxiedRequest`.
- The task that serves a ticket owns its `Prefill`.

Other tasks change these objects by their methods. The metaserver and `Deliveries` also set a few fields of a `Prefill`
and its request.
"""
