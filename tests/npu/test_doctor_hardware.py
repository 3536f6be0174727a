# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd doctor --hardware` as its reader runs it, on two emulated NPUs with Mooncake's wheel for NPUs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

import cann_on_host
from harness.pool import long
from harness.ports import reserve_ports
from harness.waiting import wait_until
from vllm_ascend_pd.core.ascend import communicator_bytes
from vllm_ascend_pd.tools.doctor import hardware, loopback, peer
from vllm_ascend_pd.tools.doctor.report import Finding, Level, note
from vllm_ascend_pd.tools.programs import child
from vllm_ascend_pd.transport.ascend import GLOBAL_RESOURCES, MAX_CHANNELS
from vllm_ascend_pd.transport.secret_files import cluster_secret, new_secret, write_new

pytestmark = [pytest.mark.npu, pytest.mark.emulated, pytest.mark.timeout(600)]

PACKAGE = Path(hardware.__file__).parents[2]
NPU_SMI = """\
#!/bin/sh
cat <<'TABLE'
| npu-smi 25.5.0                   Version: 25.5.0                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     910B1               | OK            | 91.3        33                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3197 / 65536         |
| 1     910B1               | OK            | 91.3        33                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3197 / 65536         |
TABLE
"""
HCCN_TOOL = """\
#!/bin/sh
case "$*" in
  *"-link -g") echo "link status: UP" ;;
  *"-ip -g") echo "ipaddr:192.0.2.1$2" ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with two NPUs, the driver's tools and CANN."""
    tools, cann = tmp_path / "tools", tmp_path / "cann"
    tools.mkdir()
    for name, script in (("npu-smi", NPU_SMI), ("hccn_tool", HCCN_TOOL)):
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    for folder in ("opp", "runtime", "compiler", "x86_64-linux"):  # which torch_npu looks for
        (cann / folder).mkdir(parents=True)
    (cann / "x86_64-linux" / "ascend_toolkit_install.info").write_text("version=9.1.0\n")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(cann))
    monkeypatch.setenv("ASCEND_OPP_PATH", str(cann / "opp"))
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setenv("CANN_ON_HOST_DEVICES", "2")


def of(findings: list[Finding], area: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings if finding.check.startswith(area)}


@pytest.mark.long  # test_first_hours.py runs all steps, too
@pytest.mark.usefixtures("machine")
def test_all_steps_with_small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    npus, size, num_bytes = ["0", "1"], loopback.DESCRIPTOR_BYTES[0], 1 << 20
    ways = [
        msgspec.structs.replace(way, num_bytes=num_bytes, descriptor_bytes=(size,))
        for way in hardware.ways(npus, "127.0.0.1")
    ]
    monkeypatch.setattr(hardware, "ways", lambda *_: ways)
    findings = hardware.check(npus, "127.0.0.1")
    found = of(findings, "hardware.")
    ops = ("gather_units", "split_heads", "interleave_heads", "sum_units", "sum_units_32")
    assert list(found) == [
        "hardware.kernels",
        *(f"hardware.speed.{op}" for op in ops),
        "hardware.multiply",
        "hardware.write.ascend.0-1",
        "hardware.write.roce.1-0",
        "hardware.large_region",
        "hardware.collectives",
    ]
    assert found["hardware.kernels"].figures == {"compiled": False}
    assert "in 15 cases" in found["hardware.kernels"].found
    for op in ops:
        assert {"bytes", "seconds", "copy_seconds"} <= found[f"hardware.speed.{op}"].figures.keys()
    assert found["hardware.multiply"].figures == {"mul_keeps_low_bits": True, "muls_keeps_low_bits": True}
    assert "region of 51202 MiB" in found["hardware.large_region"].found
    assert not [finding for finding in found.values() if finding.level is not Level.OK]
    for check in ("hardware.write.ascend.0-1", "hardware.write.roce.1-0"):
        assert found[check].figures["bytes"] == num_bytes
        assert found[check].figures["bytes_per_second"] > 0
        assert "every byte right" in found[check].found
        assert found[check].figures["first_connection_streams"] == 2 * MAX_CHANNELS
    collective = found["hardware.collectives"].figures
    assert collective["mode"] == ""
    assert communicator_bytes(1) <= int(collective["group_bytes"]) < 2 * communicator_bytes(1)
    assert collective["all_to_all_bytes_per_second"] > 0
    costs = of(findings, "descriptors.")
    assert [*costs] == [f"descriptors.{way}.{size}" for way in ("ascend.0-1", "roce.1-0")]
    for check, cost in costs.items():
        figures = cost.figures
        assert figures["protocol"] == "ascend"
        assert check.endswith(f".{figures['bytes']}")
        assert int(figures["bytes"]) / float(figures["seconds"]) == pytest.approx(figures["bytes_per_second"], rel=0.01)


