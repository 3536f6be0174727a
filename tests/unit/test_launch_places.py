# SPDX-License-Identifier: Apache-2.0
"""Where launch scripts look for each other: in the repository that they are in themselves."""

import shutil
import subprocess
from pathlib import Path

import pytest
from test_launch_scripts import CPU, REPOSITORY, SCRIPTS, base_environment

HOSTS = str(REPOSITORY / "examples/single-node-1p1d/hosts.yaml")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Another one than that whose package is imported."""
    return Path(shutil.copytree(SCRIPTS, tmp_path / "clone/scripts")).parent


def dry_run(command: Path, *options: str) -> str:
    words = [str(command), *options, "--dry-run"]
    env = base_environment(command.parent)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cluster_is_started_by_the_scripts_beside_its_own(clone: Path) -> None:
    printed = dry_run(clone / "scripts/launch_cluster.sh", HOSTS)
    for role in ("prefill", "decode"):
        assert f" {clone}/scripts/launch_{role}.sh " in printed


@pytest.mark.parametrize(
    ("script", "options"),
    [("launch_prefill", CPU), ("launch_decode", CPU), ("launch_cluster", (HOSTS,))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_link_to_a_script_is_that_script(script: str, options: tuple[str, ...], tmp_path: Path) -> None:
    link = tmp_path / f"{script}.sh"
    link.symlink_to(SCRIPTS / link.name)
    assert dry_run(link, *options) == dry_run(SCRIPTS / link.name, *options)
