# SPDX-License-Identifier: Apache-2.0
"""The peers of an engine: the secret that they have, and the hosts where they may be."""

from dataclasses import dataclass, field

from vllm_ascend_pd.core.config import ConfigError, ConnectorConfig
from vllm_ascend_pd.core.hosts import HostList, engine_hosts, is_loopback
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.transport.own_networks import own_networks
from vllm_ascend_pd.transport.secret_files import SecretFileError, cluster_secret


def _on_this_host() -> HostList:
    return engine_hosts((), "localhost", secret=False, trust_network=False)


@dataclass(frozen=True)
class Peers:
    """Who an engine talks to. The default: engines of this host, without a secret."""

    # The cluster's secret. None: peers need none.
    secret: Secret | None = None
    # Hosts of engines that may connect, and that may be connected to if they prove to have the secret.
    hosts: HostList = field(default_factory=_on_this_host)
    # Hosts that may be connected to because a client or a router names them, without any proof.
    named: HostList = field(default_factory=_on_this_host)


def read_peers(config: ConnectorConfig, own_host: str) -> Peers:
    """Reads the secret and the hosts of an engine's peers. Raises ConfigError, also if anybody could be one."""
    try:
        secret = cluster_secret(config.secret_file)
    except SecretFileError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
    if secret is None and not config.trust_network and not is_loopback(own_host):
        raise ConfigError(
            f"other hosts can reach this engine at {own_host}, and it has no secret: run `vllm-ascend-pd secret` once, "
            "and copy the file to the same path on every host of the cluster. Or set trust_network to true: whoever "
            "reaches the engine is trusted then"
        )
    hosts = engine_hosts(
        config.peer_hosts,
        own_host,
        secret=secret is not None,
        trust_network=config.trust_network,
        own_networks=own_networks(),
    )
    return Peers(secret, hosts, hosts if secret is None else HostList(config.peer_hosts, "is not in peers"))
