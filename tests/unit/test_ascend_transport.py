# SPDX-License-Identifier: Apache-2.0
"""What Mooncake's protocol `ascend` needs: settings, addresses of NPUs, its transport in the build."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from vllm_ascend_pd.core.protocol import Connects, EngineKind, TransportInfo
from vllm_ascend_pd.transport import ascend
from vllm_ascend_pd.transport.ascend_writer import poll_pause_s
from vllm_ascend_pd.transport.batches import SettingError, TransferLimits
from vllm_ascend_pd.transport.engine import export_settings, limits_over_ascend

HCCN_CONF = """\
address_0=192.0.2.10
netmask_0=255.255.255.0
address_1=192.0.2.11
IPv6address_2=2001:db8::12
address_3=
address_4=192.0.2.14=
address_12=192.0.2.22
"""


QUICK = {"HCCL_RDMA_TIMEOUT": "10", "HCCL_RDMA_RETRY_CNT": "7"}  # 29 ms


def test_a_transfer_may_take_as_long_as_roce_repairs_it() -> None:
    assert ascend.settings(10, {}) == {
        "ASCEND_CONNECT_TIMEOUT": "10000",
        "ASCEND_TRANSFER_TIMEOUT": "34000",
        "MC_TRANSFER_TIMEOUT": "3600",
        "ASCEND_THREAD_POOL_SIZE": "16",
    }
    assert ascend.settings(40, {})["ASCEND_TRANSFER_TIMEOUT"] == "40000"
    assert ascend.settings(10, QUICK)["ASCEND_TRANSFER_TIMEOUT"] == "10000"


@pytest.mark.parametrize(
    ("timeout", "count", "seconds"),
    [
        *((None, None, 34), ("20", "7", 34), ("18", "7", 9), ("20", "1", 5), ("24", "7", 530), ("5", "1", 1)),
        *(("25", "7", 34), ("x", "8", 34), ("", "-1", 34)),  # not settings: the defaults
    ],
)
def test_how_long_roce_repairs(timeout: str | None, count: str | None, seconds: int) -> None:
    given = {"HCCL_RDMA_TIMEOUT": timeout, "HCCL_RDMA_RETRY_CNT": count}
    assert ascend.repair_s({name: value for name, value in given.items() if value is not None}) == seconds


PARALLEL = TransportInfo("ascend", "", EngineKind.CLIENT_SERVER, Connects.AUTO)


ONE_BY_ONE = TransportInfo("ascend", "", EngineKind.COMM, Connects.BEFORE)


def test_a_batch_takes_as_long_as_two_attempts_with_every_step_at_its_limit() -> None:
    chosen = ascend.settings(10, QUICK)
    assert ascend.settle_s(10, chosen, PARALLEL) == 2 * (60 + 7 * 10 + 10 + 1)
    assert ascend.settle_s(10, {**chosen, "ASCEND_TRANSFER_TIMEOUT": "20000"}, PARALLEL) == 2 * (60 + 7 * 20 + 20 + 1)
    assert ascend.settle_s(10, {**chosen, "ASCEND_CONNECT_TIMEOUT": "20000"}, PARALLEL) == 2 * (60 + 7 * 20 + 10 + 1)
    assert ascend.settle_s(10, {**chosen, "ASCEND_CONNECT_TIMEOUT": "x"}, PARALLEL) == 2 * (60 + 7 * 10 + 10 + 1)


def test_a_batch_may_wait_for_the_connections_of_all_others() -> None:
    chosen = {**ascend.settings(10, QUICK), "ASCEND_TRANSFER_TIMEOUT": "20000"}
    assert ascend.settle_s(10, chosen, ONE_BY_ONE) == 2 * (60 + 4 * 7 * 10 + 20 + 1)
    with_auto_connect = msgspec.structs.replace(ONE_BY_ONE, connects=Connects.AUTO)
    assert ascend.settle_s(10, chosen, with_auto_connect) == 2 * (60 + 4 * 7 * 20 + 20 + 1)


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        (ascend.settings(10, {}), 16),
        ({}, 8),
        ({"ASCEND_THREAD_POOL_SIZE": "4"}, 4),
        ({"ASCEND_THREAD_POOL_SIZE": "17"}, 8),
        ({"ASCEND_THREAD_POOL_SIZE": "-1"}, 8),
        ({"ASCEND_THREAD_POOL_SIZE": "many"}, 8),
        ({"ASCEND_BUFFER_POOL": "4:8"}, 1),
        ({"ASCEND_BUFFER_POOL": "0:0", "ASCEND_THREAD_POOL_SIZE": "16"}, 16),
    ],
)
def test_the_threads_of_mooncakes_pool(environment: dict[str, str], size: int) -> None:
    assert ascend.pool_size(environment) == size


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ASCEND_TRANSFER_TIMEOUT", "600000", "decode waits for 3600 s"),
        ("ASCEND_THREAD_POOL_SIZE", "0", "write nothing"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setattr(os, "environ", {name: value})
    exported = export_settings(TransferLimits(), "ascend", "127.0.0.1")
    with pytest.raises(SettingError, match=reason):
        limits_over_ascend(exported, PARALLEL)


@pytest.mark.parametrize("duration_us", [10, 100, 700, 3_000, 10_000, 40_000, 500_000])
def test_a_batchs_end_is_noticed_soon_and_few_looks_are_taken(duration_us: int) -> None:
    """With Linux's default timer slack, by which each pause is longer."""
    slack_us, now_us, looks = 50.0, 0.0, 1
    while now_us < duration_us:
        now_us += poll_pause_s(now_us / 1e6) * 1e6 + slack_us
        looks += 1
    assert now_us - duration_us <= 0.05 * duration_us + slack_us + 1
    assert looks <= 3 + duration_us / slack_us
    assert looks <= 200


