# SPDX-License-Identifier: Apache-2.0
"""scripts/first_hours.sh: its options, its steps, and what becomes of those that fail."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.main import get_command

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_hours", SCRIPTS / "first_hours.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "first_hours", module)  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def test_the_comment_has_the_options_of_the_program(program: ModuleType) -> None:
    app = typer.Typer()
    app.command()(program.main)
    options = {option for parameter in get_command(app).params for option in parameter.opts}
    comment = (SCRIPTS / "first_hours.sh").read_text()
    own = {"--help", "--install-completion", "--show-completion"}
    assert options - own == set(re.findall(r"^#   (--[a-z-]+)", comment, re.MULTILINE))


def test_steps_of_a_session_on_hardware(program: ModuleType) -> None:
    """Those of the page, each once, and within the time that the comment promises."""
    model, moe = Path("/m"), Path("/e")
    steps = program.steps(model, moe, "192.0.2.2", Path("/other"), emulate=False)
    names = [step.name for step in steps]
    page = (SCRIPTS.parent / "docs/npu.md").read_text()
    named = set(re.findall(r"`([a-z0-9-]+)`", " ".join(re.findall(r"^\|.*?\|(.*?)\|", page, re.MULTILINE))))
    assert {"machine", "kernels", "hardware", "peer", "pair-eager", "pair-graphs", "comparison", "experts"} <= named
    assert {name for name in named if name in names} >= set(names) - {"other-mooncake", "tp4-to-tp2", "tp4-to-tp1"}
    assert len(set(names)) == len(names)
    assert sum(step.minutes for step in steps) <= 150
    assert {step.name for step in program.steps(None, None, None, None, emulate=True) if not step.has_engines} == {
        "hardware",
        "peer",
    }


def test_a_step_that_fails_or_hangs_does_not_end_the_others(tmp_path: Path) -> None:
    """With steps of its own: what follows a failed one still runs, and nothing outlives its step."""
    program = f"""
import sys; sys.path.insert(0, {str(SCRIPTS)!r})
import first_hours
from first_hours import Command, Step
first_hours.GRACE_S = 1.0
first_hours.steps = lambda *_, **__: [
    Step("fails", 1, "q", (Command(("bash", "-c", "echo why; exit 3")),)),
    Step("hangs", 0.02, "q", (Command(("bash", "-c", "trap '' TERM; sleep 900 & wait; sleep 900")),)),
    Step("holds", 1, "q", (Command(("true",)), Command(("echo", "{{}}"), "own.json"))),
]
from pathlib import Path
first_hours.main(results=Path({str(tmp_path)!r}), emulate=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {each["step"]: each["result"] for each in summary["steps"]} == {
        "fails": "failed",
        "hangs": "took too long",
        "holds": "held",
    }, done.stderr
    assert (tmp_path / "fails.log").read_text() == "why\n"
    assert done.returncode != 0
