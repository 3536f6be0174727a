# SPDX-License-Identifier: Apache-2.0
"""A test runs every command that README.md, docs/*.md and examples/*/README.md show. `TABLE` says how.

A command without a row fails, and so does a row without a command.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import test_launch_examples as examples
from page_commands import COMMANDS, ENVIRONMENT, Command
from proxy_cluster import eventually
from proxy_commands import curls, opens_the_front_door

from harness.documented import PAGES, REPOSITORY, fences, lines, taken_by
from harness.ports import is_free, release_port, reserve_port
from vllm_ascend_pd.transport.secret_files import cluster_secret, new_secret

MODELS = {"Llama-3.1-70B": "llama-3.1-70b.json", "DeepSeek-R1-W8A8": "deepseek-r1.json"}

# --- run as they are, in a folder of their own -------------------------------------------------------------


def makes_a_secret(command: Command, folder: Path) -> None:
    """Only its owner can read it, and engines find it where the command puts it."""
    if "/etc/pd" in command.line:
        command = command.with_values({"/etc/pd": str(folder)})
    if len(command.words) > 2:
        (folder / command.words[2]).parent.mkdir(parents=True, exist_ok=True)
    printed = command.run(folder, HOME=str(folder), XDG_CONFIG_HOME="")
    file = folder / (command.words[2] if len(command.words) > 2 else ".config/vllm-ascend-pd/secret")
    assert file.stat().st_mode & 0o777 == 0o600
    assert cluster_secret(file) is not None
    assert str(file) in printed


def changes_the_secret(command: Command, folder: Path) -> None:
    """The steps of the page, up to this one: the file has the secrets that it should have, and is its owner's alone."""
    [page] = command.pages
    (folder / "secret").write_bytes(new_secret())
    (folder / "secret").chmod(0o600)
    steps = lines(page)
    steps = steps[steps.index("vllm-ascend-pd secret /etc/pd/secret.new") : steps.index(command.line) + 1]
    seen = [fingerprints(folder)]
    for step in steps:
        Command(step, command.pages).with_values({"/etc/pd": str(folder)}).run(folder)
        seen.append(fingerprints(folder))
    [old], _, *changed = seen
    new = changed[0][1]
    assert changed == [[old, new], [new, old], [new]][: len(changed)]
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600


def fingerprints(folder: Path) -> list[str]:
    secret = cluster_secret(folder / "secret")
    assert secret is not None
    return secret.fingerprints()


def plans(command: Command, folder: Path) -> None:
    """The output must be what `docs/plan.md` shows below the command."""
    model = command.words[2]
    (folder / model).mkdir()
    shutil.copy(REPOSITORY / "tests/unit/data" / MODELS[model], folder / model / "config.json")
    printed = command.run(folder)
    if command.pages == (REPOSITORY / "docs/plan.md",):
        bodies = [body for _, body in fences(*command.pages)]
        below = bodies[bodies.index(f"{command.line}\n") + 1]
        assert [line.rstrip() for line in printed.splitlines()] == [line.rstrip() for line in below.splitlines()]
    assert "prefill TP" in printed


def migrates(command: Command, folder: Path) -> None:
    """The script that the page shows prints what it shows next."""
    [page] = command.pages
    script, printed, *_ = (textwrap.dedent(body) for language, body in fences(page) if language == "text")
    (folder / "model").mkdir()
    shutil.copy(REPOSITORY / "tests/unit/data" / MODELS["DeepSeek-R1-W8A8"], folder / "model/config.json")
    (folder / "decode.sh").write_text(script.replace("/models/DeepSeek-R1", f"{folder}/model"))
    shown = command.run(folder).replace(f"{folder}/model", "/models/DeepSeek-R1")
    assert shown == f"{printed}\nworks with these changes\n"


def makes_the_model(command: Command, folder: Path) -> None:
    """The command makes the model that the page's launch scripts are given."""
    [page] = command.pages
    [model] = {each.split("--cpu ")[1].split()[0] for each in lines(page) if "--cpu" in each}
    assert model in command.line
    for _ in range(2):  # the second time it is there
        command.with_values({"/tmp": str(folder), ".venv/bin/python": sys.executable}).run(REPOSITORY)
    assert (folder / Path(model).name / "config.json").exists()


