# SPDX-License-Identifier: Apache-2.0
"""Who computes a prompt, and why. `decode/who_computes.py` decides."""

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
