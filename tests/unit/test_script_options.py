# SPDX-License-Identifier: Apache-2.0
"""The script that sets everything up first answers --help, and refuses unknown options, before it does."""

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAME = "run_1p1d"
VALUES = {"--device": "cpu", "--port": "8000", "--model": "."}
"""Where 1 is none."""


def run(folder: Path, *options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """In a copy whose set-up does nothing, without an environment behind it."""
    shutil.copytree(SCRIPTS, folder / "scripts", dirs_exist_ok=True)
    setup = folder / "scripts" / "setup_env.sh"
    setup.write_text("#!/usr/bin/env bash\necho set up\nexit 9\n")
    command = [str(folder / "scripts" / f"{NAME}.sh"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{NAME}", SCRIPTS / f"{NAME}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_comment_has_the_options_of_the_program(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    assert "set up" not in done.stdout
    for option in get_command(program().app).params:
        [line] = [each for each in done.stdout.splitlines() if each.strip().split(" ")[0] == option.opts[0]]
        has_value = line.strip().split("  ")[0] != option.opts[0]
        assert has_value is not getattr(option, "is_flag", False), line
        accepted = run(tmp_path, option.opts[0], *([VALUES.get(option.opts[0], "1")] if has_value else []))
        assert accepted.returncode == (2 if option.opts[0] == "--emulate" else 9), accepted.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--no-such-option",), "unknown option --no-such-option"),
        (("word",), "unknown option word"),
        (("",), "unknown option"),
        (("--requests=1", "--port"), ""),
    ],
)
def test_wrong_options_are_refused_first(options: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    done = run(tmp_path, *options)
    assert done.returncode == 2
    assert "set up" not in done.stdout
    assert done.stderr.startswith(f"{NAME}: {reason}")


def test_values(tmp_path: Path) -> None:
    assert "--port needs a value" in run(tmp_path, "--port").stderr
    assert "--keep takes no value" in run(tmp_path, "--keep=1").stderr
    assert run(tmp_path, "--prefill-args", "--max-model-len 5", "--port=8000").returncode == 9


def test_on_npus_it_says_which_environment_is_missing(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python3"  # without this package
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = run(tmp_path, "--device", "npu", env={"PATH": f"{python.parent}:/usr/bin:/bin"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"run_1p1d: vllm-ascend-pd is not installed for {python}: activate")
