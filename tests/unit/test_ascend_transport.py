# SPDX-License-Identifier: Apache-2.0
"""What Mooncake's protocol `ascend` needs: settings, addresses of NPUs, its transport in the build. Which transfer
engines can write to each other."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from vllm_ascend_pd.core.compatibility import cannot_write
from vllm_ascend_pd.core.protocol import Connects, EngineKind, TransportInfo
from vllm_ascend_pd.transport import ascend
from vllm_ascend_pd.transport.ascend import Offers, connects, kind
from vllm_ascend_pd.transport.ascend_writer import Losses, Slots, poll_pause_s
from vllm_ascend_pd.transport.batches import SettingError, TransferLimits
from vllm_ascend_pd.transport.engine import export_settings, limits_over_ascend
from vllm_ascend_pd.transport.mooncake_library import remedy

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
        "ASCEND_GLOBAL_RESOURCE_CONFIG": '{"comm_resource_config.max_active_channels": 16}',
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


CLIENT_SERVER_ONLY = {EngineKind.CLIENT_SERVER}


@pytest.mark.parametrize(("device", "kinds"), [(3, EngineKind), (4, EngineKind), (7, CLIENT_SERVER_ONLY)])
def test_an_entry_that_is_no_address_is_refused(tmp_path: Path, device: int, kinds: Iterable[EngineKind]) -> None:
    """Without any address the comm engine has HCCS."""
    (tmp_path / "hccn.conf").write_text(HCCN_CONF)
    finding = ascend.check_address(tmp_path / "hccn.conf", device, has_tool=True)
    assert finding is not None
    assert finding.fatal_for == set(kinds)
    assert (f"no address_{device}" if device == 7 else f"address_{device}=") in finding.message
    for action in (f"hccn_tool -i {device} -ip -s address", "mount the host's", "ASCEND_LOCAL_COMM_RES"):
        assert action in finding.message


def test_an_ipv6_address_alone_is_none(tmp_path: Path) -> None:
    """HIXL does not read it, and does not ask hccn_tool where there is a file."""
    (tmp_path / "hccn.conf").write_text(HCCN_CONF)
    finding = ascend.check_address(tmp_path / "hccn.conf", 2, has_tool=True)
    assert finding is not None
    assert finding.fatal_for == CLIENT_SERVER_ONLY


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "hccn.conf"
    assert ascend.check_address(path, 0, has_tool=True) is None
    finding = ascend.check_address(path, 0, has_tool=False)
    assert finding is not None
    assert finding.fatal_for == CLIENT_SERVER_ONLY
    assert f"mount the host's {path}" in finding.message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    finding = ascend.check_address(tmp_path, 0, has_tool=True)  # a folder: root may read any file
    assert finding is not None
    assert finding.is_fatal
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


# --- slots of Mooncake's pool: one batch to a peer, and room left for peers that are well ------------------------


def proven(size: int, *sessions: str) -> Slots:
    slots = Slots(size, max(1, size // 2))
    for session in sessions:
        slots.take(session, 0.0)
        slots.give_back(session, proved=True)
    return slots


def taken(slots: Slots, *sessions: str) -> list[bool]:
    return [slots.take(session, 0.0) for session in sessions]


def test_unproven_peers_share_a_part_of_them() -> None:
    slots = proven(4, *"wx")
    assert taken(slots, *"abcwx") == [True, True, False, True, True]
    slots.give_back("a")
    assert taken(slots, "c") == [True]


def test_a_peer_is_proven_by_what_arrives_until_something_fails() -> None:
    slots = proven(4, "a")
    assert taken(slots, *"abcd") == [True, True, True, False]
    slots.give_back("a", proved=True)
    assert slots.is_free("a")
    slots.forget(["a"])  # as when a batch fails
    assert not slots.is_free("a")
    slots.give_back("b")
    assert taken(slots, "a") == [True]
    slots.give_back("a", proved=True)
    assert taken(slots, *"da") == [True, True]


def losses(*failed: tuple[str, float]) -> Losses:
    found = Losses()
    for session, at in failed:
        found.failed(session, at)
    return found


MANY = [(session, 20.0 * n) for n, session in enumerate("abababab")]


def test_links_are_lost_when_no_batch_arrives_anywhere_for_long() -> None:
    assert losses(*MANY).failure is not None


@pytest.mark.parametrize(
    "failed",
    [
        MANY[:-1],
        [("a", at) for _, at in MANY],  # its peer's link
        [(session, at / 2) for session, at in MANY],  # RoCE may still repair it
    ],
    ids=["few", "one peer", "short"],
)
def test_links_may_heal(failed: list[tuple[str, float]]) -> None:
    assert losses(*failed).failure is None


def test_links_have_healed_when_a_batch_arrives() -> None:
    found = losses(*MANY)
    found.arrived()
    assert found.failure is None
    found.failed("a", 1000.0)
    assert found.failure is None


# --- which engines can write to each other -----------------------------------------------------------------------

OLD = "mooncake-transfer-engine-npu 0.3.11.post1"
NEW = "mooncake-transfer-engine-npu 0.3.13.post1"
TCP = "mooncake-transfer-engine-non-cuda 0.3.13.post1"

NOTHING = Offers(client_server=False, is_old=False, chip="Ascend910B1")
ALL = Offers(client_server=True, is_old=False, chip="Ascend910B1")
BEFORE_IT_ASKS = Offers(client_server=False, is_old=True, chip="Ascend910B1")


@pytest.mark.parametrize(
    ("prefill", "decode", "action"),
    [
        (TransportInfo("ascend", NEW, "comm"), TransportInfo("tcp", TCP), "transfer_protocol"),
        (TransportInfo("rdma", TCP), TransportInfo("tcp", TCP), "transfer_protocol"),
        (
            TransportInfo("ascend", NEW, "client/server", "AutoConnect"),
            TransportInfo("ascend", OLD, "comm", "Connect"),
            "same Mooncake and CANN",
        ),
        (
            TransportInfo("ascend", NEW, "client/server", "AutoConnect"),
            TransportInfo("ascend", NEW, "a kind of later", "AutoConnect"),
            "same Mooncake and CANN",
        ),
    ],
)
def test_engines_that_cannot_write_are_both_named(prefill: TransportInfo, decode: TransportInfo, action: str) -> None:
    reason = cannot_write(prefill, decode)
    assert reason is not None
    assert f"prefill transfers by {prefill}" in reason
    assert f"decode by {decode}" in reason
    assert action in reason


@pytest.mark.parametrize(
    ("settings", "offers", "expected"),
    [
        ({}, ALL, EngineKind.CLIENT_SERVER),
        ({}, NOTHING, EngineKind.COMM),
        (ascend.settings(10, {}), ALL, EngineKind.CLIENT_SERVER),
        ({}, BEFORE_IT_ASKS, EngineKind.COMM),
        ({"ASCEND_LOCAL_COMM_RES": '{"version": "1.3"}'}, BEFORE_IT_ASKS, EngineKind.CLIENT_SERVER),
        ({"ASCEND_LOCAL_COMM_RES": '{"version": "1.2"}'}, ALL, EngineKind.COMM),
        ({"ASCEND_LOCAL_COMM_RES": ""}, ALL, EngineKind.COMM),
        ({"ASCEND_LOCAL_COMM_RES": "{"}, ALL, EngineKind.UNKNOWN),
        ({"ASCEND_LOCAL_COMM_RES": "[]"}, ALL, EngineKind.COMM),
        ({"ASCEND_GLOBAL_RESOURCE_CONFIG": '{"fabric_memory": {}}'}, ALL, EngineKind.FABRIC_MEMORY),
        ({"ASCEND_GLOBAL_RESOURCE_CONFIG": '{"fabric_memory.size": 1}'}, ALL, EngineKind.FABRIC_MEMORY),
        ({"ASCEND_GLOBAL_RESOURCE_CONFIG": '{"store": {"fabric_memory": {}}}'}, ALL, EngineKind.CLIENT_SERVER),
        ({"ASCEND_GLOBAL_RESOURCE_CONFIG": '{"fabric_memory": {}}'}, BEFORE_IT_ASKS, EngineKind.UNKNOWN),
        ({"ASCEND_ENABLE_USE_FABRIC_MEM": "1"}, BEFORE_IT_ASKS, EngineKind.UNKNOWN),
        ({"ASCEND_ENABLE_USE_FABRIC_MEM": "1"}, ALL, EngineKind.CLIENT_SERVER),
        ({"ASCEND_GLOBAL_RESOURCE_CONFIG": '{"local_comm_res_path": "/f"}'}, NOTHING, EngineKind.UNKNOWN),
        ({"ASCEND_GLOBAL_RESOURCE_CONFIG": '{"local_comm_res_path": "/f"}'}, ALL, EngineKind.CLIENT_SERVER),
        (
            {"ASCEND_GLOBAL_RESOURCE_CONFIG": '{"comm_resource_config.protocol_desc": ["roce:device"]}'},
            NOTHING,
            EngineKind.CLIENT_SERVER,
        ),
        ({}, Offers(False, True, "Ascend950PR_9579"), EngineKind.UNKNOWN),
    ],
)
def test_which_engine_starts(settings: dict[str, str], offers: Offers, expected: EngineKind) -> None:
    assert kind(settings, offers) == expected


@pytest.mark.parametrize(
    ("setting", "offers", "expected"),
    [
        (None, ALL, Connects.AUTO),
        (None, NOTHING, Connects.AUTO),
        (None, BEFORE_IT_ASKS, Connects.BEFORE),
        ("0", ALL, Connects.BEFORE),
        ("1", BEFORE_IT_ASKS, Connects.AUTO),
        ("yes", ALL, Connects.BEFORE),
        ("", ALL, Connects.BEFORE),
    ],
)
def test_when_it_connects(setting: str | None, offers: Offers, expected: Connects) -> None:
    assert connects({} if setting is None else {"ASCEND_AUTO_CONNECT": setting}, offers) == expected


@pytest.mark.parametrize(
    ("error", "action"),
    [
        ("libascendcl.so: cannot open shared object file: No such file or directory", "set_env.sh"),
        ("libllm_datadist.so: cannot open shared object file: No such file or directory", "set_env.sh"),
        ("libcurl.so.4: cannot open shared object file: No such file or directory", "apt-get install libcurl4"),
        ("libibverbs.so.1: cannot open shared object file: No such file or directory", "libibverbs1"),
        ("libnuma.so.1: cannot open shared object file: No such file or directory", "libnuma1"),
        ("libother.so.1: cannot open shared object file: No such file or directory", "libother.so.1"),
        ("/x/ascend_transport.so: undefined symbol: aclrtMemSetAccess", "docs/versions.md"),
        ("/lib/libc.so.6: version `GLIBC_2.35' not found (required by /x/engine.so)", "glibc 2.35"),
        ("No module named 'mooncake'", "requirements/cpu.txt"),
        ("something else", "requirements/"),
    ],
)
def test_what_to_do_about_a_mooncake_that_cannot_be_loaded(error: str, action: str) -> None:
    assert action in remedy(error)


@pytest.mark.parametrize("protocol", ["ascend", "rdma"])
def test_a_protocol_that_the_environment_turns_into_tcp_is_refused(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_FORCE_TCP", "")  # Mooncake asks whether it is there, and not for its value
    with pytest.raises(SettingError, match=f"MC_FORCE_TCP is set, which turns '{protocol}' into TCP"):
        export_settings(TransferLimits(), protocol, "127.0.0.1")
