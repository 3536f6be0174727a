# SPDX-License-Identifier: Apache-2.0
"""Answers `GET /query` on a prefill engine, as vLLM's MooncakeConnector does: routers for it need the engine's id.

Our own answer also says where the engine takes tickets, in the place of a Mooncake worker's address.

Written on asyncio, because it must bound what strangers can take: connections, bytes and seconds. aiohttp's and
uvicorn's servers wait for a request's headers without a limit.
"""

from __future__ import annotations

import asyncio

import msgspec
from vllm import envs

from vllm_ascend_pd.core.hosts import authority
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signed_addresses import sign_listener
from vllm_ascend_pd.decode.bootstrap import Engine
from vllm_ascend_pd.transport.event_loop_thread import EventLoopThread
from vllm_ascend_pd.transport.port_holder import held_by

PATH = "/query"

# For a connection, from its beginning to its end.
_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 64
_MAX_REQUEST_BYTES = 16 << 10


def port_of_environment() -> int | None:
    """Returns the port that VLLM_MOONCAKE_BOOTSTRAP_PORT names; None if it is not set. vLLM reads it as a number."""
    return envs.VLLM_MOONCAKE_BOOTSTRAP_PORT if envs.is_set("VLLM_MOONCAKE_BOOTSTRAP_PORT") else None


class BootstrapServerError(RuntimeError):
    """The server cannot listen."""


def answer_of(
    engine_id: str, started_as: str, host: str, port: int, siblings: int = 0, secret: Secret | None = None
) -> bytes:
    """Returns the JSON for an engine that takes tickets at `host:port`, as `GET /query` answers it.

    `siblings`: how many further data-parallel engines are on this host. Each takes tickets on the next port, and its id
    ends in the next number.
    `secret`: signs the addresses.
    """
    base, _, number = engine_id.rpartition("_dp")  # as vLLM names them
    entries = []
    for rank in range(siblings + 1):
        name = f"{base}_dp{int(number) + rank}" if rank else engine_id
        signature = "" if secret is None else sign_listener(secret, name, host, port + rank)
        address = {"0": {"0": authority(host, port + rank)}}
        entries.append(Engine(name, address, None if rank else started_as, signature))
    return msgspec.json.encode({str(rank): entry for rank, entry in enumerate(entries)})


class BootstrapServer:
    """Serves one fixed answer, on a thread of its own (`pd-bootstrap`)."""

    def __init__(self, host: str, port: int, answer: bytes) -> None:
        """Listens, and starts the thread. `port`: 0 picks a free one. Raises BootstrapServerError."""
        self._answer = answer
        self._open = 0  # connections; the thread changes it
        self._server: asyncio.Server | None = None
        self._thread = EventLoopThread("pd-bootstrap", self._close)
        starting = asyncio.start_server(self._serve, host, port, limit=_MAX_REQUEST_BYTES)
        try:
            self._server = asyncio.run_coroutine_threadsafe(starting, self._thread.loop).result(_TIMEOUT_S)
        except OSError as error:  # a TimeoutError is one, too
            self._thread.close(_TIMEOUT_S)
            raise BootstrapServerError(
                f"cannot listen on {authority(host, port)}: {error}{held_by(port, error.errno)}"
            ) from error
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self, timeout_s: float) -> None:
        """Closes all connections and ends the thread. A second call does nothing."""
        self._thread.close(timeout_s)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # of connections, and of those being accepted
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_TIMEOUT_S):
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._response(request.split(b"\r\n", 1)[0]))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever it was learns nothing
        finally:
            self._open -= 1
            writer.close()

    def _response(self, request_line: bytes) -> bytes:
        """Returns the whole HTTP response."""
        method, _, rest = request_line.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path.decode("latin-1") != PATH:
            status, body = b"404 Not Found", b'{"detail":"Not Found"}'
        elif method != b"GET":
            status, body = b"405 Method Not Allowed", b'{"detail":"Method Not Allowed"}'
        else:
            status, body = b"200 OK", self._answer
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        return head % (status, len(body)) + body
