# SPDX-License-Identifier: Apache-2.0
"""What a request may name as the prefill engine that holds its prompt: decode connects to nothing else."""

from typing import Any

import pytest

from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.ticket import wants_ticket
from vllm_ascend_pd.decode.bootstrap import RoutedPrompt, RouteError, endpoint_of, parse_routed_prompt

HOSTS = HostList(["10.0.0.0/8", "prefill-0", "fd00::/8"], "is not in peers")

ANSWERED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0-12ab",
    "transfer_id": "t-1",
    "ticket_host": "10.0.0.7",
    "ticket_port": 5600,
}
"""What a router hands on of prefill's answer."""
BOOTSTRAP = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "transfer_id": "xfer-1",
    "remote_bootstrap_addr": "http://prefill-0:8998",
}
"""What a router for Mooncake sends."""


def test_prefills_answer() -> None:
    assert wants_ticket(ANSWERED)
    assert parse_routed_prompt(ANSWERED, HOSTS) == RoutedPrompt("t-1", "prefill-0-12ab", endpoint="tcp://10.0.0.7:5600")


def test_mooncakes_bootstrap_address() -> None:
    assert wants_ticket(BOOTSTRAP)
    assert parse_routed_prompt(BOOTSTRAP, HOSTS) == RoutedPrompt(
        "xfer-1", "prefill-0", bootstrap="http://prefill-0:8998"
    )
    slash = BOOTSTRAP | {"remote_bootstrap_addr": "http://[fd00::1]:8998/"}
    assert parse_routed_prompt(slash, HOSTS).bootstrap == "http://[fd00::1]:8998"


@pytest.mark.parametrize("missing", ["transfer_id", "ticket_host"])
def test_another_connectors_request(missing: str) -> None:
    assert not wants_ticket({name: value for name, value in ANSWERED.items() if name != missing})


@pytest.mark.parametrize(
    ("params", "changed", "reason"),
    [
        (ANSWERED, {"transfer_id": 7}, "transfer_id is not"),
        (ANSWERED, {"transfer_id": ""}, "transfer_id is not"),
        (ANSWERED, {"transfer_id": 129 * "x"}, "transfer_id is not"),
        (ANSWERED, {"transfer_id": "a\nb"}, "transfer_id is not"),
        (ANSWERED, {"remote_engine_id": None}, "remote_engine_id is not"),
        (ANSWERED, {"remote_engine_id": ["a"]}, "remote_engine_id is not"),
        (ANSWERED, {"ticket_host": "192.0.2.1"}, "ticket_host: host is not in peers"),
        (ANSWERED, {"ticket_host": "prefill-1"}, "ticket_host: host is not in peers"),
        (ANSWERED, {"ticket_host": "10.0.0.7:1"}, "ticket_host has no valid host"),
        (ANSWERED, {"ticket_host": "10.0.0.7/../x"}, "ticket_host has no valid host"),
        (ANSWERED, {"ticket_host": 7}, "ticket_host has no valid host"),
        (ANSWERED, {"ticket_port": None}, "ticket_host has no valid port"),
        (ANSWERED, {"ticket_port": 0}, "ticket_host has no valid port"),
        (ANSWERED, {"ticket_port": 65536}, "ticket_host has no valid port"),
        (ANSWERED, {"ticket_port": True}, "ticket_host has no valid port"),
        (ANSWERED, {"ticket_port": "5600"}, "ticket_host has no valid port"),
        (BOOTSTRAP, {"remote_bootstrap_addr": "http://192.0.2.1:8998"}, "host is not in peers"),
        (BOOTSTRAP, {"remote_bootstrap_addr": "https://10.0.0.1:8998"}, "is not http://HOST:PORT"),
        (BOOTSTRAP, {"remote_bootstrap_addr": "http://10.0.0.1:8998/admin"}, "is not http://HOST:PORT"),
        (BOOTSTRAP, {"remote_bootstrap_addr": "http://10.0.0.1:8998/?a=b"}, "is not http://HOST:PORT"),
        (BOOTSTRAP, {"remote_bootstrap_addr": "http://10.0.0.1@192.0.2.1:8998"}, "is not http://HOST:PORT"),
        (BOOTSTRAP, {"remote_bootstrap_addr": "http://10.0.0.1:99999"}, "is not http://HOST:PORT"),
        (BOOTSTRAP, {"remote_bootstrap_addr": "http://"}, "is not http://HOST:PORT"),
        (BOOTSTRAP, {"remote_bootstrap_addr": "10.0.0.1:8998"}, "is not"),
        (BOOTSTRAP, {"remote_bootstrap_addr": 9 * "http://10.0.0.1:8998" * 9}, "is not"),
        (BOOTSTRAP, {"remote_bootstrap_addr": {"a": 1}}, "is not a URL"),
    ],
)
def test_refused(params: dict[str, Any], changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(RouteError, match=reason) as refused:
        parse_routed_prompt(params | changed, HOSTS)
    assert "192.0.2.1" not in str(refused.value), "a client may read it"


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("10.1.2.3:77", "tcp://10.1.2.3:77"),
        ("[fd00::1]:77", "tcp://[fd00::1]:77"),
        ("prefill-0:1", "tcp://prefill-0:1"),
    ],
)
def test_addresses_of_a_bootstrap_server(address: str, endpoint: str) -> None:
    assert endpoint_of(address, HOSTS) == endpoint


@pytest.mark.parametrize("address", [None, 7, "", ":", "10.1.2.3", "10.1.2.3:", "10.1.2.3:x", "192.0.2.1:7", "a:²"])
def test_unusable_addresses_of_a_bootstrap_server(address: object) -> None:
    with pytest.raises(RouteError, match="bootstrap server's answer"):
        endpoint_of(address, HOSTS)


def test_only_admitted_ports_are_connected_to() -> None:
    hosts = HostList(["10.0.0.0/8:5600-5601", "prefill-0:8998"], "is not in peers")
    assert parse_routed_prompt(ANSWERED | {"ticket_host": "10.0.0.7", "ticket_port": 5601}, hosts).endpoint
    assert parse_routed_prompt(BOOTSTRAP | {"remote_bootstrap_addr": "http://prefill-0:8998"}, hosts).bootstrap
    for params in (
        ANSWERED | {"ticket_host": "10.0.0.7", "ticket_port": 5602},
        BOOTSTRAP | {"remote_bootstrap_addr": "http://prefill-0:8999"},
    ):
        with pytest.raises(RouteError, match="not this port"):
            parse_routed_prompt(params, hosts)
    with pytest.raises(RouteError, match="not this port"):
        endpoint_of("10.0.0.7:22", hosts)
