# SPDX-License-Identifier: Apache-2.0
"""Many requests through two prefill engines, one of which is killed and restarts, and a decode engine: all answers are
a single vLLM instance's, what arrives is verified without a false alarm, and nothing is kept."""

from pathlib import Path

import pytest

from harness.pool import long
from harness.prefork import METHOD
from harness.soak.ledger import Outcome
from harness.soak.run import soak


@pytest.mark.parametrize("requests", [200, long(10_000)])
@pytest.mark.timeout(3600)
def test_soak(requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METHOD, "fork")  # engines start sooner
    summary = soak(tmp_path, requests)
    print(summary)
    counts = summary.outcomes
    assert counts.total() == requests
    assert counts[Outcome.WRONG] == counts[Outcome.HUNG] == counts[Outcome.BROKEN] == 0
    assert summary.unexplained == 0
    assert summary.leaked_blocks == 0
    assert counts[Outcome.RIGHT] > requests * 0.8
    assert counts[Outcome.ABORTED] > 0
    assert summary.counted["preemptions"] > 0 or requests < 10_000  # there may be none among few
    assert summary.counted["verified"] > requests / 4
    logs = "".join(log.read_text(errors="replace") for log in tmp_path.rglob("*.log"))
    assert "KV differs from what prefill computed" not in logs, "verify_kv has found wrong KV"
