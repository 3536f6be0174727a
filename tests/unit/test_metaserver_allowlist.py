# SPDX-License-Identifier: Apache-2.0
"""Which URLs decode posts tickets to."""

import pytest

from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signed_addresses import sign_metaserver
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist

LOCAL_ONLY: tuple[str, ...] = ()
LISTED = ("https://proxy.example:8443/pd", "http://10.0.0.5:8000", "http://[fd00::1]/")


@pytest.mark.parametrize(
    ("allowlist", "url", "allowed"),
    [
        (LOCAL_ONLY, "http://127.0.0.1:8000/v1/metaserver", True),
        (LOCAL_ONLY, "http://127.8.8.8/v1/metaserver", True),
        (LOCAL_ONLY, "https://localhost:1/v1/metaserver", True),
        (LOCAL_ONLY, "HTTP://LocalHost:1/v1/metaserver", True),
        (LOCAL_ONLY, "http://[::1]:8000/v1/metaserver", True),
        (LOCAL_ONLY, "http://[0:0:0:0:0:0:0:1]:8000/v1/metaserver", True),
        (LOCAL_ONLY, "http://decode-7:8000/v1/metaserver", True),
        (LOCAL_ONLY, "http://DECODE-7:8000/v1/metaserver", True),
        (LOCAL_ONLY, "http://decode-77:8000/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1.evil.com/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1@evil.com/v1/metaserver", False),
        (LOCAL_ONLY, "http://evil.com@127.0.0.1/v1/metaserver", False),
        (LOCAL_ONLY, "http://evil.com#@127.0.0.1/v1/metaserver", False),
        (LOCAL_ONLY, "http://evil.com\\@127.0.0.1/v1/metaserver", False),
        (LOCAL_ONLY, "http://evil.com?127.0.0.1/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/metaserver#x", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/metaserver?x=1", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/metaserver?attempt=12", True),
        (LOCAL_ONLY, "http://evil.com/v1/metaserver?attempt=12", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/other?attempt=12", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/metaserver?attempt=1&x=1", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/metaserver?x=1?attempt=1", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/metaserver?attempt=1\n", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/metaserver?attempt=", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/metaserver/", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/metaserver/x", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/metaserve%72", False),
        (LOCAL_ONLY, "http://127.0.0.1/", False),
        (LOCAL_ONLY, "http://127.0.0.1", False),
        (LOCAL_ONLY, "http://127.0.0.1./v1/metaserver", False),
        (LOCAL_ONLY, "http://localhost./v1/metaserver", False),
        (LOCAL_ONLY, "http://0.0.0.0/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.1/v1/metaserver", False),
        (LOCAL_ONLY, "http://2130706433/v1/metaserver", False),
        (LOCAL_ONLY, "http://169.254.169.254/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1:0/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1:99999999/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1:-1/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1:/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1:+80/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1:8_0/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1:080/v1/metaserver", False),
        (LOCAL_ONLY, "http://[::1]8000/v1/metaserver", False),
        (LOCAL_ONLY, "http://[::1%lo]:8000/v1/metaserver", False),
        (LOCAL_ONLY, "http://xn--0/v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1 /v1/metaserver", False),
        (LOCAL_ONLY, "http://127.0.0.1/v1/metaserver\r\nX: y", False),
        (LOCAL_ONLY, "http://ⓛocalhost/v1/metaserver", False),
        (LOCAL_ONLY, "//127.0.0.1/v1/metaserver", False),
        (LOCAL_ONLY, "ftp://127.0.0.1/v1/metaserver", False),
        (LOCAL_ONLY, "file:///v1/metaserver", False),
        (LOCAL_ONLY, "http:127.0.0.1/v1/metaserver", False),
        (LOCAL_ONLY, "http:///v1/metaserver", False),
        (LOCAL_ONLY, "http://[::1/v1/metaserver", False),
        (LOCAL_ONLY, "", False),
        (LOCAL_ONLY, "http://127.0.0.1/" + "a" * 5000, False),
        (LISTED, "https://proxy.example:8443/pd", True),
        (LISTED, "https://PROXY.example:8443/pd/v1/metaserver", True),
        (LISTED, "https://proxy.example:8443/pd/../admin", False),
        (LISTED, "https://proxy.example:8443/pdx", False),
        (LISTED, "https://proxy.example:8443/", False),
        (LISTED, "http://proxy.example:8443/pd", False),
        (LISTED, "https://proxy.example/pd", False),
        (LISTED, "https://proxy.example.evil:8443/pd", False),
        (LISTED, "http://10.0.0.5:8000/v1/metaserver", True),
        (LISTED, "http://10.0.0.5:8000/admin", False),
        (LISTED, "http://[fd00:0::1]:80/anything", True),
        (LISTED, "http://127.0.0.1:8000/v1/metaserver", False),
    ],
)
def test_allowlist(allowlist: tuple[str, ...], url: str, allowed: bool) -> None:
    reason = Allowlist(allowlist, "Decode-7").refusal(url)
    assert (reason is None) is allowed, reason
    assert len(reason or "") < 300


