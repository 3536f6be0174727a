# SPDX-License-Identifier: Apache-2.0
"""Which URLs decode posts tickets to."""

import pytest

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
