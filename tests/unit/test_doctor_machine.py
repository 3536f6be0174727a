# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdicts about a machine, and how it runs programs."""

from __future__ import annotations

import errno
import json
import socket
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest

from harness.waiting import wait_until
from vllm_ascend_pd.core.transports import TransportInfo
from vllm_ascend_pd.tools.doctor import engine_config, limits, loopback, mooncake, mooncake_engine, ports
from vllm_ascend_pd.tools.doctor.command import Machine, judge_data_parallel, options
from vllm_ascend_pd.tools.doctor.driver import Driver
from vllm_ascend_pd.tools.doctor.engine_config import UsageError
from vllm_ascend_pd.tools.doctor.finding import DoctorTarget, Finding, Level, error, make_report, note, ok, warning
from vllm_ascend_pd.tools.doctor.loopback_process import Checked, SendTiming, Task, compare
from vllm_ascend_pd.tools.doctor.mooncake_engine import Installed
from vllm_ascend_pd.tools.doctor.pair import api_key
from vllm_ascend_pd.tools.doctor.tools import MAX_OUTPUT_BYTES, Ran, run_tool
from vllm_ascend_pd.transport.socket_limiter import FILES_WANTED


def run(program: str, timeout_s: float = 30) -> Ran:
    return anyio.run(run_tool, [sys.executable, "-S", "-c", program], timeout_s)


def test_a_report_counts_and_is_ok_without_errors() -> None:
    found = [ok("a.b", "fine"), note("a.c", "hm"), warning("a.d", "slow", "make it faster")]
    assert make_report(DoctorTarget.MACHINE, found).ok
    report = make_report(DoctorTarget.PAIR, [*found, error("a.e", "broken", "repair it")])
    assert not report.ok
    assert report.counts == dict.fromkeys(Level, 1)


