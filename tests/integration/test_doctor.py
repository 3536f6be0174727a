# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd doctor` as people run it: on this machine, and against a proxy with stand-ins for engines."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
from click.testing import Result
from engine_standin import DecodeEngine, PrefillEngine, Servers
from proxy_cluster import running_cluster
from typer.testing import CliRunner

from harness.certificates import Authority
from harness.documented import documented
from harness.waiting import wait_for, wait_until
from vllm_ascend_pd import cli
from vllm_ascend_pd.proxy.server import ProxyApp
from vllm_ascend_pd.proxy.settings import ProxySettings
from vllm_ascend_pd.tools.doctor import loopback
from vllm_ascend_pd.tools.doctor.loopback import Receiver
from vllm_ascend_pd.tools.doctor.report import DoctorReport, Level
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine

pytest.importorskip("mooncake.engine")

NPU_SMI = """\
#!/bin/sh
cat <<'TABLE'
| npu-smi 25.2.0                   Version: 25.2.0                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 5     910B4               | OK            | 91.3        33                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3197 / 65536         |
TABLE
"""
HCCN_TOOL = """\
#!/bin/sh
case "$*" in
  "-i 5 -link -g") echo "link status: UP" ;;
  "-i 5 -ip -g") echo "ipaddr:192.0.2.10" ;;
esac
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "vllm_ascend_pd.cli", "doctor", *arguments]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=280, env={**os.environ, **environment}
    )


def examined(*arguments: str, **environment: str) -> Result:
    """The same without a process of its own."""
    return CliRunner().invoke(cli.app, ["doctor", *arguments], env=environment, catch_exceptions=False)


def levels(report: DoctorReport) -> dict[str, Level]:
    return {finding.check: finding.level for finding in report.findings}


def test_a_machine(tmp_path: Path) -> None:
    """All checks at once, with one that fails: a port that is taken. NPUs come from programs that stand in for the
    driver's."""
    for name, script in (("npu-smi", NPU_SMI), ("hccn_tool", HCCN_TOOL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            api_port = free.getsockname()[1]
        words = documented(
            "docs/doctor.md", "vllm-ascend-pd doctor --port", {"8200": str(api_port), "19000": str(port)}
        )
        [*_, hardware] = documented("docs/doctor.md", "vllm-ascend-pd doctor --hardware")
        assert documented("docs/quick-start.md", "vllm-ascend-pd doctor") == words[:2], "with no option it checks less"
        done = run(
            *words[2:],
            "--json",
            hardware,
            PATH=f"{tmp_path}:{os.environ['PATH']}",
            VLLM_HOST_IP="127.0.0.1",
        )
    report = msgspec.json.decode(done.stdout, type=DoctorReport)
    assert (report.target, report.ok, done.returncode) == ("machine", False, 1)
    found = levels(report)
    assert found[f"ports.{port}"] is Level.ERROR
    assert found["loading.host"] is Level.WARNING
    for check in ("loading.ops", "loading.mooncake", "loading.connector", "config.connector", "npu.devices"):
        assert found[check] is Level.OK, report
    assert found["hccn.link.5"] is Level.OK
    [transfer] = [finding for finding in report.findings if finding.check == "transfer.loopback"]
    assert transfer.level is Level.OK, transfer
    assert transfer.figures["bytes"] == 64 << 20
    assert transfer.figures["bytes_per_second"] > 0
    assert "every byte right" in transfer.found
    assert found["hardware.devices"] is Level.ERROR, "npu-smi lists one, and no torch_npu is installed"
    errors = {check for check, level in found.items() if level is Level.ERROR}
    assert errors == {f"ports.{port}", "hardware.devices"}, "none of them is this environment's"
    assert report.counts[Level.ERROR] == len(errors)
    assert "loading torch, Mooncake, vLLM and the compiled ops ..." in done.stderr
    assert "Traceback" not in done.stderr


def write_other_bytes(way: loopback.Way, receiver: Receiver) -> int:
    """Returns the number of descriptors. Runs in a process of its own, since Mooncake's settings stay in a process."""
    engine = TransferEngine(way.host, "tcp", TransferLimits.over("tcp"))
    memory = loopback.HostMemory(way.num_bytes)
    memory.fill(random.Random(2).randbytes(way.num_bytes))
    engine.register([(memory.address, way.num_bytes)])
    _, descriptors = loopback.write(engine, memory.address, receiver, way)
    engine.close()
    return descriptors


def test_bytes_that_are_not_what_was_sent_are_found() -> None:
    """The receiver expects the bytes of another seed, and must report the difference."""
    size = 1 << 20
    way = msgspec.structs.replace(loopback.over_tcp(), num_bytes=size, seed=1)
    spawning = multiprocessing.get_context("spawn")
    pipe, theirs = spawning.Pipe()
    process = spawning.Process(target=loopback.receive, args=(way, theirs, os.getpid()))
    process.start()
    assert pipe.poll(60)
    with ProcessPoolExecutor(1, mp_context=spawning) as writer:
        descriptors = writer.submit(write_other_bytes, way, pipe.recv()).result(60)
    pipe.send("look")
    assert pipe.poll(60)
    wrong, _ = pipe.recv()
    process.join(60)
    assert descriptors == 4
    assert size * 0.99 < wrong <= size  # a byte in 256 is equal by chance, and nothing behind was written
    assert process.exitcode == 0


def test_a_transfer_that_cannot_be_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "soon")
    [finding] = loopback.check(loopback.over_tcp())
    assert finding.level is Level.ERROR
    assert "MC_TCP_PROGRESS_TIMEOUT_SEC='soon' is not a positive number" in finding.found
    assert "MC_*" in finding.action


def test_a_pair() -> None:
    with running_cluster(check_interval=0.5) as cluster:
        proxy = str(cluster.client.base_url).rstrip("/")
        health = cluster.client.get("/health").json()
        [prefill], [decode] = health["prefill"], health["decode"]
        values = {"http://127.0.0.1:8000": proxy, "http://127.0.0.1:8100": prefill, "http://127.0.0.1:8200": decode}
        _, _, *urls = documented("docs/doctor.md", "vllm-ascend-pd doctor --proxy", values)
        elsewhere = {url.replace("127.0.0.1", "192.0.2.1"): value for url, value in values.items()}
        _, _, *same = documented("docs/quick-start.md", "vllm-ascend-pd doctor --proxy", elsewhere)
        assert same == urls
        cluster.prefill.metrics = "vllm:kv_pd_pushed_bytes_total 0.0\n"
        cluster.decode.metrics = "vllm:kv_pd_ticket_to_ready_seconds_count 0.0\n"
        done = run(*urls, VLLM_API_KEY="geheim")
        assert done.returncode == 0, done.stdout
        assert f"{prefill} is a prefill engine" in done.stdout
        assert f"{decode} is a decode engine" in done.stdout
        assert f"{proxy} is `vllm-ascend-pd proxy`" in done.stdout
        asked = [each for each in cluster.prefill.received if each.path == "/v1/models"]
        assert [each.headers.get("authorization") for each in asked] == ["Bearer geheim"]
        assert "geheim" not in done.stdout + done.stderr
        assert f"proxy {proxy} finds all 2 engines healthy" in done.stdout
        assert "0 errors, 0 warnings, 0 notes" in done.stdout
        report = msgspec.json.decode(
            examined("--decode", proxy, "--proxy", prefill, "--prefill", decode, "--json").stdout, type=DoctorReport
        )
        wrong = {check for check, level in levels(report).items() if level is Level.ERROR}
        assert wrong == {"proxy.0.role", "prefill.0.role", "decode.0.role"}
        local = examined("--proxy", proxy, "--prefill", prefill.replace("127.0.0.1", "LOCALHOST"), "--decode", decode)
        assert local.exit_code == 0, local.stdout
        assert "does not use" not in local.stdout
        cluster.decode.healthy = False
        wait_until(lambda: cluster.client.get("/health").status_code != 200, 30)  # the proxy's next check
        report = msgspec.json.decode(examined(*urls, "--json").stdout, type=DoctorReport)
        wrong = {check for check, level in levels(report).items() if level is Level.ERROR}
        assert wrong == {"proxy.0.health", "proxy.0.engines", "decode.0.health"}


def test_a_proxy_behind_tls(ours: Authority, others: Authority) -> None:
    own = ours.issue("proxy-of-the-doctor", "IP:127.0.0.1")
    with Servers() as servers:
        prefill, decode = servers.start(lambda _: PrefillEngine().app), servers.start(lambda _: DecodeEngine().app)
        app = ProxyApp(ProxySettings(prefill=[prefill], decode=[decode])).asgi
        url = servers.start(lambda _: app, certificate=own)
        trusting = examined("--proxy", url, "--prefill", prefill, "--decode", decode, SSL_CERT_FILE=str(ours.cert))
        refusing = [examined("--proxy", url, **ca) for ca in ({}, {"SSL_CERT_FILE": str(others.cert)})]
    assert trusting.exit_code == 0, trusting.stdout
    assert f"proxy {url} finds all 2 engines healthy" in trusting.stdout
    for done in refusing:
        assert done.exit_code == 1
        assert "CERTIFICATE_VERIFY_FAILED" in done.stdout
        assert "SSL_CERT_FILE" in done.stdout
        assert "healthy, in" not in done.stdout


def test_engines_that_do_not_answer_as_engines() -> None:
    with Servers() as servers, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        frozen = PrefillEngine()
        gone = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        prefill, decode = servers.start(lambda _: frozen.app), servers.start(lambda _: DecodeEngine().app)
        frozen.frozen = True
        done = examined("--prefill", prefill, "--prefill", gone, "--decode", decode)
        frozen.frozen = False
    assert done.exit_code == 1
    assert f"prefill {prefill} did not answer within 5 s" in done.stdout
    assert f"prefill {gone} cannot be connected to: Connection refused" in done.stdout
    assert "asking proxy and engines ..." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_option_is_one_clear_line() -> None:
    done = run("--prefill", "node-2:8100")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("vllm-ascend-pd: ")
    assert "--prefill: " in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_all_it_started(number: signal.Signals) -> None:
    process = subprocess.Popen(command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        doctor = psutil.Process(process.pid)
        children = wait_for(lambda: doctor.children(recursive=True), bool, 60)
        assert process.stderr is not None
        process.stderr.readline()  # that it loads: the child is on its way
        process.send_signal(number)
        output, log = process.communicate(timeout=20)
        _, left = psutil.wait_procs(children, timeout=20)
        assert left == []
        assert output == ""
        assert "Traceback" not in log
        assert ("interrupted" in log) is (number is signal.SIGINT)
        assert process.returncode == (130 if number is signal.SIGINT else -number)
    finally:
        process.kill()
