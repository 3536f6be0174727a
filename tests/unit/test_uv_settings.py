# SPDX-License-Identifier: Apache-2.0
"""What pip is told about indexes reaches uv, which does not read pip's configuration."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/uv_settings.py"

CONFIGURATION = """\
[global]
index-url = https://mirror.test/simple
extra-index-url =
    https://a.test/simple
    https://b.test/simple
[install]
find-links = /wheels /more
[list]
find-links = /not-for-install
"""


def settings(folder: Path, **variables: str) -> set[str]:
    path = folder / "pip.conf"
    path.write_text(CONFIGURATION)
    of_others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment = of_others | {"PIP_CONFIG_FILE": str(path), "HOME": str(folder)} | variables
    command = [sys.executable, str(SCRIPT)]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout
    return set(said.splitlines())


def test_files_of_pip(tmp_path: Path) -> None:
    assert settings(tmp_path) >= {
        "UV_DEFAULT_INDEX=https://mirror.test/simple",
        "UV_INDEX=https://a.test/simple https://b.test/simple",
        "UV_FIND_LINKS=/wheels,/more",
        "UV_INDEX_STRATEGY=unsafe-best-match",
    }


def test_variables_of_pip_hold_before_its_files(tmp_path: Path) -> None:
    assert "UV_DEFAULT_INDEX=https://other.test/simple" in settings(tmp_path, PIP_INDEX_URL="https://other.test/simple")
