# SPDX-License-Identifier: Apache-2.0
"""Checks by both engines' metrics that the ranks of a prefill engine can write to those of a decode engine."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.core.transports import TransportInfo, cannot_write
from vllm_ascend_pd.observe.stats import PREFIX, TRANSPORT_INFO
from vllm_ascend_pd.tools.doctor.finding import Finding, error, note, ok

_METRIC = PREFIX + TRANSPORT_INFO.name
_CHARS = 500


def read(metrics: bytes) -> frozenset[TransportInfo]:
    """Returns the ranks' transports, none if the metrics do not have them or cannot be parsed."""
    lines = [line for line in metrics.decode(errors="replace").split("\n") if line.startswith(_METRIC + "{")]
    try:
        samples = [each for family in text_string_to_metric_families("\n".join(lines)) for each in family.samples]
        said = frozenset(msgspec.convert(sample.labels, TransportInfo) for sample in samples)
    except ValueError:  # msgspec.ValidationError is one
        return frozenset()
    return said - {TransportInfo()}


def judge(check: str, engines: Mapping[str, frozenset[TransportInfo]]) -> Finding:
    """`engines` are a prefill engine and a decode engine, each with the transports of its ranks."""
    (prefill, ours), (decode, theirs) = engines.items()
    if silent := [name for name, said in engines.items() if not said]:
        found = f"{' and '.join(silent)} does not report its transport yet"
        return note(check, found, "engines report it with their first step: send a request, then run this again")
    for one in ours:
        for other in theirs:
            if (reason := cannot_write(one, other)) is not None:
                found = f"{prefill} cannot write to {decode}: {one_line(reason, _CHARS)}"
                return error(check, found, "use the same versions and settings on both sides: docs/versions.md")
    both = one_line(f"{_listed(ours)}, to {_listed(theirs)}", _CHARS)
    return ok(check, f"{prefill} can write to {decode}: {both}")


def _listed(said: frozenset[TransportInfo]) -> str:
    return "; ".join(sorted(map(str, said)))
