# SPDX-License-Identifier: Apache-2.0
"""What the doctor makes of an engine's configuration and of its own options."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd.tools.command_line import USAGE_ERROR
from vllm_ascend_pd.tools.doctor import configuration
from vllm_ascend_pd.tools.doctor.cli import doctor
from vllm_ascend_pd.tools.doctor.pair import api_key
from vllm_ascend_pd.tools.doctor.report import Finding, Level

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


def judged(config: dict[str, Any], host: str = "127.0.0.1") -> dict[str, Level]:
    findings, _ = configuration.judge(configuration.read(json.dumps(config)), host)
    return {finding.check: finding.level for finding in findings}


@pytest.fixture(autouse=True)
def default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where a secret is found without a setting."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "vllm-ascend-pd").mkdir()
    return tmp_path / "vllm-ascend-pd" / "secret"


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
REFUSED = {"config.connector": Level.ERROR}
DECODES = {"config.connector": Level.OK, "config.secret": Level.OK}


def below(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}


@pytest.mark.parametrize(
    ("config", "levels"),
    [
        (OURS, DECODES),
        ({**OURS, "kv_role": "kv_both"}, REFUSED),
        ({**OURS, "kv_connector_extra_config": {"leas_s": 1}}, REFUSED),
        ({**OURS, "kv_connector_extra_config": {"peers": ["ftp://p"]}}, REFUSED),
        ({**OURS, "kv_connector_extra_config": {"peers": ["a b"]}}, REFUSED),
        ({**OURS, "kv_connector_extra_config": {"ticket_secret_file": "/k"}}, REFUSED),
        ({**OURS, "kv_connector": "NixlConnector"}, REFUSED),
        (below(*POOL_FIRST), {**DECODES, "config.order": Level.WARNING}),
        (below(*POOL_FIRST[::-1]), DECODES),
        (below(), REFUSED),
    ],
)
def test_configuration(config: dict[str, Any], levels: dict[str, Level]) -> None:
    assert judged(config) == levels


OLD, NEW = "o" * 64, "n" * 64


def secret_finding(extra: dict[str, Any], host: str = "192.0.2.1") -> Finding:
    config = configuration.read(json.dumps({**OURS, "kv_connector_extra_config": extra}))
    findings, _ = configuration.judge(config, host)
    [found] = [finding for finding in findings if finding.check == "config.secret"]
    return found


def write(path: Path, *lines: str, mode: int = 0o600) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(mode)
    return str(path)


def test_two_hosts_with_one_secret_show_one_fingerprint(default_path: Path, tmp_path: Path) -> None:
    write(default_path, OLD)
    here = secret_finding({})
    assert here.level is Level.OK
    there = secret_finding({"secret_file": write(tmp_path / "there", OLD)})
    assert there.figures == here.figures
    assert str(here.figures["fingerprint"]) in here.found
    assert secret_finding({"secret_file": write(tmp_path / "other", NEW)}).figures != here.figures
    assert OLD not in here.found


def test_of_two_secrets_it_says_which_is_in_use(tmp_path: Path) -> None:
    files = [write(tmp_path / name, *lines) for name, lines in (("a", [OLD, NEW]), ("b", [NEW, OLD]))]
    old, new = (secret_finding({"secret_file": file}).figures["fingerprint"] for file in files)
    assert secret_finding({"secret_file": files[0]}).found == f"{files[0]}: fingerprint {old} in use, {new} accepted"


@pytest.mark.parametrize(
    ("lines", "mode", "reason"),
    [
        ((OLD,), 0o640, "has mode 0640"),
        (("short",), 0o600, "too short"),
        ((OLD, OLD), 0o600, "the same"),
        ((), 0o600, "is empty"),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_a_secret_that_engines_refuse(
    lines: tuple[str, ...], mode: int, reason: str, host: str, default_path: Path
) -> None:
    """Also on loopback: a file that is there is used."""
    write(default_path, *lines, mode=mode)
    found = secret_finding({}, host)
    assert (found.level, reason in found.found) == (Level.ERROR, True)
    assert "vllm-ascend-pd secret" in found.action


def test_a_secret_of_another_user(default_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(default_path, OLD)
    if os.geteuid() == 0:
        os.chown(default_path, 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    found = secret_finding({})
    assert (found.level, "belongs to user" in found.found) == (Level.ERROR, True)


@pytest.mark.parametrize(
    ("extra", "host", "level"),
    [
        ({}, "192.0.2.1", Level.ERROR),
        ({}, "localhost", Level.OK),
        ({}, "", Level.NOTE),
        ({"trust_network": True}, "192.0.2.1", Level.WARNING),
        ({"secret_file": "/nowhere/secret"}, "127.0.0.1", Level.ERROR),
    ],
)
def test_without_a_secret(extra: dict[str, Any], host: str, level: Level) -> None:
    found = secret_finding(extra, host)
    assert found.level is level
    assert ("vllm-ascend-pd secret" in found.action) is (level in (Level.ERROR, Level.WARNING))


def test_without_a_configuration_the_secret_is_looked_at(default_path: Path) -> None:
    """As on the proxy's host."""
    for level in (Level.NOTE, Level.OK):
        findings, _ = configuration.judge(None, "192.0.2.1")
        assert [(each.check, each.level) for each in findings][1:] == [("config.secret", level)]
        write(default_path, OLD)


@pytest.mark.parametrize(("mode", "level"), [(0o644, Level.ERROR), (0o600, Level.OK)])
def test_the_metaservers_token(mode: int, level: Level, tmp_path: Path) -> None:
    extra = {"metaserver_token_file": write(tmp_path / "token", OLD, mode=mode)}
    findings = judged({**OURS, "kv_connector_extra_config": extra})
    assert findings == {**DECODES, "config.metaserver_token_file": level}


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
