# SPDX-License-Identifier: Apache-2.0
"""scripts/first_hours.sh on emulated NPUs: the steps that start no engines, from end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.npu, pytest.mark.emulated, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_the_short_form_holds_and_keeps_all_figures(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "first_hours.py"), "--emulate", "--short", "--results", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "CANN_ON_HOST": "1"}, capture_output=True, text=True, timeout=580)
    logs = "\n".join(file.read_text()[-2000:] for file in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["emulated"] is True
    assert {each["step"]: each["result"] for each in summary["steps"]} == {"hardware": "held", "peer": "held"}
    checks = {file: [each["check"] for each in found] for file, found in summary["findings"].items()}
    assert [check for check in checks["hardware"] if not check.startswith("descriptors.")] == [
        "hardware.kernels",
        *(
            f"hardware.speed.{op}"
            for op in ("gather_units", "split_heads", "interleave_heads", "sum_units", "sum_units_32")
        ),
        "hardware.multiply",
        "hardware.write.ascend.0-1",
        "hardware.write.roce.1-0",
        "hardware.large_region",
        "hardware.collectives",
    ]
    for server in ("peer", "peer-other"):
        assert [check for check in checks[server] if check.startswith("peer.")][:2] == [
            "peer.side_channel",
            "peer.write",
        ]
        assert f"peer.write.{64 << 20}" in checks[server]
        assert "peer.group" in checks[server]
