# SPDX-License-Identifier: Apache-2.0
"""Our proxy, for real: its ASGI application on a simulated process, with clients that ask it and leave."""

import json
from typing import TYPE_CHECKING, Any

from simulation.http import Exchange, Line
from simulation.kernel import kernel
from simulation.stand_ins import EventLoop
from vllm_ascend_pd.proxy.server import ProxyApp
from vllm_ascend_pd.proxy.settings import ProxySettings

if TYPE_CHECKING:
    from simulation.router import Client
    from simulation.world import World

# Idle virtual time costs real time, so timeouts are short.
_TIMEOUTS: dict[str, Any] = {
    "read_timeout": 8.0,
    "probe_timeout": 3.0,
    "queue_timeout": 15.0,
    "connect_timeout": 2.0,
    "silence_timeout": 60.0,
    "health_timeout": 1.0,
    "check_interval": 1.0,
}


class Proxy:
    """The proxy's process."""

    def __init__(self, world: "World", prefill: list[str], decode: list[str], secret_file: str | None) -> None:
        self._world = world
        self.process = kernel().process("proxy")
        self.line = Line(self.process)
        self.is_up = False
        slots = world.scenario.shape.max_per_prefill
        settings = ProxySettings(
            prefill=prefill, decode=decode, port=9, secret_file=secret_file, max_per_prefill=slots, **_TIMEOUTS
        )
        self.app: ProxyApp
        self._loop: EventLoop
        kernel().spawn(lambda: self._run(settings), "proxy", self.process)

    def _run(self, settings: ProxySettings) -> None:
        self._loop = EventLoop()
        self._loop.run_until_complete(self._serve_for_ever(settings))

    async def _serve_for_ever(self, settings: ProxySettings) -> None:
        self.app = ProxyApp(settings)
        async with self.app._lifespan(self.app.asgi):
            self.is_up = True
            kernel().tell("the proxy has started")
            await self._loop.create_future()

    # Exchanges: these may be called anywhere, and run on the proxy's loop.

    def serve(self, exchange: Exchange) -> None:
        self.line.send(self._soon, lambda: self._loop.create_task(self._answer(exchange)))

    def leave(self, exchange: Exchange) -> None:
        self.line.send(self._soon, exchange.leave)

    def lose(self, exchange: Exchange) -> None:
        """The connection breaks: both ends notice."""
        if not exchange.is_over:
            kernel().tell("a connection to the proxy breaks")
            self.leave(exchange)
            exchange._status = 0
            exchange.over()

    def _soon(self, action: Any) -> None:
        self._loop.call_soon_threadsafe(action)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self.app.asgi(exchange.scope, exchange.receive, exchange.send)
        except Exception as error:  # noqa: BLE001 - uvicorn would log it
            self._world.oracle.violated(f"R4: the proxy's application fails: {error!r}")
        finally:
            exchange.over()

    # Clients.

    def ask(self, client: "Client", is_stream: bool) -> Exchange:
        body = {"model": "m", "prompt": client.tokens, "max_tokens": client.max_tokens, "stream": is_stream}
        received: list[bytes] = []

        def told(status: int, part: bytes | None) -> None:
            if part is not None:
                received.append(part)
            elif client.outcome is None:
                self._world.router.proxied(client, *_judged(status, b"".join(received), client, is_stream))

        exchange = Exchange("/v1/completions", {"Content-Type": "application/json"}, json.dumps(body).encode(), told)
        self.serve(exchange)
        return exchange

    # For the oracle.

    @property
    def kept(self) -> dict[str, Any]:
        """What it keeps of requests."""
        app = self.app
        table = app._request_table
        kept: dict[str, Any] = {
            "requests": len(table._open),
            "attempts": list(table._attempts),
            "posts": len(table._posts),
            "bytes of bodies": app._budget.used,
            "attempts watched": sum(len(pool.watch._attempts) for pool in app._pools),
            "attempts waiting": sum(pool.queue.waiting for pool in app._pools),
        }
        return kept


def _judged(status: int, answer: bytes, client: "Client", is_stream: bool) -> tuple[str, str]:
    """Returns a client's outcome, and the reason: of the status and the body that it got."""
    if status != 200:
        return "failed", f"{status}: {answer[:120]!r}"
    if is_stream:
        events = [event.removeprefix(b"data: ") for event in answer.split(b"\n\n") if event]
        if not events or events[-1] != b"[DONE]":
            return "failed", f"the stream breaks off: {answer[-120:]!r}"
        parts = [json.loads(event) for event in events[:-1]]
    else:
        try:
            parts = [json.loads(answer)]
        except ValueError:
            return "failed", f"the answer breaks off: {answer[:120]!r}"
    if failed := [part for part in parts if "error" in part]:
        return "failed", str(failed[0])[:120]
    tokens = sum(len(part["choices"][0]["text"].split()) for part in parts)
    reason = parts[-1]["choices"][0]["finish_reason"] if parts else None
    if (tokens, reason) == (client.max_tokens, "length"):
        return "right", ""
    if reason == "abort":  # an engine that goes to sleep ends its requests so, and says it
        return "failed", "abort"
    return "wrong", f"{tokens} tokens instead of {client.max_tokens}, {reason}"
