# SPDX-License-Identifier: Apache-2.0
"""Which engines there are, how healthy and loaded they are, and which one gets a request.

All code here runs in one asyncio event loop, so state needs no locks. Owners:

- `EngineRegistry` owns the engines of a role and whether they may get requests.
- `HealthChecks` alone records checks and load reports; `EnginePool` alone records what is in flight and how it ended.
- `ConcurrencyLimiter` owns the slots and the queue of a role.
"""
