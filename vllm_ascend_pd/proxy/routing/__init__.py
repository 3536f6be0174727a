# SPDX-License-Identifier: Apache-2.0
"""Which engines there are, how healthy and loaded they are, and which one gets a request.

From the bottom up: `answers` (what an engine's answer means), `load`, `strategies` (what a prompt costs), `queue`,
`engines` (those of a role, ranked for a prompt), `dispatch` (sends them requests) and `polling`.

All code here runs in one asyncio event loop, so state needs no locks. `EngineRegistry` owns the engines of a role,
`Queue` their slots.
"""
