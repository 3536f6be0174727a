# SPDX-License-Identifier: Apache-2.0
"""Options of the launch scripts: known, unknown, wrong; and what an engine logs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vllm_ascend_pd.tools.launch.cluster import app as cluster_app
from vllm_ascend_pd.tools.launch.engine import app

REPOSITORY = Path(__file__).resolve().parents[2]
CPU = ("--device", "cpu", "--model", "/models/m")


def launch(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(REPOSITORY / "scripts" / f"{script}.sh"), *options]
    python_path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": python_path, "PYTHON": sys.executable}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("script", ["launch_prefill", "launch_decode"])
@pytest.mark.parametrize("more", [(), ("--port", "1"), ("value",)])
def test_unknown_options(script: str, more: tuple[str, ...]) -> None:
    done = launch(script, *CPU, "--bogus", *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{script}: unknown option --bogus; see --help\n"


def test_the_scripts_know_the_options_of_the_program() -> None:
    engine = (REPOSITORY / "vllm_ascend_pd/tools/launch/engine.py").read_text()
    names = set(re.findall(r"^    (\w+): Annotated", engine, re.MULTILINE)) - {"role", "arguments", "ray_node"}
    assert {"port", "tp", "metaserver_token"} <= names
    for name in names:
        option = f"--{name.replace('_', '-')}"
        assert launch("launch_decode", option).stderr == f"launch_decode: {option} needs a value; see --help\n"


@pytest.mark.parametrize(("script", "option"), [("launch_prefill", "--tp"), ("launch_decode", "--kv-port")])
def test_values_that_a_type_rules_out_are_told_as_all_others(script: str, option: str) -> None:
    done = launch(script, *CPU, option, "0")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{script}: Invalid value for '{option}': ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ["--disable-access-log-for-endpoints", "/health,/metrics"]),
        (("--enforce-eager",), ["--disable-access-log-for-endpoints", "/health,/metrics", "--enforce-eager"]),
        (("--disable-access-log-for-endpoints=/x",), ["--disable-access-log-for-endpoints=/x"]),
        (("--disable_access_log_for_endpoints", "/x"), ["--disable_access_log_for_endpoints", "/x"]),
        (("--disable-access", "/x"), ["--disable-access", "/x"]),
    ],
)
def test_checks_are_not_logged_unless_the_operator_says_otherwise(
    arguments: tuple[str, ...], expected: list[str]
) -> None:
    options = ["--role", "prefill", *CPU, "--address", "127.0.0.1", "--port", "8100", "--", *arguments]
    words = CliRunner().invoke(app, options).stdout.splitlines()
    assert words[words.index("--kv-transfer-config") + 2 :] == expected


@pytest.mark.parametrize(
    ("plugins", "right"),
    [("ascend", "ascend,vllm_ascend_pd"), ("", "vllm_ascend_pd"), ("vllm_ascend_pd,ascend", None), (None, None)],
)
@pytest.mark.parametrize("node", [[], ["--ray-node", "--executor", "ray"]])
def test_f24_plugins_without_ours_are_refused(plugins: str | None, right: str | None, node: list[str]) -> None:
    options = ["--role", "prefill", *CPU, "--address", "127.0.0.1", "--port", "8100", *node]
    done = CliRunner().invoke(app, options, env={"VLLM_PLUGINS": plugins})
    assert (done.exit_code, done.stderr) == (0, "") if right is None else done.exit_code == 2
    if right is not None:
        reason = f"VLLM_PLUGINS must name vllm_ascend_pd, too, or vLLM has no such connector: set it to {right}\n"
        assert done.stderr == f"launch_prefill: {reason}"


def test_a_node_without_http_has_no_access_log() -> None:
    nodes = ["--nodes", "2", "--node-rank", "1", "--tp", "2", "--head-address", "127.0.0.1"]
    options = ["--role", "prefill", *CPU, "--address", "127.0.0.2", "--port", "8100", *nodes]
    words = CliRunner().invoke(app, options).stdout.splitlines()
    assert "--headless" in words
    assert "--disable-access-log-for-endpoints" not in words


@pytest.mark.parametrize("script", ["launch_prefill", "launch_decode", "launch_cluster"])
def test_help_needs_nothing_but_a_shell(script: str) -> None:
    command = [str(REPOSITORY / "scripts" / f"{script}.sh"), "--help"]
    env = {"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere/python"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Starts ")
    assert "PYTHON (default: $VENV/bin/python, else python3)" in done.stdout
    if script == "launch_cluster":
        assert "docs/configuration.md" in done.stdout
        for option in get_command(cluster_app).params:
            if option.param_type_name == "option" and option.opts != ["--repository"]:
                assert f"\n  {option.opts[0]} " in done.stdout
