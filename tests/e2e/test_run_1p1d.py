# SPDX-License-Identifier: Apache-2.0
"""The command that the README begins with, in the environment that runs this test."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.documented import REPOSITORY, documented
from harness.pool import ClusterPool
from harness.ports import is_free

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.timeout(900)
def test_what_the_readme_begins_with(cluster_pool: ClusterPool, tmp_path: Path) -> None:
    cluster_pool.stop()  # two cores carry no more than one
    # It would set the environment up, which is there.
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts/setup_env.sh").write_text("#!/usr/bin/env bash\n")
    (tmp_path / "tests").symlink_to(REPOSITORY / "tests")
    port = next(port for port in range(8000, 8100) if all(map(is_free, ports_of(port))))
    command = [*documented("README.md", "scripts/run_1p1d.sh"), "--port", str(port)]
    environment = os.environ | {
        "VENV": sys.prefix,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "COLUMNS": "200",
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^│ +(\d+) │.*│ +(\d+)% │ +(yes|no) │$", done.stdout, re.MULTILINE)
    assert [(tokens, equal) for tokens, _, equal in rows] == [
        (tokens, "yes") for tokens in ("16", "128", "500", "1000", "2000")
    ]
    assert int(rows[-1][1]) > 50  # of the longest prompt's KV was in decode before prefill ended
    [picture] = (tmp_path / "timeline").glob("*/timeline.png")
    assert picture.read_bytes().startswith(PNG)


def ports_of(port: int) -> list[int]:
    return [port, port + 100, port + 200, port + 14001, port + 14101]