# With a secret.

OLD, NEW = 32 * b"o", 32 * b"n"
SECRET = Secret([OLD])
ELSEWHERE = "http://192.0.2.1:8000/v1/metaserver"
OWN = "http://127.0.0.1:8000/v1/metaserver"


def test_a_signed_url_is_posted_to_wherever_it_is() -> None:
    for url in (ELSEWHERE, OWN, "https://proxy.example/pd/tickets"):
        for entries in (LOCAL_ONLY, LISTED):
            admitted = Allowlist(entries, "decode-7", SECRET).admit(url, sign_metaserver(SECRET, url))
            assert (str(admitted.url), admitted.is_signed) == (url, True)


@pytest.mark.parametrize("url", [ELSEWHERE, OWN, "http://decode-7/v1/metaserver"])
def test_a_url_without_a_signature_is_not_posted_to(url: str) -> None:
    """Of this host neither: a client names it as well."""
    reason = Allowlist(LOCAL_ONLY, "decode-7", SECRET).refusal(url)
    assert reason is not None
    assert reason.startswith("the proxy has not signed it: give the proxy this engine's secret file (--secret-file)")


@pytest.mark.parametrize(
    "url", [ELSEWHERE + "x", ELSEWHERE.replace("8000", "8001"), OWN, ELSEWHERE.replace("http:", "https:")]
)
def test_a_signature_is_worth_nothing_for_another_url(url: str) -> None:
    signature = sign_metaserver(SECRET, ELSEWHERE)
    assert "its signature is wrong" in (Allowlist(LOCAL_ONLY, "decode-7", SECRET).refusal(url, signature) or "")


def test_a_signed_url_is_read_as_any_other() -> None:
    url = "http://127.0.0.1@192.0.2.1/v1/metaserver"
    assert Allowlist(LOCAL_ONLY, "decode-7", SECRET).refusal(url, sign_metaserver(SECRET, url)) == "contains '@'"


def test_a_listed_url_needs_no_signature() -> None:
    listed = "http://10.0.0.5:8000/v1/metaserver"
    allowlist = Allowlist(LISTED, "decode-7", SECRET)
    for signature in ("", 64 * "0", sign_metaserver(Secret([NEW]), listed)):
        assert not allowlist.admit(listed, signature).is_signed
    assert allowlist.refusal(OWN) is not None


def test_signatures_of_both_secrets_count_while_the_secret_is_changed() -> None:
    for signs in (Secret([OLD]), Secret([OLD, NEW]), Secret([NEW, OLD])):
        for accepts in (Secret([OLD, NEW]), Secret([NEW, OLD])):
            signature = sign_metaserver(signs, ELSEWHERE)
            assert Allowlist(LOCAL_ONLY, "decode-7", accepts).refusal(ELSEWHERE, signature) is None
    assert Allowlist(LOCAL_ONLY, "decode-7", Secret([NEW])).refusal(ELSEWHERE, sign_metaserver(SECRET, ELSEWHERE))


def test_without_a_secret_signatures_mean_nothing() -> None:
    allowlist, signature = Allowlist(LOCAL_ONLY, "decode-7"), sign_metaserver(SECRET, ELSEWHERE)
    assert allowlist.refusal(ELSEWHERE, signature) is not None
    assert not allowlist.admit(OWN, sign_metaserver(SECRET, OWN)).is_signed