def test_the_names_that_scripts_rely_on() -> None:
    report = make_report(DoctorTarget.MACHINE, [error("a.b", "broken", "repair it", seconds=1.5)])
    assert msgspec.json.decode(msgspec.json.encode(report)) == {
        "schema": 1,
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


def test_a_program_that_is_not_there() -> None:
    ran = anyio.run(run_tool, ["/nowhere/npu-smi", "info"], 5)
    assert ran.problem == "cannot be started: No such file or directory"


def test_a_program_that_fails() -> None:
    ran = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert (ran.output, ran.errors, ran.problem) == ("out\n", "err\n", "ended with code 7")
    assert run("import os; os.kill(os.getpid(), 11)").problem == "was ended by SIGSEGV"


def test_a_program_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    ran = run(
        "import os, time\n"
        "pid = os.fork()\n"
        f"pid and open({str(child)!r}, 'w').write(str(pid))\n"
        "pid and print('started', flush=True)\n"
        "time.sleep(600)",
        timeout_s=3,
    )
    assert ran.problem == "did not end within 3 s and was stopped"
    assert ran.output == "started\n"
    wait_until(lambda: not (psutil.pid_exists(int(child.read_text())) and _runs(int(child.read_text()))), 30)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_program_that_never_stops_talking() -> None:
    ran = run("while True: print('x' * 10000)")
    assert ran.problem == "printed more than 256 KiB and was stopped"
    assert len(ran.output) == MAX_OUTPUT_BYTES


@pytest.mark.parametrize(
    ("soft", "level", "connections"),
    [(None, Level.OK, 4096), (FILES_WANTED, Level.OK, 4096), (1024, Level.WARNING, 256), (1, Level.WARNING, 1)],
)
def test_open_files(soft: int | None, level: Level, connections: int) -> None:
    finding = limits.judge_files(soft)
    assert (finding.level, finding.figures["connections"]) == (level, connections)


def test_memory() -> None:
    assert limits.judge_memlock(8 << 20, "tcp").level is Level.OK
    assert limits.judge_memlock(8 << 20, "rdma").level is Level.WARNING
    assert limits.judge_memlock(None, "rdma").level is Level.OK
    assert limits.judge_shm(64 << 20, 64 << 20).level is Level.WARNING
    assert limits.judge_shm(1 << 34, 1 << 30).level is Level.OK


def test_ports_of_data_parallel_engines() -> None:
    needed = ports.needed(30101, 2, "127.0.0.1", 8200)
    assert [(port.number, port.host) for port in needed] == [(8200, ""), (30101, "127.0.0.1"), (30102, "127.0.0.1")]
    assert ports.needed(None, 2, "", None) == []


@pytest.mark.parametrize(
    ("number", "problem", "level", "says"),
    [
        (30101, None, Level.OK, "is free"),
        (30101, errno.EADDRINUSE, Level.ERROR, "is in use"),
        (30101, errno.EADDRNOTAVAIL, Level.ERROR, "VLLM_HOST_IP"),
        (70, errno.EACCES, Level.ERROR, "Permission denied"),
        (65536, errno.EINVAL, Level.ERROR, "cannot be used"),
        (40000, None, Level.NOTE, "ip_local_reserved_ports=40000"),
        (20400, None, Level.ERROR, "one of Mooncake's for NPU 3 (20300-20400)"),
        (20401, None, Level.OK, "is free"),
    ],
)
def test_choice_of_a_port(number: int, problem: int | None, level: Level, says: str) -> None:
    taken = ports.ascend_ports([0, 3], {})
    finding = ports.judge(ports.Port(number, "the API server"), taken, range(32768, 61000), problem)
    assert finding.level is level
    assert says in f"{finding.found} {finding.action}"


@pytest.mark.parametrize(
    ("role", "engines", "said"),
    [(None, 1, []), ("kv_consumer", 2, []), (None, 2, [Level.NOTE]), ("kv_producer", 2, [Level.NOTE])],
)
def test_engines_without_listeners_are_counted_in_vain(role: str | None, engines: int, said: list[Level]) -> None:
    config = None if role is None else engine_config.KvTransferConfig(kv_role=role)
    assert [finding.level for finding in judge_data_parallel(Machine(config, None, engines, ()))] == said


def test_a_port_that_is_wanted_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
    findings = ports.check(ports.needed(number - 1, 2, "127.0.0.1", number), [], {})
    assert [finding.check for finding in findings] == [f"ports.{number}", f"ports.{number - 1}"]
    assert findings[0].level is Level.ERROR
    assert "twice, for the API server and for the listener of data-parallel engine 1" in findings[0].found


def test_where_mooncake_looks_for_ports() -> None:
    assert ports.ascend_ports([1], {"ASCEND_BASE_PORT": "30000"}) == {1: range(30100, 30201)}
    assert ports.ascend_ports([1], {"ASCEND_BASE_PORT": "x"}) == {1: range(20100, 20201)}


def test_ports_are_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = ports.Port(server.getsockname()[1], "the API server", "127.0.0.1")
        assert ports.try_port(port) == errno.EADDRINUSE
    assert ports.try_port(port) is None
    assert ports.try_port(port._replace(host="192.0.2.1")) == errno.EADDRNOTAVAIL
    assert ports.try_port(port._replace(host="no address")) is not None


FOR_TCP = Installed(None, tcp=True)
FOR_ASCEND = Installed(TransportInfo("ascend", "mooncake-transfer-engine-npu 0.3.11.post1", "comm", "Connect"), False)
FOR_BOTH = Installed(
    TransportInfo("ascend", "mooncake-transfer-engine-npu 0.3.13.post1", "client/server", "AutoConnect"), True
)


@pytest.mark.parametrize(
    ("protocol", "on_npu", "installed", "level", "used"),
    [
        (None, False, FOR_TCP, Level.OK, "tcp"),
        (None, True, FOR_BOTH, Level.OK, "ascend"),
        (None, True, FOR_TCP, Level.ERROR, "ascend"),
        (None, True, None, Level.OK, "ascend"),
        ("tcp", True, FOR_BOTH, Level.WARNING, "tcp"),
        ("tcp", True, FOR_ASCEND, Level.ERROR, "tcp"),
        ("rdma", True, FOR_BOTH, Level.ERROR, "rdma"),
        ("ascend", False, FOR_TCP, Level.ERROR, "ascend"),
        ("rdma", False, FOR_TCP, Level.OK, "rdma"),
        ("udp", False, FOR_TCP, Level.ERROR, "udp"),
    ],
)
def test_protocol(protocol: str | None, on_npu: bool, installed: Installed | None, level: Level, used: str) -> None:
    finding = mooncake.judge(protocol, on_npu, installed)
    assert (finding.level, finding.figures["protocol"]) == (level, used)


def test_ascend_where_the_environment_turns_it_into_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_FORCE_TCP", "")
    assert mooncake.judge(None, True, FOR_BOTH).level is Level.ERROR
    assert mooncake.judge("tcp", True, FOR_BOTH).level is Level.WARNING


@pytest.mark.parametrize(
    ("kind", "driver", "toolkit", "level"),
    [
        ("client/server", "25.5.0", "9.1.0", Level.OK),
        ("client/server", "26.0.rc1", "9.1.0", Level.OK),
        ("client/server", "25.5.rc1.1", "9.1.0", Level.ERROR),
        ("client/server", "25.2.0", "9.1.0", Level.ERROR),
        ("client/server", "25.5.0", "9.0.0", Level.ERROR),
        ("client/server", None, "9.0.0", Level.ERROR),
        ("client/server", None, "9.1.0", Level.NOTE),
        ("client/server", "25.5.0", None, Level.NOTE),
        ("comm", "25.2.0", "9.0.0", Level.OK),
        ("comm", None, None, Level.OK),
        ("", "25.5.0", "9.1.0", Level.NOTE),
    ],
)
def test_the_engine_that_starts(kind: str, driver: str | None, toolkit: str | None, level: Level) -> None:
    transport = TransportInfo("ascend", "mooncake-transfer-engine-npu 0.3.13.post1", kind, "AutoConnect")
    finding = mooncake_engine.judge(transport, Driver(Path("/"), driver, None), toolkit, {})
    assert finding.level is level
    assert finding.figures["kind"] == kind


@pytest.mark.parametrize(
    ("kind", "buffer_pool", "level"),
    [("client/server", "4:8", Level.ERROR), ("client/server", "0:0", Level.OK), ("comm", "4:8", Level.OK)],
)
def test_the_client_server_engine_does_not_start_with_a_buffer_pool(kind: str, buffer_pool: str, level: Level) -> None:
    transport = TransportInfo("ascend", "mooncake-transfer-engine-npu 0.3.13.post1", kind, "AutoConnect")
    environment = {"ASCEND_BUFFER_POOL": buffer_pool}
    finding = mooncake_engine.judge(transport, Driver(Path("/"), "25.5.0", None), "9.1.0", environment)
    assert finding.level is level
    assert ("ASCEND_BUFFER_POOL=4:8" in finding.found) == (level is Level.ERROR)


def test_a_mooncake_without_tcp_is_not_tried_over_tcp() -> None:
    assert mooncake_engine.no_loopback(None) is None
    assert mooncake_engine.no_loopback(FOR_TCP) is None
    assert mooncake_engine.no_loopback(FOR_BOTH) is None
    skipped = mooncake_engine.no_loopback(FOR_ASCEND)
    assert skipped is not None
    assert (skipped.check, skipped.level) == ("transfer.loopback", Level.NOTE)


def test_cann(tmp_path: Path) -> None:
    def level() -> Level:
        return mooncake.check_cann({"ASCEND_HOME_PATH": str(tmp_path)}).level

    assert mooncake.check_cann({}).level is Level.ERROR
    assert level() is Level.NOTE
    info = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()
    info.write_text("package_name=Ascend-cann-toolkit\nversion=9.1.0\narch=aarch64\n")
    assert level() is Level.OK
    info.write_text("version=8.5.0\n")
    assert level() is Level.WARNING


def judged(config: dict[str, Any]) -> dict[str, Level]:
    findings, _ = engine_config.judge(engine_config.read(json.dumps(config)))
    return {finding.check: finding.level for finding in findings}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prefill": ["p:1"]}, "is not a URL"),
        ({"proxy": ""}, "'' is not a URL"),
        ({"prefill": ["http://p:1"], "port": 80}, "give one kind"),
        ({"proxy": "http://p:1", "peers": ["192.0.2.1"]}, "give one kind"),
        ({"ca_file": "/etc/pd/ca.pem"}, "--ca-file is for https:// URLs"),
        ({"proxy": "https://p:1", "ca_file": "/none"}, "--ca-file '/none' cannot be used: .*No such file"),
        ({"proxy": "https://p:1", "ca_file": __file__}, "--ca-file .* cannot be used"),
        ({"kv_transfer_config": "{"}, "--kv-transfer-config"),
        (
            {"kv_transfer_config": json.dumps({"kv_role": "kv_consumer", "kv_port": 65530}), "data_parallel": 7},
            "--data-parallel-size 7: kv_port 65530 leaves ports for 6 engines",
        ),
        ({"peers": ["node-2"]}, "'node-2' is not an address"),
        ({"peers": ["192.0.2.1"] * 65}, "at most 64"),
        ({"proxy": "http://p:1", "hardware": True}, "give one kind"),
        ({"step_timeout": 5.0}, "--step-timeout is for the steps of --hardware"),
    ],
)
def test_options_that_cannot_be_understood(change: dict[str, Any], says: str) -> None:
    nothing = {"proxy": None, "prefill": (), "decode": (), "kv_transfer_config": None, "port": None, "peers": ()}
    given: dict[str, Any] = {**nothing, "ca_file": None, "data_parallel": 1, **change}
    with pytest.raises(UsageError, match=says):
        options(**given)


