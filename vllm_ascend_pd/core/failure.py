# SPDX-License-Identifier: Apache-2.0
"""Why transfers fail, as labels of a metric. The reasons in logs and errors say more, and may quote a peer."""

import enum


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
    """The request ended before its prompt was computed."""
    INTERNAL = "internal"
    """A defect of this package: see the log."""


class ReceiveFailure(enum.Enum):
    """Why decode did not get a request's KV."""

    NOT_POSTED = "not_posted"
    """The request named neither a metaserver nor a prefill engine that tickets may be sent to."""
    PREFILL = "prefill"
    """The metaserver or the prefill engine answered that prefill failed, or did not answer."""
    TRANSFER = "transfer"
    """The transfer to a rank failed, or took too long."""
    ABORTED = "aborted"
    """The request ended before its KV had arrived."""
