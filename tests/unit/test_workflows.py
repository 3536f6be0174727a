# SPDX-License-Identifier: Apache-2.0
"""The workflow for Ascend runners, as far as a machine without NPUs can tell."""

import re
import subprocess
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[2]
ACTION = yaml.safe_load((REPOSITORY / ".github/actions/npu/action.yml").read_text())
JOBS = yaml.safe_load((REPOSITORY / ".github/workflows/npu.yml").read_text())["jobs"]


def test_all_runners_run_the_same_steps() -> None:
    for job in JOBS.values():
        assert [step["uses"] for step in job["steps"]][-1] == "./.github/actions/npu"
        assert set(job["steps"][-1]["with"]) == set(ACTION["inputs"])


def test_vllm_ascends_runners_have_the_image_of_the_example() -> None:
    [base] = re.findall(r"^ARG BASE=(\S+)$", (REPOSITORY / "examples/docker/Dockerfile").read_text(), re.MULTILINE)
    images = {each["chip"]: each["image"] for each in JOBS["vllm-ascend-runners"]["strategy"]["matrix"]["include"]}
    assert images == {"a2": base, "a3": f"{base}-a3"}


def test_commands_are_bash() -> None:
    scripts = [step["run"] for step in ACTION["runs"]["steps"] if "run" in step]
    assert len(scripts) > 5
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
