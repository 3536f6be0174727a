# SPDX-License-Identifier: Apache-2.0
"""Which transfer engines can write to each other, and how a process finds out what its own engine is."""

import pytest

from vllm_ascend_pd.core.compatibility import cannot_write
from vllm_ascend_pd.core.protocol import (
    Connects,
    EngineKind,
    TransportInfo,
)
from vllm_ascend_pd.transport.ascend import Offers, connects, kind
from vllm_ascend_pd.transport.batches import SettingError, TransferLimits
from vllm_ascend_pd.transport.engine import export_settings
from vllm_ascend_pd.transport.mooncake_library import remedy

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
        ({}, Offers(False, True, "Ascend950PR_9579"), EngineKind.CLIENT_SERVER),
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