def serves_a_pool(command: Command, folder: Path) -> None:
    port, metrics = reserve_port(), reserve_port()
    assert f":{command.words[-1]}" in (REPOSITORY / "examples/kv-pool/mooncake.json").read_text()
    command = command.with_values({command.words[-1]: str(port)})
    with (folder / "log").open("wb") as log:
        words = [*command.words, f"--metrics_port={metrics}"]  # the default may be taken
        process = subprocess.Popen(words, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        eventually(lambda: not is_free(port))
        assert process.poll() is None, (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()
        release_port(port)
        release_port(metrics)


# --- the nearest that can be run here ----------------------------------------------------------------------


def is_understood(command: Command, folder: Path) -> None:
    """vLLM's parser and the connector's, or the proxy's, take what the script would run."""
    line = command.line.replace("/etc/pd", str(REPOSITORY / "examples/kv-pool")).replace("VENV=$PWD/.venv ", "")
    script, role = re.findall(r"(scripts/launch_(\w+)\.sh)", line)[0]
    line = line.replace(script, f"{script} --dry-run")
    shown = Command(line, command.pages).run(REPOSITORY, HOME=str(folder), **NPU_SERVER)
    words = examples.words_of(shown.splitlines()[-1].removeprefix("exec "))
    if role == "proxy":
        told = examples.proxy_options(words)
        assert told["prefill"]
        assert told["decode"]
    else:
        examples.understood(words, role)


NPU_SERVER = {"GLOO_SOCKET_IFNAME": "eth0", "ASCEND_HOME_PATH": "/cann"}
"""This machine has neither CANN nor the servers' addresses."""


def prints_an_environment(command: Command, folder: Path) -> None:
    command = command.with_values({"scripts/": f"{REPOSITORY}/scripts/"})
    command.run(folder, HOME=str(folder), **NPU_SERVER)
    assert "export HCCL_CONNECT_TIMEOUT='1200'\n" in (folder / "environment.sh").read_text()


def runs_over_ray(command: Command, folder: Path) -> None:
    """With stand-ins for Ray and vLLM, in the environment that the page's first command prints."""
    others = [each for each in COMMANDS if each.pages == command.pages]
    [first] = [each for each in others if "--dry-run" in each.words]
    prints_an_environment(first, folder)
    for name in ("ray", "vllm"):
        (folder / name).write_text('#!/bin/sh\nprintf "%s\\n" "$VLLM_HOST_IP" "${0##*/}" "$@"\n')
        (folder / name).chmod(0o755)
    address, *words = command.run(folder, PATH=f"{folder}:{ENVIRONMENT['PATH']}").splitlines()
    assert f"VLLM_HOST_IP={address} " in first.line
    if words[0] == "vllm":
        examples.understood(words, "prefill" if "kv_producer" in words[-1] else "decode")
        assert words[words.index("--distributed-executor-backend") + 1] == "ray"
    elif "--head" not in words:
        [head] = [word.removeprefix("--address=").split(":") for word in words if word.startswith("--address=")]
        assert any(f"--head --port={head[1]} --node-ip-address={head[0]})" in each.line for each in others)


def is_a_test(command: Command, folder: Path) -> None:
    assert (REPOSITORY / command.words[-1]).is_file()


def starts_what_is_there(command: Command, folder: Path) -> None:
    """Runs the scripts themselves, with a stand-in for the environment that they set up."""
    shutil.copytree(REPOSITORY / "scripts", folder / "scripts")
    log = folder / "log"
    for name in ("setup_env.sh", "setup_npu_emulation.sh"):
        (folder / "scripts" / name).write_text(f'#!/usr/bin/env bash\necho "set up $*" >>{log}\n')
    for environment in ("venv", "venv-npu"):
        (folder / environment / "bin").mkdir(parents=True)
        for name in ("python", "ruff", "mypy", "lint-imports"):
            program = folder / environment / "bin" / name
            program.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>{log}\n')
            program.chmod(0o755)
    command.run(folder, VENV=str(folder / "venv"))
    set_up, *started = log.read_text().replace(f"{folder}/", "").splitlines()
    assert set_up.startswith("set up")
    words = [word for line in started for word in line.split() if not word.startswith("venv/")]
    paths = [word for word in words if "/" in word]
    assert paths
    assert all((REPOSITORY / path).exists() for path in paths), paths
    program = command.words[0].replace(".sh", ".py")
    if program != "scripts/test.py":
        assert started == [f"python {program}"]
    elif len(command.words) == 1:
        suites = {f"tests/{suite}" for suite in ("e2e", "faults", "hostile", "integration", "npu", "unit")}
        assert suites <= set(paths)
        assert command.words[0] in (REPOSITORY / ".ci/run").read_text()
        assert ".ci/run" in (REPOSITORY / ".github/workflows/cpu.yml").read_text()


def could_be_installed(command: Command, folder: Path) -> None:
    """All that the extra asks for is in this environment, in versions that fit."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    for name in ("vllm_ascend_pd", "csrc"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    words = [*command.words, "--dry-run", "--no-index"]
    printed = Command(shlex.join([sys.executable, "-m", *words]), command.pages).run(folder)
    assert "Would install vllm-ascend-pd" in printed


def is_done_by_setup(command: Command, folder: Path) -> None:
    """The set-up unpacks the same package, with those that it depends on."""
    package = command.words[2].partition("_")[0]
    assert f"\n  programs {package} " in (REPOSITORY / "scripts/setup_env.sh").read_text()


def is_one_of_all(command: Command, folder: Path) -> None:
    """benchmarks/run_all.sh runs it in the same environment, with the same options."""
    *before, program = command.line.removesuffix(" --npu").split()
    environment = "$VENV-npu" if ".venv-npu" in before[-1] else "$VENV"
    npu = " --npu" * command.line.endswith(" --npu")
    assert f'run "{environment}" {Path(program).stem}{npu} "' in (REPOSITORY / "benchmarks/run_all.sh").read_text()


def has_valid_manifests(command: Command, folder: Path) -> None:
    [kustomization] = examples.resources(REPOSITORY / command.words[3] / "kustomization.yaml")
    for name in kustomization["resources"]:
        examples.test_manifests_are_valid(REPOSITORY / command.words[3] / name)
    [secret] = kustomization["secretGenerator"]
    [page] = command.pages
    assert {f"vllm-ascend-pd secret {command.words[3]}/{name}" for name in secret["files"]} <= {*lines(page)}


# --- the table ---------------------------------------------------------------------------------------------


def is_a_simulation(command: Command, folder: Path) -> None:
    name = command.line.split("-m simulation ")[1].split()[0]
    assert name in re.findall(
        r"^(\S+)", (REPOSITORY / "tests/simulation/__main__.py").read_text().split('"""')[1], re.M
    )


def takes_these_options(command: Command, folder: Path) -> None:
    program = [word for word in command.words if not word.startswith("-")][: 2 if "doctor" in command.words else 1]
    if command.words[0] == "python3":
        program = [sys.executable, str(REPOSITORY / command.words[1])]
    elif program[0].startswith("scripts/"):
        program[0] = str(REPOSITORY / program[0])
    environment = ENVIRONMENT | {"COLUMNS": "200", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*program, "--help"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    options = {word for word in command.words if word.startswith("--")}
    assert options <= set(re.findall(r"--[a-z-]+", done.stdout)), done.stdout


class Row(NamedTuple):
    commands: str
    """Regular expression of whole commands."""
    how: Callable[[Command, Path], None] | str
    """Runs one here, or the test elsewhere that takes it from its page and runs it."""
    why: str = ""
    """Of one that cannot be run as it is: the reason."""


TABLE = (
    Row(r"vllm-ascend-pd secret( \S+)?", makes_a_secret),
    Row(r"\(umask 077; (cat|tac|head) .*", changes_the_secret),
    Row(r"vllm-ascend-pd plan .*", plans),
    Row(r"bash decode\.sh 4", migrates),
    Row(r"vllm-ascend-pd doctor( --port .*| --hardware)?", "tests/integration/test_doctor.py::test_a_machine"),
    Row(r"vllm-ascend-pd doctor --proxy .*", "tests/integration/test_doctor.py::test_a_pair"),
    Row(r"vllm-ascend-pd proxy --host .*", opens_the_front_door),
    Row(r"vllm-ascend-pd timeline .*", "tests/e2e/test_timeline.py::test_the_command_draws_a_request"),
    Row(r"curl .*", curls),
    Row(
        r"benchmarks/run_all\.sh --quick",
        "tests/integration/test_benchmarks.py::test_run_all_starts_every_benchmark",
        "10 minutes: there is a stand-in for Python; scripts/test.sh --benchmarks runs it",
    ),
    Row(r"python benchmarks/proxy_overhead\.py", "tests/integration/test_benchmarks.py::test_proxy_overhead"),
    Row(
        r"python benchmarks/(?!proxy_overhead)\w+\.py|CANN_ON_HOST=1 .* benchmarks/\w+\.py( --npu)?",
        is_one_of_all,
        "minutes each",
    ),
    Row(
        r"(VLLM_MOONCAKE_BOOTSTRAP_PORT=8998 )?ASCEND_RT_VISIBLE_DEVICES=[01] VLLM_HOST_IP=127.0.0.1 vllm serve .*",
        "tests/e2e/test_routers.py::test_the_engines_are_those_of_the_page",
    ),
    Row(r"vllm-router .*", "tests/e2e/test_routers.py::test_tokens"),
    Row(
        r"ASCEND_RT_VISIBLE_DEVICES=(0,1|2) vllm serve .*",
        "tests/e2e/test_timeline.py::test_the_engines_are_those_of_the_readme",
    ),
    Row(r"vllm serve MODEL \.\.\. .*", "tests/e2e/test_traces.py::test_engines_are_told_as_documented"),
    Row(r"scripts/run_1p1d\.sh", "tests/e2e/test_run_1p1d.py::test_what_the_readme_begins_with"),
    Row(r"scripts/test\.sh", starts_what_is_there, "it is what runs this test"),
    Row(r"scripts/test\.sh --faults", starts_what_is_there, "40 minutes: its short form is a stage of scripts/test.sh"),
    Row(r"scripts/test\.sh --hostile", starts_what_is_there, "minutes: its short form is a stage of scripts/test.sh"),
    Row(r"scripts/test\.sh --simulation", starts_what_is_there, "its short form is a stage of scripts/test.sh"),
    Row(r"scripts/test\.sh --mutants", takes_these_options, "ten minutes"),
    Row(
        r"scripts/first_hours\.sh .*|python3 scripts/compare_connectors\.py .*|"
        r"vllm-ascend-pd doctor --hardware --peer .*",
        takes_these_options,
        "needs servers with NPUs; tests/npu runs their short forms on emulated CANN",
    ),
    Row(r"PYTHONPATH=\.:tests \.venv/bin/python -m simulation .*", is_a_simulation, "minutes each"),
    Row(r"\.venv/bin/python -m pytest (-s )?tests/\S+\.py", is_a_test, "minutes: a test's long form"),
    Row(r"pip install .*", could_be_installed, "would change the environment that tests run in"),
    Row(r"([A-Z_]+=\S+ )*VLLM_HOST_IP=192\S+ scripts/launch_\w+\.sh [^|]*", is_understood, "starts engines on NPUs"),
    Row(r"PYTHONPATH=tests .*", makes_the_model),
    Row(r"VENV=.*", "tests/e2e/test_launch.py::test_the_example_for_the_cpu_serves_and_stops"),
    Row(r"VLLM_HOST_IP=\S+ scripts/launch_prefill\.sh .* >environment\.sh", prints_an_environment),
    Row(r"\(source environment\.sh; .*\)", runs_over_ray, "there is no Ray here"),
    Row(r"mooncake_master .*", serves_a_pool),
    Row(r"(apt-get download|dpkg -x) .*", is_done_by_setup, "needs a network: scripts/setup_env.sh does it for tests"),
    Row(
        r"/tmp/pd-prometheus/usr/bin/\w+ .*",
        "tests/integration/test_observability.py::test_prometheus_collects_a_proxy_as_the_readme_says",
    ),
    Row(r"kubectl apply .*", has_valid_manifests, "there is no Kubernetes here"),
)  # fmt: skip


def rows_of(command: Command) -> list[Row]:
    return [row for row in TABLE if re.fullmatch(row.commands, command.line)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line[:80])
def test_command(command: Command, tmp_path: Path) -> None:
    rows = rows_of(command)
    assert len(rows) == 1, f"{command.line!r} must be in one row of the table, and is in {len(rows)}"
    [row] = rows
    if isinstance(row.how, str):
        assert command.line in taken_by(row.how)
    else:
        row.how(command, tmp_path)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.commands)
def test_no_row_is_without_a_command(row: Row) -> None:
    assert any(re.fullmatch(row.commands, command.line) for command in COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_fence_names_its_language(page: Path) -> None:
    """So no command is overlooked."""
    assert {language for language, _ in fences(page)} <= {"sh", "text", "json"}
