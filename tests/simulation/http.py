# SPDX-License-Identifier: Apache-2.0
"""HTTP in memory: exchanges between clients, our proxy, and the API servers of engines. Connections break, and servers
answer anything, as often as the scenario says.

The product's clients are cut at their connections: the proxy's aiohttp session, and `Connections.post` of decode
engines.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
from multidict import CIMultiDict
from vllm.v1.engine import FinishReason

from simulation.engine import TOKEN
from simulation.kernel import Process, kernel
from simulation.memory import prefix_hashes
from simulation.scenario import LONGEST, MAX_MODEL_LEN, prompt

if TYPE_CHECKING:
    from simulation.engine import Engine
    from simulation.world import World

# A prompt that no client asks for.
_OTHER = -1
_NOT_VLLM = {"Content-Type": "text/html"}
_JSON = {"Content-Type": "application/json"}
_EVENTS = {"Content-Type": "text/event-stream"}


def _latency_s() -> float:
    return 0.0001 + 0.0005 * kernel().draws("http").random()


class Line:
    """One direction of a connection: what is sent arrives in order, and waits while its receiver is stopped."""

    def __init__(self, receiver: Process | None) -> None:
        self._receiver = receiver
        self._last = 0.0

    def send(self, action: Callable[..., None], *args: Any) -> None:
        when = self._last = max(self._last + 1e-6, kernel().now + _latency_s())
        kernel().at(when - kernel().now, self._arrive, action, args)

    def _arrive(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        receiver = self._receiver
        if receiver is not None and receiver.dead:
            return
        if receiver is not None and receiver.stopped:
            kernel().after_stop(receiver, self._arrive, action, args)
            return
        action(*args)


class Answer:
    """A server's answer, as its client's event loop reads it. As `aiohttp.ClientResponse`, and its content."""

    connection = None

    def __init__(self, loop: asyncio.AbstractEventLoop, left: Callable[[], None]) -> None:
        """`left`: is called if the client closes the connection before the answer's end."""
        self._loop = loop
        self._left = left
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.raw_headers: tuple[tuple[bytes, bytes], ...] = ()
        self.content = self
        self._parts: deque[bytes] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self.timeout_s: float | None = None

    # On the client's loop.

    async def begun(self) -> None:
        """Returns once the head is here. Raises what broke the connection."""
        await self._until(lambda: bool(self.status))

    async def readany(self) -> bytes:
        await self._until(lambda: bool(self._parts) or self._ended)
        return self._parts.popleft() if self._parts else b""

    async def _until(self, arrived: Callable[[], bool]) -> None:
        while not arrived():
            if self._error is not None:
                raise self._error
            self._news.clear()
            try:
                async with asyncio.timeout(self.timeout_s):
                    await self._news.wait()
            except TimeoutError:
                raise aiohttp.SocketTimeoutError from None

    def is_eof(self) -> bool:
        return self._ended

    def exception(self) -> BaseException | None:
        return self._error

    def close(self) -> None:
        if not (self._ended or self._error):
            self._error = aiohttp.ClientConnectionError("closed here")
            self._left()

    # From outside. Each runs on the client's loop at last.

    def _soon(self, action: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action, *args)

    def start(self, status: int, headers: dict[str, str]) -> None:
        self._soon(self._started, status, headers)

    def write(self, part: bytes) -> None:
        self._soon(self._written, part)

    def end(self) -> None:
        self._soon(self._has_ended)

    def fail(self, error: BaseException) -> None:
        self._soon(self._failed, error)

    def _started(self, status: int, headers: dict[str, str]) -> None:
        self.headers = CIMultiDict(headers)
        self.raw_headers = tuple((name.lower().encode(), value.encode()) for name, value in headers.items())
        self.status = status
        self._news.set()

    def _written(self, part: bytes) -> None:
        self._parts.append(part)
        self._news.set()

    def _has_ended(self) -> None:
        self._ended = True
        self._news.set()

    def _failed(self, error: BaseException) -> None:
        if not self._ended and self._error is None:
            self._error = error
            self._news.set()


class Session:
    """As the `aiohttp.ClientSession` of the proxy's engine client."""

    def __init__(self, world: "World") -> None:
        self._world = world

    async def request(self, method: str, url: str, *, headers: Any, data: Any, timeout: Any, **_: Any) -> Answer:
        loop = asyncio.get_running_loop()
        api = self._world.api_of(url)
        await asyncio.sleep(_latency_s())
        if api is None:
            where: Any = SimpleNamespace(host="engine", port=0, ssl=True, is_ssl=False)
            raise aiohttp.ClientConnectorError(where, ConnectionRefusedError(111, "Connection refused"))
        answer = Answer(loop, lambda: api.line.send(api.left, call))
        answer.timeout_s = timeout.sock_read
        body = b"" if data is None else bytes(data._value)
        call = Call(answer, kernel().this_process, dict(headers))
        api.line.send(api.take, call, method, "/" + url.split("/", 3)[3], body)
        try:
            await answer.begun()
        except BaseException:
            answer.close()
            raise
        return answer

    async def close(self) -> None: ...


