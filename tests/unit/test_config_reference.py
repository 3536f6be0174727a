# SPDX-License-Identifier: Apache-2.0
"""The configuration's reference is the one that the code makes."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "config_reference.py"


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(SCRIPT))
    assert made["PAGE"].read_text() == made["page"](), "run scripts/config_reference.py"
