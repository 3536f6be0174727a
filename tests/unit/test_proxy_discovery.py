# SPDX-License-Identifier: Apache-2.0
"""DNS names whose addresses change, by a stand-in for DNS; and which URLs engines may have."""

import logging
from typing import cast

import anyio
import pytest
from proxied import registry

from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.polling import Discovery
from vllm_ascend_pd.proxy.settings import ProxySettings, check_engine_url
from vllm_ascend_pd.transport.names import HostNames

P, D, X = "dns+http://p.svc:1", "dns+http://d.svc:2", "http://x"


class Names:
    """A resolver with the addresses in `addresses`. A name without any does not resolve."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}

    async def look_up(self, name: str) -> list[str]:
        if not self.addresses.get(name):
            raise OSError("Name or service not known")
        return self.addresses[name]


def test_engines_follow_names(caplog: pytest.LogCaptureFixture) -> None:
    dns, roles = Names(), {role: registry(role) for role in EngineRole}
    prefill, decode = roles[EngineRole.PREFILL], roles[EngineRole.DECODE]
    dns.addresses = {"p.svc": ["10.0.0.1", "fe80::2%eth0", "fd00::2"]}
    discovery = Discovery(roles, ProxySettings(prefill=[P, X], decode=[D]), cast("HostNames", dns))

    def look() -> None:
        for name in (P, D):
            anyio.run(discovery.look_up, name)

    assert prefill.urls == (X,)
    look()
    assert (prefill.urls, decode.urls) == ((X, "http://10.0.0.1:1", "http://[fd00::2]:1"), ())
    assert list(discovery.problems) == [D]

    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    look()
    assert len(caplog.records) == 1  # it is known

    dns.addresses = {"p.svc": ["fd00::2", "10.0.0.3"], "d.svc": ["10.0.0.4"]}
    look()
    assert (prefill.urls, decode.urls) == ((X, "http://[fd00::2]:1", "http://10.0.0.3:1"), ("http://10.0.0.4:2",))
    assert discovery.problems == {}

    dns.addresses = {}
    look()
    assert (prefill.urls, decode.urls) == ((X, "http://[fd00::2]:1", "http://10.0.0.3:1"), ("http://10.0.0.4:2",))
    assert set(discovery.problems) == {P, D}


@pytest.mark.parametrize(
    "url",
    [
        "dns+https://p:1",
        "dns+http://p",
        "dns+http://p:0",
        "dns+http://p:1/x",
        "http://@p",
        "http://a b",
        "http://a..b",
        "http://" + "a" * 64,
        "http://" + "a." * 127,
        "http://é",
        "http://%41",
        "http://[fe80::1%25lo]:1",
        "http://[::g]:1",
        "http://a:65536",
    ],
)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ValueError, match="decode engine"):
        check_engine_url("decode", url)


@pytest.mark.parametrize("url", ["http://p_1.svc.cluster.local.:80/", "https://10.0.0.1", "http://[::1]:8100"])
def test_urls(url: str) -> None:
    assert check_engine_url("decode", url) == url.rstrip("/")
