# SPDX-License-Identifier: Apache-2.0
"""Between clients and engines: the proxy with its metaserver, and a router that asks prefill first. No HTTP.

No request is retried. Engines that are down are not asked. proxy.py has our own proxy.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.engine import FinishReason

from harness.real_scheduler import TOKEN
from simulation.engine import Engine
from simulation.http import Exchange
from simulation.kernel import Kernel, kernel
from simulation.memory import Array, prefix_hashes
from simulation.scenario import LONGEST, prompt
from vllm_ascend_pd.core.ticket_params import PREFILL_FIRST_TOKENS, TICKET_HOST, WANTS_TOKEN_IDS
from vllm_ascend_pd.decode.ticket_client import PostOutcome

if TYPE_CHECKING:
    from simulation.world import World

_METASERVER = "http://127.0.0.1:9/v1/metaserver"
# A family of prompts that no client asks for.
_OTHER = -1


@dataclass
class Client:
    """A client's request."""

    name: str
    tokens: list[int]
    max_tokens: int
    # Of the prompt and the answer.
    hashes: Array
    # Tokens of the prompt that pools have.
    pooled: int
    asked_at: float
    # Where it is now.
    engine: Engine | None = None
    # Its request to our proxy.
    exchange: Exchange | None = None
    # None: it has no answer yet.
    outcome: str | None = None


@dataclass
class _Post:
    """A ticket at the metaserver, until it has an outcome."""

    decode: Engine
    # The prefill requests that it was made into, with their engines.
    prefills: dict[str, Engine]


