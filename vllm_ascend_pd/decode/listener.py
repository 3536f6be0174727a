# SPDX-License-Identifier: Apache-2.0
"""Describes a decode engine's ranks to prefill ranks, on the one port that tickets name (`kv_port`)."""

from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.protocol import Describe, EngineDescription, Message, Problem
from vllm_ascend_pd.transport.keys import Keys
from vllm_ascend_pd.transport.side_channel import ClientConnection, SideChannelServer

# Answers that wait for a prefill rank which does not read. Descriptions are large, and a rank asks only once. With 1
# or 2
# libzmq also drops answers to ranks that do read, because it learns late that there is room again.
_UNREAD_DESCRIPTIONS = 8


class DescriptionListener:
    """Answers `Describe`, on a thread of its own (`pd-listener`)."""

    def __init__(
        self,
        description: EngineDescription,
        host: str,
        port: int,
        keys: Keys | None = None,
        hosts: HostList | None = None,
    ) -> None:
        """Starts the thread. `keys`, `hosts`: as `SideChannelServer` has them.

        Raises SideChannelError if it cannot listen on `host:port`.
        """
        # The scheduler's thread may replace it as a whole.
        self.description = description
        self._server = SideChannelServer(
            host,
            port,
            self._handle,
            name="pd-listener",
            keys=keys,
            unread_replies=_UNREAD_DESCRIPTIONS,
            hosts=hosts,
        )
        self.endpoint = self._server.endpoint

    def _handle(self, message: Message, peer: ClientConnection) -> Message:
        if not isinstance(message, Describe):
            return Problem(f"this port answers Describe, not {type(message).__name__}")
        description = self.description
        if message.engine_id != description.engine_id:
            return Problem(f"engine {message.engine_id} is not here; this is {description.engine_id}")
        return description

    def close(self, timeout_s: float) -> None:
        self._server.close(timeout_s)
