# SPDX-License-Identifier: Apache-2.0
"""Puts Mooncake's settings into the environment, from where it reads them when an engine starts.

What the environment holds already wins, so the limits may become others than those asked for. With protocol "ascend"
nothing of TCP is imported.
"""

from __future__ import annotations

import dataclasses
import os

from vllm_ascend_pd.core.hosts import ip_version
from vllm_ascend_pd.core.transports import TransportInfo
from vllm_ascend_pd.transport import ascend
from vllm_ascend_pd.transport.limits import SettingError, TransferLimits
from vllm_ascend_pd.transport.mooncake_library import FORCE_TCP

# If it is set, to whatever value, Mooncake listens and connects over IPv6; else over IPv4.
_IPV6 = "MC_USE_IPV6"


def export_settings(limits: TransferLimits, protocol: str, host: str) -> TransferLimits:
    """Exports the settings for an engine at `host`, and returns the limits in effect.

    For "ascend", `limits_over_ascend` completes them when the engine has started. Raises SettingError for settings in
    the environment that cannot work.

    Sources: Mooncake's `transfer_engine_py.cpp` (`MC_TRANSFER_TIMEOUT`, in seconds, never below 5) and `config.cpp`
    (`MC_HANDSHAKE_CONNECT_TIMEOUT`, `MC_LOG_LEVEL`).
    """
    if protocol != "tcp" and FORCE_TCP in os.environ:
        raise SettingError(
            f"{FORCE_TCP} is set, which turns {protocol!r} into TCP: unset it, or set transfer_protocol to tcp"
        )
    timeout_s = limits.whole_timeout_s
    settings = {
        "MC_TRANSFER_TIMEOUT": str(max(5, timeout_s + 1)),  # a backstop: other timeouts are shorter
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(timeout_s),
        "MC_LOG_LEVEL": "WARNING",
    }
    version = ip_version(host)
    if version == 6:
        settings[_IPV6] = "1"
    elif version == 4 and _IPV6 in os.environ:
        raise SettingError(
            f"{_IPV6} is set, and this host's address is IPv4, where Mooncake would not be found: unset it, or set "
            "VLLM_HOST_IP to this host's IPv6 address"
        )
    if protocol == "ascend":
        _export(settings | ascend.settings(timeout_s, os.environ) | {"MC_LOG_LEVEL": ascend.LOG_LEVEL})
        return dataclasses.replace(limits, connections=1)
    from vllm_ascend_pd.transport import tcp_settings

    _export(settings | tcp_settings.settings(timeout_s))
    return tcp_settings.limits_in_effect(limits, protocol)


def limits_over_ascend(limits: TransferLimits, transport: TransportInfo) -> TransferLimits:
    """Returns `limits` as the environment and the started engine make them. Raises SettingError."""
    settle_s = ascend.settle_s(limits.whole_timeout_s, os.environ, transport)
    if settle_s > ascend.LONGEST_S:
        raise SettingError(
            f"with these ASCEND_CONNECT_TIMEOUT and ASCEND_TRANSFER_TIMEOUT a batch may take {settle_s:.0f} s, and "
            f"decode waits for {ascend.LONGEST_S:.0f} s: lower them"
        )
    if ascend.pool_size(os.environ) < 1:
        raise SettingError(f"{ascend.POOL_SIZE}={os.environ[ascend.POOL_SIZE]!r}: Mooncake would write nothing")
    return dataclasses.replace(limits, settle_at_least_s=settle_s, failed_may_arrive=False)


def _export(settings: dict[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)
