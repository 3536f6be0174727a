# SPDX-License-Identifier: Apache-2.0
"""Whom an engine talks to, by its configuration and its host: with a secret, with a trusted network, or alone."""

from pathlib import Path

import pytest

from vllm_ascend_pd.core.config import ConfigError, ConnectorConfig
from vllm_ascend_pd.transport.own_networks import own_networks
from vllm_ascend_pd.transport.peers import Peers, read_peers
from vllm_ascend_pd.transport.secret_files import new_secret, write_new

LOOPBACK, OWN, OTHER = "127.0.0.1", "203.0.113.5", "10.0.0.7"


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    write_new(tmp_path / "secret", new_secret())
    return str(tmp_path / "secret")


@pytest.mark.parametrize("host", [OWN, OTHER, "fd00::1", "node-3", "0.0.0.0"])
@pytest.mark.parametrize("named", [(), (OTHER,)])
def test_an_engine_that_others_can_reach_needs_a_secret_or_a_trusted_network(
    host: str, named: tuple[str, ...], secret_file: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_peers(ConnectorConfig(peers=named), host)
    for words in (host, "run `vllm-ascend-pd secret` once", "to the same path on every host", "trust_network"):
        assert words in str(refused.value)
    assert read_peers(ConnectorConfig(peers=named, trust_network=True), host).secret is None
    assert read_peers(ConnectorConfig(peers=named, secret_file=secret_file), host).secret is not None


def test_an_engine_finds_the_secret_at_the_default_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "vllm-ascend-pd").mkdir()
    write_new(tmp_path / "vllm-ascend-pd" / "secret", new_secret())
    assert read_peers(ConnectorConfig(), OWN).secret is not None


def test_a_secret_that_cannot_be_read_is_an_error_on_loopback_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing cannot be read"):
        read_peers(ConnectorConfig(secret_file=str(tmp_path / "missing"), trust_network=True), LOOPBACK)


def admits(peers: Peers) -> tuple[list[str], list[str]]:
    """Which hosts are engines with a secret found at, and which are connected to because a client names them?"""
    candidates = (LOOPBACK, OWN, OTHER, "8.8.8.8")
    return (
        [host for host in candidates if peers.hosts.refusal(host) is None],
        [host for host in candidates if peers.named.refusal(host) is None],
    )


@pytest.mark.parametrize("host", [LOOPBACK, "localhost", "::1"])
def test_on_loopback_without_a_secret_only_this_host_is_admitted(host: str) -> None:
    assert admits(read_peers(ConnectorConfig(), host)) == ([LOOPBACK], [LOOPBACK])
    assert admits(read_peers(ConnectorConfig(peers=(OTHER, "http://p")), host)) == ([OTHER], [OTHER])
    assert admits(Peers()) == ([LOOPBACK], [LOOPBACK])


def test_a_trusted_network_is_private_or_this_hosts_own() -> None:
    everywhere = [LOOPBACK, OWN, OTHER]
    assert admits(read_peers(ConnectorConfig(trust_network=True), OWN)) == (everywhere, everywhere)
    for network in own_networks():
        assert read_peers(ConnectorConfig(trust_network=True), OWN).hosts.refusal(network.split("/")[0]) is None
    assert admits(read_peers(ConnectorConfig(trust_network=True, peers=(OTHER,)), OWN)) == ([OTHER], [OTHER])


def test_with_a_secret_engines_may_be_anywhere_but_clients_may_name_only_peers(secret_file: str) -> None:
    for trust_network in (False, True):
        config = ConnectorConfig(secret_file=secret_file, trust_network=trust_network)
        assert admits(read_peers(config, OWN)) == ([LOOPBACK, OWN, OTHER, "8.8.8.8"], [])
        config = ConnectorConfig(secret_file=secret_file, trust_network=trust_network, peers=(OTHER, "https://p"))
        assert admits(read_peers(config, OWN)) == ([OTHER], [OTHER])
