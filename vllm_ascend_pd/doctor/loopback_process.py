# SPDX-License-Identifier: Apache-2.0
"""A child of the doctor: one of two transfer engines that write to each other.

`receive SEED BYTES`: registers memory and says where, looks at it when told so on standard input, ends with that.
`send SEED BYTES SESSION ADDRESS`: writes there what follows from SEED, and says how long it took.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time

import msgspec

from vllm_ascend_pd.doctor import child
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.limits import TransferLimits

# Where it is set, Mooncake has no IPv4.
HOST = "::1" if "MC_USE_IPV6" in os.environ else "127.0.0.1"
GUARD_BYTES = 4096
"""Registered behind what is written, and not written to."""

PIECE_BYTES = 256 << 10
"""Of a descriptor: some neighbouring KV blocks of a layer, merged."""


class Ready(msgspec.Struct, frozen=True):
    """Where the receiver's memory is."""

    session: str
    address: int


class Checked(msgspec.Struct, frozen=True):
    """Bytes that are not what they must be, and the first one's place."""

    wrong: int
    first: int = -1


class Sent(msgspec.Struct, frozen=True):
    seconds: float
    descriptors: int


def main() -> None:
    role, seed, nbytes, *rest = sys.argv[1:]
    out = child.take_stdout()
    payload = random.Random(int(seed)).randbytes(int(nbytes))
    engine = TransferEngine(HOST, "tcp", TransferLimits())
    if role == "receive":
        memory = ctypes.create_string_buffer(len(payload) + GUARD_BYTES)
        engine.register([(ctypes.addressof(memory), len(memory))])
        child.say(out, Ready(engine.session, ctypes.addressof(memory)))
        if sys.stdin.readline().strip() == "look":
            child.say(out, compare(memory.raw, payload + bytes(GUARD_BYTES)))
    else:
        session, address = rest
        child.say(out, _send(engine, payload, session, int(address)))
    engine.close()


def compare(memory: bytes, wanted: bytes) -> Checked:
    if memory == wanted:
        return Checked(0)
    wrong = [place for place, (one, other) in enumerate(zip(memory, wanted, strict=True)) if one != other]
    return Checked(len(wrong), wrong[0])


def _send(engine: TransferEngine, payload: bytes, session: str, address: int) -> Sent:
    source = ctypes.create_string_buffer(payload, len(payload))
    start = ctypes.addressof(source)
    engine.register([(start, len(source))])
    offsets = range(0, len(source), PIECE_BYTES)
    lengths = [min(PIECE_BYTES, len(source) - offset) for offset in offsets]
    engine.write(session, [start], [address], [1])  # connects, which is not what is measured
    began = time.monotonic()
    engine.write(session, [start + o for o in offsets], [address + o for o in offsets], lengths)
    return Sent(time.monotonic() - began, len(lengths))
