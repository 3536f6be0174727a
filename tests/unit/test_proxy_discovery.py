# SPDX-License-Identifier: Apache-2.0
"""DNS names whose addresses change, by a stand-in for DNS; and which URLs engines may have."""

import logging

import anyio
import pytest
from proxied import registry

from vllm_ascend_pd.proxy.routing import polling
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.polling import Discovery
from vllm_ascend_pd.proxy.settings import ProxySettings, check_engine_url

P, D, X = "dns+http://p.svc:1", "dns+http://d.svc:2", "http://x"


class Names:
    """A resolver with the addresses in `addresses`. A name without any does not resolve."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}

    async def __call__(self, name: str) -> list[str]:
        if not self.addresses.get(name):
            raise OSError("Name or service not known")
        return self.addresses[name]


def test_engines_follow_names(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    dns, roles = Names(), {role: registry(role) for role in EngineRole}
    prefill, decode = roles[EngineRole.PREFILL], roles[EngineRole.DECODE]

    dns.addresses = {P: ["a", "b"]}
    monkeypatch.setattr(polling, "resolve_url", dns)
    discovery = Discovery(roles, ProxySettings(prefill=[P, X], decode=[D]))
    assert prefill.urls == (X,)
    anyio.run(discovery.look)
    assert (prefill.urls, decode.urls) == ((X, "a", "b"), ())
    assert list(discovery.problems) == [D]

    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    anyio.run(discovery.look)
    assert len(caplog.records) == 1  # it is known

    dns.addresses = {P: ["b", "c"], D: ["d"]}
    anyio.run(discovery.look)
    assert (prefill.urls, decode.urls) == ((X, "b", "c"), ("d",))
    assert discovery.problems == {}

    dns.addresses = {}
    anyio.run(discovery.look)
    assert (prefill.urls, decode.urls) == ((X, "b", "c"), ("d",))
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