class Router:
    """The only one that clients, the metaserver clients of decode engines, and engines' answers talk to."""

    def __init__(self, world: "World", clock: Kernel) -> None:
        self._world = world
        self._draw = clock.draws("router")
        self.clients: dict[str, Client] = {}
        # How many of them have an outcome.
        self.ended = 0
        # When the last one got it.
        self.ended_at = 0.0
        # By ticket id.
        self._posts: dict[str, _Post] = {}
        # Of prefill requests: no two have one name.
        self._numbers = itertools.count(1)
        # The ticket of each prefill request.
        self._ticket_of: dict[str, str] = {}

    def _soon(self) -> float:
        return 0.0003 + 0.002 * self._draw.random()

    def _one_of(self, engines: Sequence[Engine]) -> Engine | None:
        up = [engine for engine in engines if engine.is_up and not engine.process.dead]
        return self._draw.choice(up) if up else None

    # Clients.

    def ask(self, name: str, family: int, length: int, max_tokens: int, route: str, pooled: int) -> None:
        """A client asks. `route`: "metaserver" or "prefill first". `pooled`: tokens of its prompt that pools have."""
        tokens = prompt(family, length)
        hashes = prefix_hashes(tokens + [TOKEN] * max_tokens)
        client = self.clients[name] = Client(name, tokens, max_tokens, hashes, pooled, kernel().now)
        kernel().tell("{} asks: {} tokens of family {}, {}", name, length, family, route)
        if route == "metaserver" and self._world.proxy is not None:
            self._world.pooled[tuple(tokens)] = pooled
            client.exchange = self._world.proxy.ask(client, is_stream=self._draw.random() < 0.5)
            return
        if route == "metaserver":
            params: dict[str, Any] = {"do_remote_prefill": True, "metaserver": _METASERVER, WANTS_TOKEN_IDS: True}
            held = [engine.first_tokens for engine in self._world.prefills if engine.is_up]
            if held and all(held):
                params[PREFILL_FIRST_TOKENS] = max(held)
            self._to_decode(client, params | self._world.metaserver_signature(_METASERVER))
            return
        client.engine = self._one_of(self._world.prefills)
        if client.engine is None:
            self._end(client, "failed", "no prefill engine is up")
        else:
            self._to_prefill(client.engine, f"first-{name}", client, {"do_remote_decode": True})

    def leave(self, name: str) -> None:
        """A client closes its connection."""
        client = self.clients.get(name)
        if client is None or client.outcome is not None:
            return
        self._end(client, "left", "")
        if client.exchange is not None:
            self._world.proxy.leave(client.exchange)
        if client.engine is not None:
            client.engine.abort(f"first-{name}" if client.engine.prefills else name)

    def proxied(self, client: Client, outcome: str, reason: str) -> None:
        """Our proxy has answered a client, or closed the connection."""
        self._end(client, outcome, reason)
        if outcome == "wrong":
            self._world.oracle.violated(f"R1: {client.name} gets a wrong answer: {reason}")

    def _to_decode(self, client: Client, params: dict[str, Any]) -> None:
        client.engine = self._one_of(self._world.decodes)
        if client.engine is None:
            self._end(client, "failed", "no decode engine is up")
            return
        request = client.engine.request(client.name, client.tokens, params, client.max_tokens)
        client.engine.add(request, client.hashes)

    def _to_prefill(
        self,
        engine: Engine,
        name: str,
        client: Client,
        params: dict[str, Any],
        tokens: Sequence[int] | None = None,
    ) -> None:
        """`tokens`: if they are not those of the client's prompt."""
        request = engine.request(name, client.tokens if tokens is None else tokens, params, 1)
        hashes = client.hashes if tokens is None else prefix_hashes(tokens)
        engine.add(request, hashes, client.pooled if tokens is None else 0)

    def _end(self, client: Client, outcome: str, reason: str) -> None:
        client.outcome = outcome
        self.ended += 1
        self.ended_at = max(self.ended_at, kernel().now)
        kernel().tell("{} ends: {} {}", client.name, outcome, reason)

    # The metaserver.

    def post(self, decode: Engine, key: str, body: dict[str, Any]) -> None:
        """A decode engine posts a ticket."""
        kernel().at(self._soon(), self._posted, decode, key, msgspec.json.decode(msgspec.json.encode(body)))

    def _posted(self, decode: Engine, key: str, body: dict[str, Any]) -> None:
        if decode.process.dead:
            return
        config, faults = self._world.config, self._world.scenario.faults
        post = self._posts[key] = _Post(decode, {})
        kernel().at(config.queue_timeout_s + config.transfer_timeout_s, self._took_too_long, key)
        up = [engine for engine in self._world.prefills if engine.is_up and not engine.process.dead]
        if not up:
            self._answer(key, "no prefill engine is up")
            return
        chosen = self._draw.sample(up, min(len(up), 2 if self._draw.random() < faults.two_prefills else 1))
        client = self.clients[body["request_id"]]
        body.pop("token_ids", None)
        tokens = (client.tokens + [TOKEN] * client.max_tokens)[: body["num_tokens"]]
        is_other = self._draw.random() < faults.other_prompt
        for engine in chosen:
            name = f"{client.name}-{next(self._numbers)}"
            post.prefills[name] = engine
            self._ticket_of[name] = key
            if is_other and len(tokens) <= LONGEST:
                kernel().tell("{} gets the ticket of {} with another prompt", engine.name, client.name)
                self._to_prefill(engine, name, client, body, prompt(_OTHER, len(tokens)))
            elif len(tokens) == len(client.tokens):
                self._to_prefill(engine, name, client, body)
            else:
                self._to_prefill(engine, name, client, body, tokens)

    def _took_too_long(self, key: str) -> None:
        if (post := self._posts.get(key)) is not None:
            for name, engine in post.prefills.items():  # as our proxy does
                engine.abort(name)
            self._answer(key, "it took too long")

    def cancel(self, key: str) -> None:
        """A decode engine does not want a ticket's outcome any more."""
        kernel().at(self._soon(), self._cancelled, key)

    def _cancelled(self, key: str) -> None:
        if (post := self._posts.pop(key, None)) is not None:
            for name, engine in post.prefills.items():
                engine.abort(name)

    def _answer(self, key: str, reason: str, held: dict[str, Any] | None = None) -> None:
        """Answers a post. `reason`: why it has failed; "" if it has not. `held`: where prefill holds its prompt."""
        if (post := self._posts.pop(key, None)) is not None:
            outcome = PostOutcome(key, not reason, f"prefill failed: {reason}" if reason else "", bool(reason), held)
            kernel().at(self._soon(), post.decode.role._recipients._metaserver.outcomes.append, outcome)

    # Engines.

    def answered(self, engine: Engine, request_id: str, reason: FinishReason, params: dict[str, Any] | None) -> None:
        """An engine has answered a request."""
        kernel().at(self._soon(), self._answered, request_id, reason, params or {})

    def _answered(self, request_id: str, reason: FinishReason, params: dict[str, Any]) -> None:
        error = params.get("error") or ("" if reason == FinishReason.LENGTH else str(reason))
        if (key := self._ticket_of.pop(request_id, None)) is not None:
            post = self._posts.get(key)
            if post is not None and (not error or len(post.prefills) == 1):
                self._answer(key, error, params)
            elif post is not None:  # the other engine may still answer
                del post.prefills[request_id]
            return
        client = self.clients[request_id.removeprefix("first-")]
        if client.outcome is not None:
            return
        if request_id == client.name:
            self._end(client, "failed" if error else "right", error)
        elif error or TICKET_HOST not in params:
            self._end(client, "failed", error)
        elif (late := self._world.scenario.faults.late) and self._draw.random() < late:
            hold_s = self._world.config.hold_timeout_s or 0.0
            kernel().at(hold_s * (0.8 + 0.4 * self._draw.random()), self._to_decode_late, client, params)
        else:
            self._to_decode(client, params)

    def _to_decode_late(self, client: Client, params: dict[str, Any]) -> None:
        if client.outcome is None:
            self._to_decode(client, params)

    def died(self, engine: Engine) -> None:
        """An engine's connections are closed."""
        for key, post in list(self._posts.items()):
            if post.decode is engine:
                self._cancelled(key)
            elif engine in post.prefills.values():
                post.prefills = {name: other for name, other in post.prefills.items() if other is not engine}
                if not post.prefills:
                    self._answer(key, "the connection was closed")
        for client in self.clients.values():
            if client.engine is engine and client.outcome is None:
                self._end(client, "failed", "the connection was closed")

    @property
    def is_quiet(self) -> bool:
        return not self._posts


class MetaserverClient:
    """In place of the product's: posts straight to the router."""

    admitted = "all"

    def __init__(self, router: Router) -> None:
        self._router = router
        self.outcomes: list[PostOutcome] = []
        # Set once the engine is known.
        self.engine: Engine | None = None

    def check(self, url: str, signature: str = "") -> str | None:
        return None

    def post(self, key: str, url: str, body: dict[str, object], signature: str = "") -> None:
        assert self.engine is not None
        self._router.post(self.engine, key, body)

    def cancel(self, key: str) -> None:
        self._router.cancel(key)

    def report_failure(self, url: str, failure: Any, signature: str = "") -> None:
        kernel().tell("reports that {} failed: {}", failure.request_id, failure.reason[:100])

    def poll(self) -> list[PostOutcome]:
        outcomes = self.outcomes[:]
        self.outcomes.clear()  # the router adds to this list later
        return outcomes

    def close(self) -> None: ...