@pytest.mark.parametrize("key", ["geheim\nno", "gehäim", "ge\x00heim"])
def test_a_key_that_cannot_be_sent_is_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="VLLM_API_KEY is not an API key") as raised:
        api_key({"VLLM_API_KEY": key})
    assert "heim" not in str(raised.value)
    assert api_key({"VLLM_API_KEY": " geheim\n"}) == "geheim"
    assert api_key({}) is None


OURS = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer", "kv_port": 30101}


DECODES = {"config.connector": Level.OK, "config.metaservers": Level.NOTE, "config.prefill_hosts": Level.OK}


def test_configuration(tmp_path: Path) -> None:
    assert judged(OURS) == DECODES
    assert judged({**OURS, "kv_role": "kv_both"}) == {"config.connector": Level.ERROR}
    assert judged({**OURS, "kv_connector_extra_config": {"leas_s": 1}}) == {"config.connector": Level.ERROR}
    assert judged({**OURS, "kv_connector": "NixlConnector"}) == {"config.connector": Level.ERROR}
    secret = tmp_path / "tickets.secret"
    secret.write_text("0" * 64)
    extra = {"ticket_secret_file": str(secret), "side_channel_key_file": str(tmp_path / "none")}
    for mode, level in ((0o644, Level.ERROR), (0o600, Level.OK)):
        secret.chmod(mode)
        assert judged({**OURS, "kv_connector_extra_config": extra}) == {
            **DECODES,
            "config.ticket_secret_file": level,
            "config.side_channel_key_file": Level.ERROR,
        }
    findings, _ = engine_config.judge(None)
    assert [finding.level for finding in findings] == [Level.NOTE]


