# SPDX-License-Identifier: Apache-2.0
"""What scripts/run_1p1d.py says of a server that ends by itself."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from harness.processes import ManagedProcess
from harness.waiting import wait_until

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_1p1d.py"

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


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("script_run_1p1d_failures", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