class Call:
    """A request at an engine's API server."""

    def __init__(self, answer: Answer, client: Process, headers: dict[str, str]) -> None:
        self._answer = answer
        self._line = Line(client)
        self.headers = headers
        self.is_stream = False
        self.tokens = 0
        self.request_id = ""
        self.is_over = False

    def start(self, status: int, headers: dict[str, str]) -> None:
        self._line.send(self._answer.start, status, headers)

    def write(self, part: bytes) -> None:
        self._line.send(self._answer.write, part)

    def end(self) -> None:
        self.is_over = True
        self._line.send(self._answer.end)

    def fail(self) -> None:
        """The connection is closed."""
        if not self.is_over:
            self.is_over = True
            error = aiohttp.ClientPayloadError() if self._answer.status else aiohttp.ServerDisconnectedError()
            self._line.send(self._answer.fail, error)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.start(status, headers or _JSON)
        self.write(body)
        self.end()


def _error(status: int, message: str, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": "Error", "param": param, "code": status}}).encode()


class Api:
    """The API server of an engine: a process of its own, which vLLM starts beside the core."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._world = engine.world
        self.process = kernel().process(f"{engine.name}/api")
        self.process.on_death.append(self._died)
        self.line = Line(self.process)
        self._calls: dict[str, Call] = {}
        self._open: dict[Call, None] = {}
        self._generated = 0
        self._draw = kernel().draws(f"api of {engine.name}")

    def take(self, call: Call, method: str, path: str, body: bytes) -> None:
        if path == "/health":
            call.answer(200, b"")
        elif path == "/metrics":
            call.answer(200, self._metrics(), {"Content-Type": "text/plain"})
        else:
            self._post(call, path, body)

    def _metrics(self) -> bytes:
        running, waiting = self._engine.load
        figures = {
            "num_requests_running": running,
            "num_requests_waiting": waiting,
            "prompt_tokens_total": 0,
            "generation_tokens_total": self._generated,
            "kv_pd_prefill_first_tokens": self._engine.first_tokens,
        }
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in figures.items()).encode()

    def _post(self, call: Call, path: str, body: bytes) -> None:
        faults, engine = self._world.scenario.faults, self._engine
        if self._draw.random() < faults.http and self._goes_wrong(call):
            return
        wanted = json.loads(body)
        tokens: list[int] = wanted["prompt"]
        if tokens and isinstance(tokens[0], list):
            [tokens] = tokens
        params = wanted.get("kv_transfer_params") or {}
        name = f"cmpl-{call.headers['x-request-id']}-0-{self._draw.getrandbits(32):08x}"
        hashes = None
        pooled = self._world.pooled.get(tuple(tokens), 0) if engine.prefills else 0
        if engine.prefills and self._draw.random() < faults.other_prompt and len(tokens) <= LONGEST:
            kernel().tell("{} gets the ticket of {} with another prompt", engine.name, name)
            tokens, pooled = prompt(_OTHER, len(tokens)), 0
        if engine.prefills and self._draw.random() < faults.two_prefills:
            self._world.to_another_prefill(engine, name, tokens, params)
        max_tokens = min(wanted.get("max_tokens", 16), MAX_MODEL_LEN - len(tokens))
        hashes = prefix_hashes(tokens + [TOKEN] * max_tokens)
        call.is_stream = bool(wanted.get("stream"))
        call.request_id = name
        self._calls[name] = call
        self._open[call] = None
        if call.is_stream:
            call.start(200, _EVENTS)
        request = engine.request(name, tokens, params, max_tokens)
        engine.add(request, hashes, pooled)
        if self._draw.random() < faults.http:  # the connection is lost while the engine computes
            kernel().at(0.03 * self._draw.random(), self._lose, call)

    def _goes_wrong(self, call: Call) -> bool:
        """Answers a request with something else. Returns False if the engine answers it."""
        what = self._draw.choice(["refused", "no model", "denied", "busy", "error", "full", "page", "garbage", "cut"])
        what = "nothing" if self._draw.random() < 0.1 else what
        kernel().tell("{} answers {}", self.process.name, what)
        if what == "refused":
            call.answer(400, _error(400, "a parameter is wrong"))
        elif what == "no model":
            call.answer(404, _error(404, "no such model", "model"))
        elif what == "denied":
            call.answer(403, b"{}")
        elif what == "busy":
            call.answer(429, _error(429, "too many"))
        elif what == "error":
            call.answer(500, _error(500, "Internal server error"))
        elif what == "full":
            call.answer(503, _error(503, "no room"))
        elif what == "page":
            call.answer(self._draw.choice([200, 404, 502]), b"<html>", _NOT_VLLM)
        elif what == "garbage":
            call.answer(
                self._draw.choice([200, 204, 302]), self._draw.choice([b"", b"{}", b"\xff", b'{"choices": []}'])
            )
        elif what == "cut":
            call.fail()
        else:
            self._open[call] = None
        return True

    def _lose(self, call: Call) -> None:
        if not call.is_over:
            kernel().tell("{} loses a connection", self.process.name)
            call.fail()
            self.left(call)

    def left(self, call: Call) -> None:
        """The client has closed the connection."""
        call.is_over = True
        self._open.pop(call, None)
        if self._calls.pop(call.request_id, None) is not None:
            self._engine.abort(call.request_id)

    def _died(self) -> None:
        for call in self._open:
            call.fail()

    # From the core.

    def answered(self, request_id: str, tokens: int, reason: FinishReason | None, params: Any) -> bool:
        """Takes what the core has generated. Returns False if the request did not come over HTTP."""
        call = self._calls.get(request_id)
        if call is None:
            return request_id.startswith("cmpl-")
        self._generated += tokens
        call.tokens += tokens
        if call.is_stream and tokens:
            call.write(self._event(call, " a" * tokens, None))
        if reason is not None:
            del self._calls[request_id]
            self._open.pop(call, None)
            self._end(call, reason, params)
        return True

    def _end(self, call: Call, reason: FinishReason, params: Any) -> None:
        is_error = reason == FinishReason.ERROR
        if call.is_stream:
            if not is_error:
                call.write(self._event(call, "", str(reason)))
            elif call.tokens or self._draw.random() < 0.5:  # some versions of vLLM leave it out before the first token
                call.write(b"data: " + _error(500, "Internal server error") + b"\n\n")
            call.write(b"data: [DONE]\n\n")
            call.end()
        elif is_error:
            call.answer(500, _error(500, "Internal server error"))
        else:
            call.answer(200, self._completion(call, " a" * call.tokens, str(reason), params))

    def _completion(self, call: Call, text: str, reason: str | None, params: Any = None) -> bytes:
        usage = {"prompt_tokens": 1, "completion_tokens": call.tokens, "total_tokens": 1 + call.tokens}
        return json.dumps(
            {
                "id": call.request_id.rpartition("-")[0],
                "object": "text_completion",
                "choices": [{"index": 0, "text": text, "finish_reason": reason}],
                "usage": usage,
                "kv_transfer_params": params,
            }
        ).encode()

    def _event(self, call: Call, text: str, reason: str | None) -> bytes:
        return b"data: " + self._completion(call, text, reason) + b"\n\n"


class Exchange:
    """A request to the proxy, by ASGI."""

    def __init__(
        self, path: str, headers: dict[str, str], body: bytes, told: Callable[[int, bytes | None], None]
    ) -> None:
        """`told`: gets the status, and each part of the answer; None at its end. The status of a lost one is 0."""
        self._told = told
        self._body: bytes | None = body
        self._left = asyncio.Event()
        self._line = Line(None)
        self._status = 0
        self.is_over = False
        encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [*encoded, (b"content-length", str(len(body)).encode())],
            "client": ("127.0.0.1", 50_000),
            "server": ("127.0.0.1", 8000),
        }

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        if body := message.get("body", b""):
            self._line.send(self._told, self._status, bytes(body))
        if not message.get("more_body", False):
            self.over()

    def over(self) -> None:
        """The answer has ended, or the connection is closed without one."""
        if not self.is_over:
            self.is_over = True
            self._left.set()
            self._line.send(self._told, self._status, None)

    def leave(self) -> None:
        """The client has closed the connection. On the proxy's loop."""
        self._left.set()


async def post(world: "World", path: str, headers: dict[str, str], content: bytes) -> tuple[int, bytes]:
    """As `Connections.post`: a decode engine posts to the proxy, on its own loop. Raises httpx's errors."""
    loop, faults = asyncio.get_running_loop(), world.scenario.faults
    draw = kernel().draws("posts")
    if draw.random() < faults.http:
        await asyncio.sleep(_latency_s())
        raise draw.choice([httpx.ConnectError("refused"), httpx.ReadError("reset")])
    done: asyncio.Future[tuple[int, bytes]] = loop.create_future()
    parts: list[bytes] = []
    line = Line(kernel().this_process)

    def set_result(status: int) -> None:
        if done.done():
            return
        if status:
            done.set_result((status, b"".join(parts)))
        else:
            done.set_exception(httpx.RemoteProtocolError("Server disconnected without sending a response."))

    def answered(status: int) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result, status)

    def told(status: int, part: bytes | None) -> None:
        if part is not None:
            parts.append(part)
        else:
            line.send(answered, status)

    exchange = Exchange(path, headers, content, told)
    world.proxy.serve(exchange)
    if draw.random() < faults.http:  # the connection is lost while the proxy has the ticket
        kernel().at(0.05 * draw.random(), world.proxy.lose, exchange)
    try:
        return await done
    except asyncio.CancelledError:
        world.proxy.leave(exchange)
        raise