@pytest.mark.parametrize(
    ("plugins", "right"), [("ascend", "ascend,vllm_ascend_pd"), ("", "vllm_ascend_pd"), ("vllm_ascend_pd", None)]
)
def test_f24_plugins_without_ours_are_an_error(plugins: str, right: str | None) -> None:
    findings = engine_config.judge_plugins({"VLLM_PLUGINS": plugins})
    actions = [] if right is None else [f"set it to {right}, here and where the engine starts"]
    assert [(each.level, each.action) for each in findings] == [(Level.ERROR, action) for action in actions]
    assert engine_config.judge_plugins({}) == []


def test_configuration_below_a_multi_connector() -> None:
    inner = [{"kv_connector": "OtherConnector"}, OURS]
    outer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": inner}}
    assert engine_config.read(json.dumps(outer)).kv_port == 30101
    assert judged(outer) == {**DECODES, "config.order": Level.WARNING}
    first = {**outer, "kv_connector_extra_config": {"connectors": inner[::-1]}}
    assert judged(first) == DECODES
    assert judged({**outer, "kv_connector_extra_config": {}}) == {"config.connector": Level.ERROR}


def test_a_port_may_be_a_string_of_digits() -> None:
    ours = {**OURS, "kv_port": "19000"}
    outer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [ours]}}
    assert [engine_config.read(json.dumps(config)).kv_port for config in (ours, outer)] == [19000, 19000]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kv_port": "x"}', '{"kv_port": 70000}', "\ud800"])
def test_configuration_that_cannot_be_understood(text: str) -> None:
    with pytest.raises(UsageError, match="--kv-transfer-config"):
        engine_config.read(text)


def test_bytes_are_compared() -> None:
    assert compare(b"abcd\0", b"abcd\0") == Checked(0)
    assert compare(b"abXd\1", b"abcd\0") == Checked(2, 2)
    way, task = loopback.over_tcp(), Task(seed=1, nbytes=1 << 20, host="127.0.0.1", writes=2)
    found = loopback.judge(way, task, SendTiming(0.5, 4), Checked(0))
    assert (found.level, found.figures["bytes"], found.figures["bytes_per_second"]) == (Level.OK, 2 << 20, 1 << 22)
    assert loopback.judge(way, task, SendTiming(0.5, 4), Checked(1, 77)).level is Level.ERROR
