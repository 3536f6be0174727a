# SPDX-License-Identifier: Apache-2.0
"""scripts/run_1p1d.sh answers --help and refuses unknown options before it sets anything up, and says why a server
ended."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from typer.main import get_command

from harness.processes import ManagedProcess
from harness.waiting import wait_until
from vllm_ascend_pd.core.ascend import DOCUMENTED_DEVICE_BYTES

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


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{NAME}", SCRIPTS / f"{NAME}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_comment_has_the_options_of_the_program(tmp_path: Path, demo: ModuleType) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    assert "set up" not in done.stdout
    for option in get_command(demo.app).params:
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


def test_on_npus_the_kv_cache_is_not_all_of_the_memory(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would take about 53 of 64 GB, which is more than HIXL documents for transfers."""
    monkeypatch.setattr(demo.ascend, "problems", list)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3")
    engines = demo.engine_configs(
        demo.Device.NPU, emulate=False, tiny=False, sizes=((2, 1), (1, 1)), port=8000, args=("", "")
    )
    assert {engine.kv_cache_bytes for engine in engines} == {demo.KV_BYTES}
    assert demo.KV_BYTES < DOCUMENTED_DEVICE_BYTES
    assert all(engine.eager for engine in engines), "graphs take streams that transfers need"


# --- a server that ends by itself -----------------------------------------------------------------------------

LOG = """\
INFO started
(APIServer pid=1) ERROR 11-24 EngineCore_0 died, killed by signal 9
INFO:     127.0.0.1:41234 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error
INFO:     127.0.0.1:41234 - "GET /health HTTP/1.1" 200 OK
INFO:     127.0.0.1:41234 - "GET /metrics HTTP/1.1" 200 OK
INFO:     127.0.0.1:41234 - "GET /health HTTP/1.1" 503 Service Unavailable
nanobind: leaked 3 instances!
 - leaked instance 0x7f01 of type "xgrammar.Grammar"
nanobind: leaked 5 types!
 - leaked type "xgrammar.Grammar"
 - ... skipped remainder
nanobind: leaked 43 functions!
 - leaked function "__init__"
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


Start = Callable[[str, str], ManagedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server that says what is in `LOG`, and then does as told."""
    said = tmp_path / "said"
    said.write_text(LOG)
    started: list[ManagedProcess] = []

    def start(name: str, then: str) -> ManagedProcess:
        command = ["sh", "-c", f"cat {said}; {then}"]
        started.append(ManagedProcess(name, command, os.environ, tmp_path / f"{name}.log"))
        wait_until(lambda: "refleaks" in started[-1].tail(99) or "503" in started[-1].tail(99), timeout_s=30)
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_the_cause_is_shown_and_noise_is_not(demo: ModuleType, start: Start) -> None:
    running = [start("decode-tp1", "exec sleep 60"), start("prefill-tp2", "exit 0")]
    with pytest.raises(demo.DemoError) as caught:
        demo.wait_for_failure(running)
    first, _, end = str(caught.value).partition("\n\nits end:\n")
    assert first.startswith("prefill-tp2 ended with code 0; the first error in ")
    assert "decode-tp1" not in str(caught.value)
    assert first.splitlines()[1:] == [LOG.splitlines()[i] for i in (1, 2, 5)]
    assert end.splitlines() == [LOG.splitlines()[i] for i in (0, 1, 2, 5)]


def test_a_failed_request_names_who_has_ended(demo: ModuleType, start: Start) -> None:
    running = [start("prefill-tp2", "exec sleep 60"), start("decode-tp1", "sleep 0.5; kill -9 $$")]
    reason = r"HTTP 502 .*\ndecode-tp1 ended with code -9; "
    with pytest.raises(demo.DemoError, match=reason), demo.naming_who_ended(running):
        raise httpx.HTTPError("HTTP 502 {error: ConnectError}")
