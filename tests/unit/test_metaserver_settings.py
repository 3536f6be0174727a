# SPDX-License-Identifier: Apache-2.0
"""Settings that no metaserver client can be made of."""

import threading

import pytest

from vllm_ascend_pd.decode.metaserver_client import MetaserverClient, MetaserverError
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings


@pytest.mark.parametrize(
    "settings",
    [
        MetaserverSettings(allowlist=("proxy:8000",)),
        MetaserverSettings(allowlist=("http://user@proxy",)),
        MetaserverSettings(token_file="/nonexistent/token"),
        MetaserverSettings(ca_file="/nonexistent/ca.pem"),
    ],
)
def test_unusable_settings(settings: MetaserverSettings) -> None:
    before = threading.active_count()
    with pytest.raises(MetaserverError):
        MetaserverClient(settings, own_host="127.0.0.1")
    assert threading.active_count() == before


def test_impossible_settings() -> None:
    with pytest.raises(ValueError, match="deadline_s must be positive"):
        MetaserverSettings(deadline_s=0)
