# SPDX-License-Identifier: Apache-2.0
"""Decode's one well-known port: tells prefill ranks what this engine's ranks look like."""

from vllm_ascend_pd.core.protocol import Describe, EngineDescription, Message, Problem
from vllm_ascend_pd.transport.curve import Keys
from vllm_ascend_pd.transport.side_channel import ClientConnection, SideChannelServer
from vllm_ascend_pd.transport.socket_limiter import default_limit

# Descriptions are large, and a prefill rank asks once: more wait for nobody who reads. With 1 or 2 libzmq drops even
# what is read: it learns late that there is room again.
_UNREAD_DESCRIPTIONS = 8
# Times the above, what strangers can make us keep. One for each rank of all prefill engines: 64 engines of 16.
_MAX_CONNECTIONS = 1024


class DescriptionListener:
    """Answers `Describe` on `host:port`. Raises SideChannelError when it cannot listen there."""

    def __init__(self, description: EngineDescription, host: str, port: int, keys: Keys | None = None) -> None:
        self._description = description
        self._server = SideChannelServer(
            host,
            port,
            self._handle,
            name="pd-listener",
            keys=keys,
            unread_replies=_UNREAD_DESCRIPTIONS,
            max_connections=min(_MAX_CONNECTIONS, default_limit()),
        )
        self.endpoint = self._server.endpoint

    def _handle(self, message: Message, peer: ClientConnection) -> Message:
        if not isinstance(message, Describe):
            return Problem(f"this port answers Describe, not {type(message).__name__}")
        if message.engine_id != self._description.engine_id:
            return Problem(f"engine {message.engine_id} is not here; this is {self._description.engine_id}")
        return self._description

    def close(self, timeout_s: float) -> None:
        self._server.close(timeout_s)
