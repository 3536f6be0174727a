# SPDX-License-Identifier: Apache-2.0
"""Which engines there are, how healthy and loaded they are, and which one gets a request.

From the bottom up: `answers` (what an engine's answer means), `load`, `engine` (one engine), `strategies`,
`concurrency` (slots and queues), `registry` (the engines of a role, ranked for a prompt), `engine_pool` (sends them
requests) and `polling`.

All code here runs in one asyncio event loop, so state needs no locks. `EngineRegistry` owns the engines of a role,
`ConcurrencyLimiter` their slots and queue. `HealthChecks` alone records checks and load reports; `EnginePool` alone
records what is in flight and how it ended.
"""
