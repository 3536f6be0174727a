# SPDX-License-Identifier: Apache-2.0
"""How much a peer may send, and how much work and memory it may cost. Each number has its reason.

Types of messages have these bounds in their declarations, so a message beyond them is refused before its lists are
read. Bounds on bytes are beside the messages (`core/protocol.py`).
"""

# Engines.

MAX_TP = 1024
"""Ranks of a pipeline stage. The largest supernodes have 384 or 768 NPUs."""
MAX_STAGES = 64
"""Pipeline stages of an engine. The deepest models have about 128 layers."""
MAX_RANKS = 4096
"""Ranks of an engine, in all stages. A prefill rank keeps a connection to each one that it writes to."""
MAX_GROUPS = 64
"""Cache groups. vLLM makes about ten at most."""
MAX_TENSORS = 8192
"""Cache tensors of a rank. 128 layers with 8 tensors have 1,024. A state that is sent in pieces counts as more."""
MAX_GEOMETRIES = 1024
"""Geometries of a rank. A group has about ten: K, V, and the pieces of states."""
MAX_BLOCK_KINDS = 256
"""Pairs of cache group and block size of an engine: four for each group, because caches of a group differ in what one
block id stands for only by context parallelism and states. A `RankMapping` is made for each."""

# Tickets.

MAX_BLOCK_IDS = 1 << 18
"""Block ids of a cache group: two million tokens in blocks of 8."""
MAX_TOKEN_IDS = 1 << 21
"""Token ids of a prompt: two million."""
MAX_TICKET_LIFETIME_S = 86400
"""Seconds from now at which a signed ticket may expire at most: the longest `queue_timeout_s`."""
EMPTY_LIST_COST = 16
"""Block ids that take as much memory as an empty list, which is 56 bytes and a pointer to it."""

MAX_CACHED_TARGETS = 1 << 18
"""Decode ranks in all mappings that a prefill rank keeps: 64 MB. A shape of decode's has one for each of its ranks and
each of our geometries. Tickets name the shapes."""

# What waits at prefill's ticket listener.

MAX_WAITING_OFFERS = 1024
"""Tickets that wait for their prompts. vLLM runs fewer requests at a time."""
MAX_WAITING_RELEASES = 1024
"""Releases that wait for the scheduler or for their prompts. They do not count with the tickets: anybody may send one,
because they are not signed."""
MAX_WAITING_BLOCKS = 1 << 20
"""Block ids in all tickets that wait: 64 MB."""

# Grants.

MAX_EXPECTED_WRITES = 1 << 17
"""Pairs of a tensor and a prefill rank that writes to it, for one ticket: 1,024 tensors with 128 writers each, 20 MB.
Most decode ranks have fewer than 10,000."""
MAX_CACHED_WRITES = 1 << 18
"""Such pairs that a decode rank keeps for further tickets of the same shape: 40 MB."""
MAX_SHAPES_WORKED_OUT = 4
"""Shapes of prefill engines whose writes a decode rank works out for one ticket. The engine that takes the ticket has
one, and so do its retries."""

# Turns of a thread that answers peers.

MAX_TURN_S = 0.02
"""Seconds that a thread takes messages before it looks at deadlines and at what other threads want: less than half of
the time between two such looks (`TICK_S`)."""
