# SPDX-License-Identifier: Apache-2.0
"""Describes a decode engine's ranks to prefill ranks, on the one port that tickets name (`kv_port`)."""

from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.protocol import Describe, EngineDescription, Message, Problem
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.transport.side_channel import ClientConnection, SideChannelServer

# Answers that wait for a prefill rank which does not read. Descriptions are large, and a rank asks only once. With 1
# or 2 libzmq also drops answers to ranks that do read, because it learns late that there is room again.
_UNREAD_DESCRIPTIONS = 8


class DescriptionListener(SideChannelServer):
    """Answers `Describe`, on a thread of its own (`pd-listener`)."""

    def __init__(
        self,
        description: EngineDescription,
        host: str,
        port: int,
        secret: Secret | None = None,
        hosts: HostList | None = None,
    ) -> None:
        """Starts the thread. `secret`, `hosts`: as `SideChannelServer` has them.

        Raises SideChannelError if it cannot listen on `host:port`.
        """
        # The scheduler's thread may replace it as a whole.
        self.description = description
        super().__init__(
            host,
            port,
            self._describe,
            name="pd-listener",
            secret=secret,
            unread_replies=_UNREAD_DESCRIPTIONS,
            hosts=hosts,
        )

    def _describe(self, message: Message, peer: ClientConnection) -> Message:
        if not isinstance(message, Describe):
            return Problem(f"this port answers Describe, not {type(message).__name__}")
        description = self.description
        if message.engine_id != description.engine_id:
            return Problem(f"engine {message.engine_id} is not here; this is {description.engine_id}")
        return description