def test_nothing_of_a_failed_write_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(QUICK))
    over_ascend = limits_over_ascend(export_settings(TransferLimits(), "ascend", "127.0.0.1"), PARALLEL)
    assert (over_ascend.settle_s, over_ascend.rest_s) == (282, 0)
    over_tcp = export_settings(TransferLimits(), "tcp", "127.0.0.1")
    assert over_tcp.rest_s == over_tcp.settle_s > 0


@pytest.mark.parametrize("device", [3, 4])
def test_an_entry_that_is_no_address_is_refused(device: int) -> None:
    finding = ascend.check_entry(HCCN_CONF, device)
    assert finding is not None
    assert finding.fatal
    assert f"address_{device}=" in finding.message
    assert f"hccn_tool -i {device} -ip -s address" in finding.message


def test_without_an_address_there_is_hccs() -> None:
    finding = ascend.check_entry(HCCN_CONF, 7)
    assert finding is not None
    assert not finding.fatal
    assert "no address_7" in finding.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "hccn.conf"
    assert ascend.check_address(path, 0, has_tool=True) == []
    [finding] = ascend.check_address(path, 0, has_tool=False)
    assert not finding.fatal
    assert f"mount the host's {path}" in finding.message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    [finding] = ascend.check_address(tmp_path, 0, has_tool=True)  # a folder: root may read any file
    assert finding.fatal
    assert str(tmp_path) in finding.message


def test_an_ascend_engine_imports_nothing_of_tcp() -> None:
    """Up to its start: Mooncake's own library is not needed for the writers' modules."""
    program = """
import sys
from vllm_ascend_pd.transport import ascend_writer, batches, engine
engine.export_settings(batches.TransferLimits(), "ascend", "127.0.0.1")
print(sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith("vllm_ascend_pd.transport.")))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "ascend_writer" in ran.stdout
    assert "'tcp'" not in ran.stdout


@pytest.mark.parametrize(
    ("engine", "connects", "expected"),
    [
        ("client/server", "AutoConnect", False),
        ("client/server", "Connect", True),
        ("comm", "AutoConnect", True),
        ("comm", "Connect", True),
        ("", "", True),
    ],
)
def test_which_engines_connect_to_peers_one_by_one(engine: str, connects: str, expected: bool) -> None:
    assert ascend.connects_one_by_one(TransportInfo("ascend", "", engine, connects)) == expected


def test_where_connecting_holds_up_all_writes_few_are_under_way() -> None:
    assert ascend.slots(ascend.settings(10, {}), one_by_one=False) == (16, 8)
    assert ascend.slots(ascend.settings(10, {}), one_by_one=True) == (4, 1)
    assert ascend.slots({"ASCEND_THREAD_POOL_SIZE": "1"}, one_by_one=False) == (1, 1)
    assert ascend.slots({"ASCEND_THREAD_POOL_SIZE": "2"}, one_by_one=True) == (2, 1)