def children(word: str) -> list[psutil.Process]:
    """Returns the children of this process that have `word` in their command line."""
    return [each for each in psutil.Process().children(recursive=True) if word in " ".join(each.cmdline())]


@pytest.mark.usefixtures("machine")
def test_collectives_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end within less than the 20 s after which a rank gives up by itself."""
    monkeypatch.setenv("CANN_ON_HOST_FAULTS", "hccl:hang@20")
    finding = hardware.check_collectives(2, 19.0)
    assert finding.level is Level.ERROR
    assert "did not end within 19 s" in finding.found
    assert "rank 0 at " in finding.found
    assert not children("on_npu")


def receivers() -> list[psutil.Process]:
    """The receiving processes of the doctor. Other tests have processes of multiprocessing, too."""
    return [
        each for of in children("doctor.loopback") for each in of.children() if "spawn_main" in " ".join(each.cmdline())
    ]


@contextmanager
def faulty_link(fault: str) -> Iterator[None]:
    """The process that receives has a link that fails as `fault` says."""
    over = threading.Event()

    def spoil() -> None:
        wait_until(lambda: receivers() or over.is_set(), 60)
        for receiver in receivers():
            with cann_on_host.link_fault(receiver.pid, fault):
                over.wait()

    thread = threading.Thread(target=spoil)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("fault", "roce", "timeout_s", "level", "reason"),
    [
        long("refuse", False, 60.0, Level.ERROR, "the process ended with code 1"),
        ("hang", True, 11.0, Level.WARNING, "did not end within 11 s"),
    ],
)
def test_a_link_that_fails_is_a_finding(
    fault: str,
    roce: bool,
    timeout_s: float,
    level: Level,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CANN_ON_HOST_LINKS", str(tmp_path))
    way = msgspec.structs.replace(hardware.ways(["4", "5"], "127.0.0.1")[roce], num_bytes=1 << 20)
    with faulty_link(fault):
        [finding] = loopback.check(way, timeout_s)
    assert (finding.check, finding.level, finding.action) == (way.check, level, way.action)
    assert reason in finding.found
    assert not children("doctor.loopback")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("ours", [True, long(False)], ids=["our default", "HIXL's"])
def test_a_device_with_few_streams_left_connects_by_default_only(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """HIXL takes 256 by itself. Piecewise graphs leave fewer."""
    monkeypatch.setenv("CANN_ON_HOST_STREAMS", "200")
    if not ours:
        monkeypatch.setenv(GLOBAL_RESOURCES, "{}")
    way = msgspec.structs.replace(hardware.ways(["0", "1"], "127.0.0.1")[0], num_bytes=1 << 20, descriptor_bytes=())
    [found] = loopback.check(way, 60.0)
    assert found.level is (Level.OK if ours else Level.ERROR), found
    assert ours or "HCCL_INTRA_ROCE_ENABLE=1 and HCCL_INTRA_PCIE_ENABLE=0" in found.action


@pytest.mark.long  # as above
@pytest.mark.usefixtures("machine")
def test_two_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with addresses and NPUs of their own. Each has what it measures, in its own direction."""
    secret = tmp_path / "secret"
    write_new(secret, new_secret())
    addresses, sizes, port = ("127.0.0.2", "127.0.0.3"), (16 << 10, 1 << 20), reserve_ports(2)[0]
    monkeypatch.setattr(peer, "child", on_own_npu(addresses))
    results: dict[str, list[Finding]] = {}

    def run_one(own: str, other: str) -> None:
        between = peer.Between(own, other, str(secret), port, sizes)
        results[own] = peer.check(between, cluster_secret(secret))

    threads = [threading.Thread(target=run_one, args=pair) for pair in (addresses, addresses[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in addresses:
        checks = ["peer.side_channel", "peer.write", *(f"peer.write.{size}" for size in sizes), "peer.group"]
        assert [(found.check, found.level) for found in results[own]] == [(check, Level.OK) for check in checks]
    assert {found.figures["first_connection_streams"] for [_, found, *_] in results.values()} == {2 * MAX_CHANNELS}


def on_own_npu(addresses: tuple[str, str]) -> Callable[..., list[str]]:
    """Returns `child`, whose process sees the NPUs from its server's first one on."""

    def command(module: str, between: str) -> list[str]:
        own = msgspec.json.decode(between, type=peer.Between).own
        return ["env", f"CANN_ON_HOST_FIRST_DEVICE={2 * addresses.index(own)}", *child(module, between)]

    return command


@pytest.mark.usefixtures("machine")
def test_one_npu_leaves_out_what_needs_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANN_ON_HOST_DEVICES", "1")
    monkeypatch.setattr(
        hardware, "check_kernels", lambda: [note("hardware.kernels", "the test of all steps runs them")]
    )
    left_out, done = hardware.check(["0"], "127.0.0.1")
    assert (left_out.check, left_out.level) == ("hardware.devices", Level.NOTE)
    assert "left out" in left_out.found
    assert done.check == "hardware.kernels"
