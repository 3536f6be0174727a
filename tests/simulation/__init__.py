# SPDX-License-Identifier: Apache-2.0
"""A deterministic simulation: vLLM's schedulers and both sides of the connector, in one thread, under one seed.

docs/reliability.md says what is simulated and how to run a seed. A run goes through these files:

    scenario.py     what happens in a run: drawn from a seed, or written down
    kernel.py       virtual time, and simulated threads in an order that the seed decides
    stand_ins.py    clocks, threads, queues, random numbers and event loops on the kernel
    network.py      ZMQ and datagrams
    memory.py       what each token's KV is, and the caches of a rank
    writes.py       Mooncake
    engine.py       an engine's core and its ranks, which run steps
    http.py         HTTP between clients, our proxy and engines' API servers
    proxy.py        our proxy, for real
    router.py       a proxy that never retries, with its metaserver, and a router that asks prefill first
    oracle.py       the rules (docs/design.md) that each event is checked against
    world.py        one run
    shrink.py       the shortest scenario that still fails
    mutants.py      guards of the product that can be taken out
    try_mutants.py  takes each of them out, to see who notices
    __main__.py     the commands
    processes.py    starts them for tests
"""
