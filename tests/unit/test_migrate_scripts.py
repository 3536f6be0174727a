# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd migrate --` before `vllm serve` in launch scripts, run by bash.

The shell makes the words, so the command that migrate prints has the words that the script gives vLLM.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.recipes import make_model
from vllm_ascend_pd import cli

SCRIPTS = Path(__file__).parent / "data/launch_scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.sh"))
RECORD = """#!/bin/sh
printf '%s\\0' "$@" >"$OUT/words"
env -0 >"$OUT/environment"
"""


def run(text: str, folder: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Returns the words and the environment that a script gives to `vllm` or `vllm-ascend-pd`."""
    for name in ("vllm", "vllm-ascend-pd"):
        (folder / name).write_text(RECORD)
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder)}
    subprocess.run(["bash", "-c", text, "script", *arguments], env=environment, check=True, timeout=60)
    words, variables = ((folder / name).read_text().split("\0")[:-1] for name in ("words", "environment"))
    return words, dict(each.split("=", 1) for each in variables)


def migrated(words: list[str], environment: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Returns what `vllm-ascend-pd` prints for these words, as JSON and as text."""
    asked = [CliRunner().invoke(cli.app, [words[0], *more, *words[1:]], env=environment) for more in (["--json"], [])]
    assert all(each.exit_code in (0, 1) for each in asked), asked
    return json.loads(asked[0].stdout), asked[1].stdout


@pytest.mark.parametrize("name", NAMES)
def test_the_command_has_the_words_that_the_shell_makes(name: str, tmp_path: Path) -> None:
    make_model("qwen3-moe", tmp_path)
    script = (SCRIPTS / f"{name}.sh").read_text()
    started = re.search(r"started as: \S+ (.*)", script)
    arguments = shlex.split(started[1]) if started is not None else []
    plain, _ = run(script, tmp_path, *arguments)
    edited = re.sub("^vllm serve", f"vllm-ascend-pd migrate --model {tmp_path} -- vllm serve", script, flags=re.M)
    assert edited != script
    words, environment = run(edited, tmp_path, *arguments)
    assert words == ["migrate", "--model", str(tmp_path), "--", "vllm", *plain]
    result, printed = migrated(words, environment)
    wanted = ["vllm", *plain]
    place = wanted.index("--kv-transfer-config") + 1
    assert json.loads(wanted[place])["kv_role"] == result["kv_transfer_config"]["kv_role"] == result["role"]
    wanted[place] = json.dumps(result["kv_transfer_config"])
    assert [word for part in result["command"] for word in part] == wanted
    # What is printed means the same to a shell.
    command = printed[printed.index("Command:\n") + 9 : printed.rindex("\n\n")]
    assert run(command, tmp_path)[0] == wanted[1:]
    stops = [(change["subject"], change["why"]) for change in result["changes"] if change["kind"] == "stops"]
    if name == "base_port":
        [(subject, why)] = stops
        assert subject == "kv_port"
        assert "ASCEND_BASE_PORT is 1000" in why
    else:
        assert (stops, result["ok"]) == ([], True)
        assert result["kv_transfer_config"].get("kv_port") == (None if name == "case" else 23000)


def test_options_are_before_the_command(tmp_path: Path) -> None:
    make_model("qwen3-moe", tmp_path)
    config = '{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer"}'
    words = ["migrate", "--json", "vllm", "serve", "--model", str(tmp_path), "--kv-transfer-config", config]
    given = CliRunner().invoke(cli.app, words)
    assert given.exit_code == 0
    assert json.loads(given.stdout)["command"][1] == ["--model", str(tmp_path)]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "Missing argument 'COMMAND'"),
        (["--", "echo", "hello"], "there is no `vllm serve` in it"),
        (["decode.sh"], "put `vllm-ascend-pd migrate --` before `vllm serve`"),
    ],
)
def test_wrong_use(words: list[str], reason: str) -> None:
    given = CliRunner().invoke(cli.app, ["migrate", *words])
    assert given.exit_code == 2
    assert reason in " ".join(given.output.replace("│", " ").split())
