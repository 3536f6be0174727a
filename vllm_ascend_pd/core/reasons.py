# SPDX-License-Identifier: Apache-2.0
"""Why prompts are computed where they are, and why transfers fail: values of the label `reason` of metrics.

The reasons of failures in logs and errors say more, and may quote a peer.
"""

import enum
from dataclasses import dataclass


class Reason(enum.StrEnum):
    """Why a prompt is computed where it is."""

    # By decode.

    # Decode's prefix cache has the whole prompt.
    CACHED = "cached"
    # Decode computes it no later than prefill would deliver it.
    CHEAP = "cheap"
    # No prefill engine is well.
    NO_PREFILL = "no_prefill"
    # The request asks for log probabilities of its prompt, which the engine that answers has to compute.
    PROMPT_LOGPROBS = "prompt_logprobs"

    # By either.

    # The request asks for it.
    REQUESTED = "requested"
    # The request was preempted. Decode computes it unless it computes no prompts: the client has tokens already, and
    # prefill could still fail.
    PREEMPTED = "preempted"
    # The request's KV did not arrive. Decode computes it, or, if it computes no prompts, asks prefill once more.
    KV_LOST = "kv_lost"

    # By prefill.

    # Prefill delivers it sooner, or nothing so long was measured on decode.
    LONG = "long"
    # It is cheap, but decode has spent its time for prompts on others.
    BUSY = "busy"
    # Prefill computes all prompts, or all of this kind.
    POLICY = "policy"


@dataclass(frozen=True)
class Decision:
    """Who computes a prompt's tokens that decode does not have cached."""

    # Whether decode does. Otherwise prefill does.
    by_decode: bool
    reason: Reason


BY_DECODE_FOR = (
    Reason.CACHED,
    Reason.CHEAP,
    Reason.REQUESTED,
    Reason.NO_PREFILL,
    Reason.PREEMPTED,
    Reason.PROMPT_LOGPROBS,
    Reason.KV_LOST,
)
"""Reasons for decode to compute a prompt."""

BY_PREFILL_FOR = (
    Reason.LONG,
    Reason.BUSY,
    Reason.REQUESTED,
    Reason.POLICY,
    Reason.PREEMPTED,
    Reason.KV_LOST,
)
"""Reasons for prefill to compute a prompt."""


class PushFailure(enum.Enum):
    """Why prefill did not deliver a request's KV."""

    TICKET = "ticket"
    """The ticket cannot be served: malformed, unsigned, expired, replayed, or not for this prompt."""
    UNREACHABLE = "unreachable"
    """The decode engine did not describe itself in time, or has ended."""
    UNFIT = "unfit"
    """The decode engine's description does not fit the ticket, or this engine."""
    REFUSED = "refused"
    """A decode rank refused the grant for good."""
    NO_GRANT = "no_grant"
    """A decode rank gave no grant in time."""
    LEASE = "lease"
    """A lease ran out and was not renewed."""
    REVOKED = "revoked"
    """Decode revoked the ticket: its client left, or another writer failed."""
    QUEUE_FULL = "queue_full"
    """The link did not keep up with the computation."""
    WRITE = "write"
    """The transfer engine could not write, in two attempts."""
    DEVICE = "device"
    """The device did not compute or regroup a layer in time, or failed."""
    WEIGHTS = "weights"
    """Prefill's weights were updated before the transfer had ended, or just before it began."""
    PREEMPTED = "preempted"
    """The request was preempted before its KV was sent."""
    ABORTED = "aborted"
    """The request ended before its KV was complete."""
    INTERNAL = "internal"
    """A defect of this package: see the log."""


class Verified(enum.Enum):
    """What a comparison of a request's KV with prefill's checksums has found (`verify_kv`)."""

    RIGHT = "right"
    """It is what prefill computed."""
    WRONG = "wrong"
    """It was wrong on arrival."""
    OVERWRITTEN = "overwritten"
    """It was right on arrival, and not when the request's first step read it."""
    UNKNOWN = "unknown"
    """It was not compared: see the log."""


WRONG_KV = (Verified.WRONG.value, Verified.OVERWRITTEN.value)
"""Results that are faults."""


class ReceiveFailure(enum.Enum):
    """Why decode did not get a request's KV."""

    NOT_POSTED = "not_posted"
    """The request named neither a metaserver nor a prefill engine that tickets may be sent to."""
    PREFILL = "prefill"
    """The metaserver or the prefill engine answered that prefill failed, or did not answer."""
    TRANSFER = "transfer"
    """The transfer to a rank failed, or took too long. Or decode had no room in time for a computed prompt."""
    WRONG_BYTES = "wrong_bytes"
    """The KV arrived, and is not what prefill computed (`verify_kv`)."""
    OVERWRITTEN = "overwritten"
    """The KV was right on arrival, and is not when the request's first step reads it (`verify_kv`)."""
    ABORTED = "aborted"
    """The request ended before its KV had arrived."""
