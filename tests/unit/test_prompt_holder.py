# SPDX-License-Identifier: Apache-2.0
"""What a request may name as the prefill engine that holds its prompt: decode connects to nothing else."""

from typing import Any

import pytest

from vllm_ascend_pd.core.hosts import AnyHost, HostList
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signed_addresses import sign_listener
from vllm_ascend_pd.core.ticket_params import wants_ticket
from vllm_ascend_pd.decode.bootstrap import Engine, PromptHolder, endpoint_of, parse_holder
from vllm_ascend_pd.decode.prefill_admission import PrefillAdmission
from vllm_ascend_pd.decode.ticket_client import NoRecipientError
from vllm_ascend_pd.transport.peers import Peers

HOSTS = HostList(["10.0.0.0/8", "prefill-0", "fd00::/8"], "is not in peers")
LISTED = PrefillAdmission(Peers(None, HOSTS, HOSTS))

SECRET = Secret([32 * b"s"])


def with_secret(*named: str, secret: Secret = SECRET) -> PrefillAdmission:
    """A decode engine's, with a secret and these `peers`."""
    hosts = HostList(named, "is not in peers")
    return PrefillAdmission(Peers(secret, hosts if named else AnyHost(), hosts))


def signed(params: dict[str, Any], secret: Secret = SECRET) -> dict[str, Any]:
    """As prefill signs its answer."""
    where = params["remote_engine_id"], params["ticket_host"], params["ticket_port"], params["transfer_id"]
    return params | {"ticket_listener_signature": sign_listener(secret, *where)}


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
    assert parse_holder(ANSWERED, LISTED) == PromptHolder("t-1", "prefill-0-12ab", endpoint="tcp://10.0.0.7:5600")


def test_mooncakes_bootstrap_address() -> None:
    assert wants_ticket(BOOTSTRAP)
    assert parse_holder(BOOTSTRAP, LISTED) == PromptHolder("xfer-1", "prefill-0", bootstrap="http://prefill-0:8998")
    slash = BOOTSTRAP | {"remote_bootstrap_addr": "http://[fd00::1]:8998/"}
    assert parse_holder(slash, LISTED).bootstrap == "http://[fd00::1]:8998"


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
    with pytest.raises(NoRecipientError, match=reason) as refused:
        parse_holder(params | changed, LISTED)
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
    assert endpoint_of(at(address), LISTED) == endpoint


@pytest.mark.parametrize("address", ["", ":", "10.1.2.3", "10.1.2.3:", "10.1.2.3:x", "192.0.2.1:7", "a:²"])
def test_unusable_addresses_of_a_bootstrap_server(address: str) -> None:
    with pytest.raises(NoRecipientError, match="bootstrap server's answer"):
        endpoint_of(at(address), LISTED)


def test_an_engine_without_an_address_in_a_bootstrap_servers_answer() -> None:
    with pytest.raises(NoRecipientError, match="bootstrap server's answer"):
        endpoint_of(Engine("prefill-0", {}), LISTED)


def at(address: str, signature: str = "") -> Engine:
    """An engine in a bootstrap server's answer."""
    return Engine("prefill-0", {"0": {"0": address}}, signature=signature)


def test_only_admitted_ports_are_connected_to() -> None:
    hosts = HostList(["10.0.0.0/8:5600-5601", "prefill-0:8998"], "is not in peers")
    listed = PrefillAdmission(Peers(None, hosts, hosts))
    assert parse_holder(ANSWERED | {"ticket_host": "10.0.0.7", "ticket_port": 5601}, listed).endpoint
    assert parse_holder(BOOTSTRAP | {"remote_bootstrap_addr": "http://prefill-0:8998"}, listed).bootstrap
    for params in (
        ANSWERED | {"ticket_host": "10.0.0.7", "ticket_port": 5602},
        BOOTSTRAP | {"remote_bootstrap_addr": "http://prefill-0:8999"},
    ):
        with pytest.raises(NoRecipientError, match="not this port"):
            parse_holder(params, listed)
    with pytest.raises(NoRecipientError, match="not this port"):
        endpoint_of(at("10.0.0.7:22"), listed)


# With a secret.

STRANGE = signed(ANSWERED | {"ticket_host": "192.0.2.1"})
"""Signed, at an address that no list names."""


def refusal(params: dict[str, Any], admission: PrefillAdmission) -> str:
    with pytest.raises(NoRecipientError) as refused:
        parse_holder(params, admission)
    assert not {"192.0.2.1", "5600", "8998"} & set(str(refused.value).replace(":", " ").split()), "a client may read it"
    return str(refused.value)


