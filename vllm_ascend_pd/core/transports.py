# SPDX-License-Identifier: Apache-2.0
"""Describes how a rank's Mooncake engine moves bytes, and which engines can write to each other.

Facts and where they are from:

- Mooncake, multi_transport.cpp (`selectTransport`): a writer needs the transport that the peer's segment names, so both
  sides use one protocol. transfer_metadata.cpp and common.h: 0.3.11 and 0.3.13 read each other's segments, and the
  newer one writes over TCP as the older one reads.
- CANN's HIXL, src/hixl/engine/engine_factory.cc: an engine is one of several kinds. Each kind has messages of its own,
  so engines of different kinds do not connect.
- HIXL, hixl_engine.cc and adxl_inner_engine.cc: AutoConnect only decides when the writer connects. The peer accepts
  either.
"""

from __future__ import annotations

import enum

import msgspec


class EngineKind(enum.StrEnum):
    """HIXL's engines. The values travel between prefill and decode."""

    CLIENT_SERVER = "client/server"
    COMM = "comm"
    FABRIC_MEMORY = "fabric memory"
    UNKNOWN = ""


class Connects(enum.StrEnum):
    """When an engine connects to a peer. The values travel between prefill and decode."""

    AUTO = "AutoConnect"
    BEFORE = "Connect"
    UNKNOWN = ""


class TransportInfo(msgspec.Struct, frozen=True):
    """How one rank's engine moves bytes. A field is empty if the rank does not state it.

    The fields are plain text, so that a later version may send values that this one does not know.
    """

    # `transfer_protocol`: tcp, rdma or ascend.
    protocol: str = ""
    # Mooncake's distribution and its version.
    wheel: str = ""
    # With `ascend`, an `EngineKind`.
    kind: str = ""
    # With `ascend`, a `Connects`.
    connects: str = ""

    def __str__(self) -> str:
        kind = f" with HIXL's {self.kind} engine" if self.kind else ""
        details = ", ".join(filter(None, (self.wheel, self.connects)))
        return f"{self.protocol or 'an unknown protocol'}{kind}" + (f" ({details})" if details else "")


def cannot_write(prefill: TransportInfo, decode: TransportInfo) -> str | None:
    """Returns why prefill's engine cannot write to decode's, with both named. None if it can, or if it is not known."""
    both = f"prefill transfers by {prefill}, decode by {decode}"
    if _differ(prefill.protocol, decode.protocol):
        return f"{both}: set transfer_protocol to the same on both sides"
    if _differ(prefill.kind, decode.kind):
        return f"{both}: engines of different kinds do not connect; install the same Mooncake and CANN on both sides"
    return None


def _differ(one: str, other: str) -> bool:
    return bool(one and other and one != other)
