# SPDX-License-Identifier: Apache-2.0
"""What the doctor makes of an engine's configuration and of its own options."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd.tools.command_line import USAGE_ERROR
from vllm_ascend_pd.tools.doctor import configuration
from vllm_ascend_pd.tools.doctor.cli import doctor
from vllm_ascend_pd.tools.doctor.pair import api_key
from vllm_ascend_pd.tools.doctor.report import Level

FOR_TCP = {"no_ascend": "it has no Ascend transport"}
FOR_ASCEND = {"no_tcp": "it has no TCP", "no_rdma": "it has no rdma"}
FOR_BOTH = {"no_rdma": "it has no rdma"}


@pytest.mark.parametrize(
    ("protocol", "on_npu", "mooncake", "level"),
    [
        ("tcp", False, FOR_TCP, Level.OK),
        ("ascend", True, FOR_BOTH, Level.OK),
        ("ascend", True, FOR_TCP, Level.ERROR),
        ("ascend", True, {}, Level.OK),
        ("tcp", True, FOR_BOTH, Level.WARNING),
        ("tcp", True, FOR_ASCEND, Level.ERROR),
        ("rdma", True, FOR_BOTH, Level.ERROR),
        ("ascend", False, FOR_ASCEND, Level.ERROR),
        ("rdma", False, FOR_TCP, Level.OK),
        ("udp", False, FOR_TCP, Level.ERROR),
    ],
)
def test_protocol(protocol: str, on_npu: bool, mooncake: dict[str, str], level: Level) -> None:
    finding = configuration.judge_protocol(protocol, on_npu, mooncake)
    assert (finding.level, finding.figures["protocol"]) == (level, protocol)


def judged(config: dict[str, Any]) -> dict[str, Level]:
    findings, _ = configuration.judge(configuration.read(json.dumps(config)))
    return {finding.check: finding.level for finding in findings}


PREFILL = json.dumps({"kv_connector": "LayerwisePushConnector", "kv_role": "kv_producer"})
DECODE = json.dumps({"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer", "kv_port": 65530})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefill": ["p:1"]}, "--prefill: .*; it must be a URL such as http://"),
        ({"proxy": ""}, "--proxy: .*; it must be a URL"),
        ({"prefill": ["http://p:1"], "port": 80}, "give one kind"),
        ({"proxy": "http://p:1", "hardware": True}, "give one kind"),
        ({"kv_transfer_config": "{"}, "--kv-transfer-config"),
        ({"kv_transfer_config": DECODE, "data_parallel_size": 7}, "7: kv_port 65530 leaves ports for 6 engines"),
        ({"data_parallel_size": 2}, "--data-parallel-size is for a decode engine"),
        ({"kv_transfer_config": PREFILL, "data_parallel_size": 2}, "--data-parallel-size is for a decode engine"),
    ],
)
def test_options_that_cannot_be_understood(options: dict[str, Any], says: str) -> None:
    with pytest.raises(USAGE_ERROR, match=says):
        doctor(**options)


@pytest.mark.parametrize("key", ["geheim\nno", "gehäim", "ge\x00heim"])
def test_a_key_that_cannot_be_sent_is_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="VLLM_API_KEY is not an API key") as raised:
        api_key({"VLLM_API_KEY": key})
    assert "heim" not in str(raised.value)
    assert api_key({"VLLM_API_KEY": " geheim\n"}) == "geheim"
    assert api_key({}) is None


OURS = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer", "kv_port": 30101}
POOL_FIRST = [{"kv_connector": "OtherConnector"}, OURS]
DECODES = {"config.connector": Level.OK}


def below(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}


@pytest.mark.parametrize(
    ("config", "levels"),
    [
        (OURS, DECODES),
        ({**OURS, "kv_role": "kv_both"}, {"config.connector": Level.ERROR}),
        ({**OURS, "kv_connector_extra_config": {"leas_s": 1}}, {"config.connector": Level.ERROR}),
        ({**OURS, "kv_connector_extra_config": {"metaserver_allowlist": ["p:1"]}}, {"config.connector": Level.ERROR}),
        ({**OURS, "kv_connector_extra_config": {"prefill_allowlist": ["a b"]}}, {"config.connector": Level.ERROR}),
        ({**OURS, "kv_connector": "NixlConnector"}, {"config.connector": Level.ERROR}),
        (below(*POOL_FIRST), {**DECODES, "config.order": Level.WARNING}),
        (below(*POOL_FIRST[::-1]), DECODES),
        (below(), {"config.connector": Level.ERROR}),
    ],
)
def test_configuration(config: dict[str, Any], levels: dict[str, Level]) -> None:
    assert judged(config) == levels


@pytest.mark.parametrize(("mode", "level"), [(0o644, Level.ERROR), (0o600, Level.OK)])
def test_secret_files(mode: int, level: Level, tmp_path: Path) -> None:
    secret = tmp_path / "tickets.secret"
    secret.write_text("0" * 64)
    secret.chmod(mode)
    extra = {"ticket_secret_file": str(secret), "side_channel_key_file": str(tmp_path / "none")}
    findings = judged({**OURS, "kv_connector_extra_config": extra})
    secrets = {"config.ticket_secret_file": level, "config.side_channel_key_file": Level.ERROR}
    assert findings == {**DECODES, **secrets}


@pytest.mark.parametrize(
    ("plugins", "right"), [("ascend", "ascend,vllm_ascend_pd"), ("", "vllm_ascend_pd"), ("vllm_ascend_pd", None)]
)
def test_vllm_plugins_without_ours_is_an_error(plugins: str, right: str | None) -> None:
    findings = configuration.judge_plugins({"VLLM_PLUGINS": plugins})
    actions = [] if right is None else [f"set it to {right}, here and where the engine starts"]
    assert [(each.level, each.action) for each in findings] == [(Level.ERROR, action) for action in actions]
    assert configuration.judge_plugins({}) == []


@pytest.mark.parametrize("config", [{**OURS, "kv_port": "19000"}, below({**OURS, "kv_port": "19000"})])
def test_a_port_may_be_a_string_of_digits(config: dict[str, Any]) -> None:
    assert configuration.read(json.dumps(config)).kv_port == 19000


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kv_port": "x"}', '{"kv_port": 70000}', "\ud800"])
def test_configuration_that_cannot_be_understood(text: str) -> None:
    with pytest.raises(ValueError, match="--kv-transfer-config"):
        configuration.read(text)