def test_a_signed_address_is_connected_to_wherever_it_is() -> None:
    assert parse_holder(STRANGE, with_secret()).endpoint == "tcp://192.0.2.1:5600"


@pytest.mark.parametrize(
    "changed",
    [
        {"ticket_host": "192.0.2.2"},
        {"ticket_host": "127.0.0.1"},
        {"ticket_port": 5601},
        {"remote_engine_id": "prefill-0-12ac"},
        {"transfer_id": "t-2"},
        {"ticket_listener_signature": 64 * "0"},
        {"ticket_listener_signature": STRANGE["ticket_listener_signature"].upper()},
    ],
    ids=str,
)
def test_a_signature_is_worth_nothing_for_another_address(changed: dict[str, Any]) -> None:
    assert "its signature is wrong" in refusal(STRANGE | changed, with_secret())


@pytest.mark.parametrize("signature", [None, "", 7, ["a"], 65 * "0", {"a": 1}])
def test_an_address_without_a_signature_is_not_connected_to(signature: object) -> None:
    """Loopback addresses and those of private networks neither: clients name them as well."""
    for host in ("192.0.2.1", "127.0.0.1", "10.0.0.7", "localhost"):
        said = refusal(ANSWERED | {"ticket_host": host, "ticket_listener_signature": signature}, with_secret())
        assert "no signature of prefill's came with the address" in said
        assert "give prefill the secret" in said


def test_another_clusters_signature() -> None:
    assert "its signature is wrong" in refusal(signed(ANSWERED, Secret([32 * b"o"])), with_secret())


def test_while_the_secret_is_changed_both_are_accepted() -> None:
    old, new = 32 * b"s", 32 * b"n"
    for signs in ([old], [old, new], [new, old]):
        for accepts in ([old, new], [new, old]):
            parse_holder(signed(ANSWERED, Secret(signs)), with_secret(secret=Secret(accepts)))
    assert "its signature is wrong" in refusal(signed(ANSWERED, Secret([old])), with_secret(secret=Secret([new])))


def test_an_address_that_peers_names_needs_no_signature() -> None:
    admission = with_secret("10.0.0.0/8:5600-5699", "prefill-0")
    for params in (ANSWERED, ANSWERED | {"ticket_listener_signature": 64 * "0"}):
        assert parse_holder(params, admission).endpoint == "tcp://10.0.0.7:5600"
    assert "no signature" in refusal(ANSWERED | {"ticket_port": 5700}, admission)


def test_peers_narrows_what_is_signed() -> None:
    """A signed port may be any: the engine chose it."""
    assert "is not in peers" in refusal(STRANGE, with_secret("10.0.0.0/8"))
    elsewhere = with_secret("10.0.0.0/8:8998")
    assert parse_holder(signed(ANSWERED), elsewhere).endpoint == "tcp://10.0.0.7:5600"


def test_a_bootstrap_address_must_be_named() -> None:
    """Routers make it up, and a client may have written it."""
    for url in ("http://prefill-0:8998", "http://127.0.0.1:8998", "http://10.0.0.7:8998", "http://192.0.2.1:8998"):
        params = signed(ANSWERED | {"ticket_host": "h"}) | BOOTSTRAP | {"remote_bootstrap_addr": url}
        params.pop("ticket_host")
        assert "name host and port in decode's peers" in refusal(params, with_secret())
        assert "name host and port in decode's peers" in refusal(params, with_secret("prefill-0:8999", "10.0.0.8"))
    assert parse_holder(BOOTSTRAP, with_secret("prefill-0:8998")).bootstrap == "http://prefill-0:8998"


def test_a_bootstrap_servers_answer_must_be_signed_or_named() -> None:
    admission = with_secret("10.1.2.3:8998")
    signature = sign_listener(SECRET, "prefill-0", "10.1.2.3", 77)
    assert endpoint_of(at("10.1.2.3:77", signature), admission) == "tcp://10.1.2.3:77"
    assert endpoint_of(at("10.1.2.3:8998"), admission) == "tcp://10.1.2.3:8998"
    of_a_prompt = sign_listener(SECRET, "prefill-0", "10.1.2.3", 77, "t-1")
    for address, wrong in (
        ("10.1.2.3:77", ""),
        ("10.1.2.3:78", signature),
        ("10.1.2.4:77", signature),
        ("10.1.2.3:77", of_a_prompt),
    ):
        with pytest.raises(NoRecipientError, match=r"bootstrap server's answer: .*signature"):
            endpoint_of(at(address, wrong), admission)
