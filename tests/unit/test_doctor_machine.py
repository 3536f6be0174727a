# SPDX-License-Identifier: Apache-2.0
"""What the doctor makes of a machine's ports, how it runs programs, and its report."""

import errno
import socket
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from harness.waiting import wait_until
from vllm_ascend_pd.core.ascend import ascend_ports
from vllm_ascend_pd.tools.doctor import ports
from vllm_ascend_pd.tools.doctor.loopback import compare
from vllm_ascend_pd.tools.doctor.ports import Port
from vllm_ascend_pd.tools.doctor.report import Finding, Level, error, make_report
from vllm_ascend_pd.tools.programs import MAX_OUTPUT_BYTES, Ran, run, run_all


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def ran(program: str, timeout_s: float = 30) -> Ran:
    return run(python(program), timeout_s)


def test_the_names_that_scripts_rely_on() -> None:
    report = make_report("machine", [error("a.b", "broken", "repair it", seconds=1.5)])
    assert msgspec.json.decode(msgspec.json.encode(report)) == {
        "schema": 2,
        "target": "machine",
        "ok": False,
        "counts": {"ok": 0, "note": 0, "warning": 0, "error": 1},
        "findings": [
            {"check": "a.b", "level": "error", "found": "broken", "action": "repair it", "figures": {"seconds": 1.5}}
        ],
    }


def test_what_others_say_becomes_a_line() -> None:
    finding = error("a.b", "it says\n\x1b[31mred " + "x" * 5000, "see\nit", version="1\n2")
    assert finding.found.startswith("it says [31mred xxx")
    assert len(finding.found) < 1010
    assert (finding.action, finding.figures) == ("see it", {"version": "1 2"})


@pytest.mark.parametrize(("level", "found", "action"), [("error", "x", ""), ("warning", "x", ""), ("ok", "x\ny", "")])
def test_a_finding_is_one_line_and_says_what_to_do(level: str, found: str, action: str) -> None:
    with pytest.raises(ValueError, match=r"line|what to do"):
        Finding("a.b", Level(level), found, action)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("print('out')", None),
        ("import sys; sys.exit(7)", "ended with code 7"),
        ("import os; os.kill(os.getpid(), 11)", "was ended by signal 11 (Segmentation fault)"),
        ("while True: print('x' * 10000)", "printed more than 256 KiB and was stopped"),
    ],
)
def test_how_programs_end(program: str, problem: str | None) -> None:
    said = ran(
        f"import sys; print('first'); print('err', file=sys.stderr, flush=True); {program}"
        if ":" not in program
        else program
    )
    assert said.problem == problem
    assert len(said.output) <= MAX_OUTPUT_BYTES


def test_a_program_that_is_not_there() -> None:
    assert run(["/nowhere/npu-smi", "info"], 5).problem == "cannot be started: No such file or directory"


def test_a_program_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    said = ran(
        "import os, time\n"
        "pid = os.fork()\n"
        f"pid and open({str(child)!r}, 'w').write(str(pid))\n"
        "pid and print('started', flush=True)\n"
        "time.sleep(600)",
        timeout_s=3,
    )
    assert (said.output, said.problem) == ("started\n", "did not end within 3 s and was stopped")
    wait_until(lambda: not (psutil.pid_exists(int(child.read_text())) and _runs(int(child.read_text()))), 30)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_others_are_stopped_when_one_has_failed() -> None:
    programs = [python("import time; time.sleep(600)"), python("raise SystemExit(3)"), python("print('done')")]
    hangs, failed, done = run_all(programs, 60, grace_s=2)
    assert hangs.problem == "was stopped because another one had failed"
    assert failed.problem == "ended with code 3"
    assert (done.output, done.problem) == ("done\n", None)


@pytest.mark.parametrize(
    ("number", "problem", "level", "says"),
    [
        (30101, None, Level.OK, "is free"),
        (30101, errno.EADDRINUSE, Level.ERROR, "is in use"),
        (30101, errno.EADDRNOTAVAIL, Level.ERROR, "VLLM_HOST_IP"),
        (70, errno.EACCES, Level.ERROR, "Permission denied"),
        (65536, errno.EINVAL, Level.ERROR, "cannot be used"),
        (20400, None, Level.ERROR, "one of Mooncake's for NPU 3 (20300-20400)"),
        (20401, None, Level.OK, "is free"),
    ],
)
def test_choice_of_a_port(number: int, problem: int | None, level: Level, says: str) -> None:
    taken = ascend_ports([0, 3], {})
    finding = ports.judge_port(Port(number, "the API server"), taken, problem)
    assert finding.level is level
    assert says in f"{finding.found} {finding.action}"


def test_a_port_that_is_wanted_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
    findings = ports.check_ports(number - 1, 2, "127.0.0.1", number, [], {})
    assert [finding.check for finding in findings] == [f"ports.{number}", f"ports.{number - 1}"]
    assert findings[0].level is Level.ERROR
    assert ports.check_ports(None, 2, "", None, [], {}) == []
    assert "twice, for the API server and for the listener of data-parallel engine 1" in findings[0].found


def test_where_mooncake_looks_for_ports() -> None:
    assert ascend_ports([1], {"ASCEND_BASE_PORT": "30000"}) == {1: range(30100, 30201)}
    assert ascend_ports([1], {"ASCEND_BASE_PORT": "x"}) == {1: range(20100, 20201)}


def test_ports_are_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = Port(server.getsockname()[1], "the API server", "127.0.0.1")
        assert ports.try_port(port) == errno.EADDRINUSE
    assert ports.try_port(port) is None
    assert ports.try_port(port._replace(host="192.0.2.1")) == errno.EADDRNOTAVAIL
    assert ports.try_port(port._replace(host="no address")) is not None


def test_bytes_are_compared() -> None:
    assert compare(b"abcd\0", b"abcd\0") == (0, -1)
    assert compare(b"abXd\1", b"abcd\0") == (2, 2)
