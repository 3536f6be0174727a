# SPDX-License-Identifier: Apache-2.0
"""Many requests through two prefill engines, one of which is killed and restarts, and a decode engine: all answers are
a single vLLM instance's, what arrives is verified without a false alarm, and nothing is kept."""

import dataclasses
import itertools
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from faults.traffic import Answer, Ask, Outcome, ask, judge_error
from harness.client import Client, EventData, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig, running_cluster
from harness.engines import EngineConfig, Role, Server, running_engines, wait_ready
from harness.failures import wait_all_blocks_free
from harness.models import MTP, make_model
from harness.pool import long
from harness.prefork import METHOD

TIMES = (
    # Shorter than `DEADLINE_S`, and long enough for a machine that others use too.
    ("transfer_timeout_s", 150.0),
    ("control_timeout_s", 15.0),
    ("grant_timeout_s", 60.0),
    ("verify_kv", "all"),
)
DEADLINE_S = 240.0
"""An answer that takes longer will never come."""
CONCURRENCY = 12
LONG_PROMPT = 800

# Requests. Each follows from its number.
OUTPUT_TOKENS = 32
"""At most, per request."""
PROMPT_TOKENS = ((1, 200, 60), (201, 600, 28), (601, 1999, 10), (2000, 2000, 2))
"""Shortest, longest, and how many of 100 prompts."""
SHARED_PREFIXES = (70, 128, 200, 350, 600, 900)
"""Tokens. Half of the prompts that are longer than the first begin with one of these."""
CACHED_PROMPTS = 32
"""Half of all requests are for one of so many prompts, which therefore stay cached."""
LEAVING = 0.13
"""Clients that mean to leave before the end. Some have their whole answer by then: a tenth of all leaves."""

# Right answers: only those that no order of additions can change count. Where two tokens are nearly equally likely, or
# where the model repeats itself, another variant of the prompt takes its place.
CLEAR = 0.002
"""The chosen token's log probability is so much above the next one's at least. Tensor-parallel sizes and batches
change it by less than a tenth of that in float32."""
DIFFERENT = OUTPUT_TOKENS // 2
"""So many tokens of an answer differ from each other."""
VARIANTS = 20

SINGLE = EngineConfig(block_size=64, max_model_len=2048)
_MTP_LAYER = (("method", "mtp"), ("num_speculative_tokens", 3))
_PREFILL = dataclasses.replace(SINGLE, role=Role.PREFILL, connector_extra=TIMES, speculative=_MTP_LAYER)
# Room for an eighth more than the longest request: the requests at once preempt each other.
_DECODE = dataclasses.replace(_PREFILL, role=Role.DECODE, kv_cache_bytes=MTP.kv_bytes_per_token * 2 * 2304)
_ENGINES = (dataclasses.replace(_PREFILL, tp=2), _PREFILL)
CLUSTER = ClusterConfig("soak", _ENGINES, (_DECODE,))
"""Prefix caching is on, prompts longer than 512 tokens are prefilled in chunks, an MTP layer drafts on both sides, and
decode preempts."""
LONG_FIRST = ClusterConfig(
    "soak, long prompts first",
    _ENGINES,
    (dataclasses.replace(_DECODE, connector_extra=(*TIMES, ("prefill_first_tokens", "auto"))),),
)
"""The same, and prefill computes some prompts before decode gives them blocks."""


@dataclasses.dataclass(frozen=True)
class Request:
    """prompt: which one of the pool.
    tokens: to generate.
    leaves_after: tokens that a client waits for that leaves then.
    patience: the share of the usual time that a client waits that leaves then.
    """

    prompt: int
    tokens: int
    stream: bool
    leaves_after: int | None = None
    patience: float | None = None


def pool_size(requests: int) -> int:
    """Returns how many prompts there are for that many requests. The single instance answers each once."""
    return min(1000, 64 + requests // 5)


def make_prompt(index: int, variant: int) -> list[int]:
    """Variants of a prompt are as likely to share a prefix with another one, and of other content."""
    rng = random.Random(f"prompt {index} {variant}")
    [(shortest, longest, _)] = rng.choices(PROMPT_TOKENS, [share for *_, share in PROMPT_TOKENS])
    tokens = rng.randint(shortest, longest)
    shared = [prefix for prefix in SHARED_PREFIXES if prefix < tokens]
    head = []
    if shared and rng.random() < 0.5:
        head = random_prompt(rng.choice(shared), "shared")
    return head + random_prompt(tokens - len(head), f"{index} {variant}")


def make_request(number: int) -> Request:
    rng = random.Random(f"request {number}")
    prompt = rng.randrange(rng.choice((CACHED_PROMPTS, pool_size(number))))
    stream = rng.random() < 0.5
    if rng.random() >= LEAVING:
        return Request(prompt, rng.randint(1, OUTPUT_TOKENS), stream)
    # Whole answers have no tokens to count, and most moments are not between two tokens.
    if stream and rng.random() < 0.4:
        return Request(prompt, OUTPUT_TOKENS, True, leaves_after=rng.randrange(1, OUTPUT_TOKENS))
    return Request(prompt, OUTPUT_TOKENS, stream, patience=rng.random())


def right_answer(client: Client, index: int) -> tuple[list[int], tuple[int, ...]]:
    """Returns a prompt and the tokens that follow it."""
    for variant in range(VARIANTS):
        prompt = make_prompt(index, variant)
        answer = client.complete(prompt, OUTPUT_TOKENS)
        if margin(answer.logprobs) >= CLEAR and len(set(answer.token_ids)) >= DIFFERENT:
            return prompt, answer.token_ids
    raise RuntimeError(f"none of {VARIANTS} variants of prompt {index} has a clear answer")


def margin(logprobs: Sequence[Mapping[int, float]]) -> float:
    """Returns by how much the likeliest token is ahead of the second, at the place where that is least."""
    best_two = (sorted(candidates.values(), reverse=True)[:2] for candidates in logprobs)
    return min(first - second for first, second in best_two)


def leave(client: Client, request: Request, prompt: list[int], right: tuple[int, ...], patience_s: float) -> Answer:
    """Asks and disconnects. What the client has got by then must be right."""
    asked = Ask(tuple(prompt), request.tokens, request.stream)
    body = {"model": client.model, "prompt": prompt, "max_tokens": request.tokens, "stream": request.stream}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    tokens: list[int] = []
    end, events = time.monotonic() + patience_s, EventData()
    try:
        timeout = httpx.Timeout(DEADLINE_S, read=patience_s)
        with client.http.stream("POST", "/v1/completions", json=body, timeout=timeout) as response:
            if response.is_error:
                response.read()
                return Answer(asked, *judge_error(response))
            if not request.stream:
                tokens += json.loads(response.read())["choices"][0]["token_ids"]
            for data in (data for chunk in response.iter_bytes() for data in events.feed(chunk)):
                if data == "[DONE]" or len(tokens) >= (request.leaves_after or OUTPUT_TOKENS):
                    break
                if time.monotonic() > end:
                    break
                event = json.loads(data)
                if "error" in event:
                    return Answer(asked, Outcome.FAILED, event["error"]["message"])
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or ()
    except httpx.TimeoutException as error:
        if patience_s >= DEADLINE_S:
            return Answer(asked, Outcome.HUNG, repr(error))
    except httpx.TransportError as error:
        return Answer(asked, Outcome.BROKEN_OFF, repr(error))
    if tuple(tokens) != right[: len(tokens)]:
        return Answer(asked, Outcome.WRONG, f"{tokens}, not {right}")
    return Answer(asked, Outcome.RIGHT if len(tokens) == request.tokens else Outcome.LEFT)


class Soak:
    """A running cluster under load. `lock` guards all that threads change."""

    def __init__(self, cluster: Cluster, requests: int, answers: list[tuple[list[int], tuple[int, ...]]]) -> None:
        self._cluster, self._count, self._answers = cluster, requests, answers
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._usual_s = 1.0  # a moving average of the time that answers take
        self._long_prompt_sent, self._restarted = threading.Event(), threading.Event()
        self._killed = self._back = float("inf")
        self.ended: list[tuple[Answer, float, float]] = []
        """Of each request, how it ended, when it began and when it ended."""
        self.servers = [*cluster.prefill[1:], *cluster.decode, cluster.proxy]
        """Those that are not restarted, and what each of them held after half of the requests."""
        self.held: list[list[int]] = []

    def serve(self) -> None:
        """Asks all requests. One engine is killed and restarts in the middle."""
        with Client(self._cluster.url, str(self._cluster.model), httpx.Timeout(DEADLINE_S, connect=5)) as client:
            with ThreadPoolExecutor(CONCURRENCY + 1) as pool:
                restart = pool.submit(self._restart_in_the_middle)
                asking = [pool.submit(self._ask, client) for _ in range(CONCURRENCY)]
            for each in (restart, *asking):
                each.result()

    def _ask(self, client: Client) -> None:
        while (number := next(self._numbers)) < self._count:
            if number >= self._count * 3 // 4:  # the last quarter has all engines again
                self._restarted.wait()
            request = make_request(number)
            prompt, right = self._answers[request.prompt]
            if len(prompt) > LONG_PROMPT:
                self._long_prompt_sent.set()
            began = time.monotonic()
            if request.leaves_after or request.patience:
                patience_s = DEADLINE_S if request.patience is None else request.patience * self._usual_s
                answer = leave(client, request, prompt, right, patience_s)
            else:
                asked = Ask(tuple(prompt), request.tokens, request.stream)
                answer = ask(client, asked, right[: request.tokens], DEADLINE_S)
            ended = time.monotonic()
            with self._lock:
                self.ended.append((answer, began, ended))
                if answer.outcome is Outcome.RIGHT:
                    self._usual_s += 0.1 * (ended - began - self._usual_s)

    def _restart_in_the_middle(self) -> None:
        """Kills an engine just after a long prompt was sent to it, so that it is busy."""
        try:
            while len(self.ended) < self._count // 2:
                time.sleep(0.2)
            self.held = [held(server) for server in self.servers]
            self._long_prompt_sent.clear()
            self._long_prompt_sent.wait(10)
            time.sleep(0.2)
            engine = self._cluster.prefill[0]
            self._killed = time.monotonic()
            engine.process.kill()
            engine.start()
            wait_ready([engine])
            self._back = time.monotonic()
        finally:
            self._restarted.set()

    def unexplained(self) -> list[str]:
        """Returns why requests failed that were not in flight while the engine was away."""
        failed = [each for each in self.ended if each[0].outcome is Outcome.FAILED]
        return [answer.detail for answer, began, ended in failed if ended < self._killed or began > self._back]


def held(server: Server) -> list[int]:
    """Returns resident MiB, threads and open files of a server's processes."""
    members = [psutil.Process(pid) for pid in server.process.members()]
    each = [(member.memory_info().rss >> 20, member.num_threads(), member.num_fds()) for member in members]
    return [sum(values) for values in zip(*each, strict=True)]


@pytest.mark.parametrize("requests", [200, long(10_000)])
@pytest.mark.timeout(3600)
def test_soak(requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METHOD, "fork")  # engines start sooner
    model = make_model(MTP, tmp_path / "models")
    with running_engines(model, [SINGLE], tmp_path) as [engine], Client(engine.url, str(model), logprobs=2) as single:
        answers = at_once(lambda index: right_answer(single, index), range(pool_size(requests)), 16)
    with running_cluster(model, CLUSTER if requests < 10_000 else LONG_FIRST, tmp_path) as cluster:
        soak = Soak(cluster, requests, answers)
        began = time.monotonic()
        soak.serve()
        seconds = time.monotonic() - began
        wait_all_blocks_free(cluster)
        assert {server.process.exit_code for server in (*soak.servers, *cluster.prefill)} == {None}
        for server, before in zip(soak.servers, soak.held, strict=True):
            grown = [now - then for now, then in zip(held(server), before, strict=True)]
            print(server.name, "grew in the second half by {:+d} MiB, {:+d} threads, {:+d} files".format(*grown))
        first = [engine.metric("vllm:kv_pd_prefill_first_tokens") for engine in cluster.prefill]
        assert all(first), "no prompt is computed before decode gives it blocks"
        retries = cluster.proxy.metric("vllm:kv_pd_proxy_retries_total")
        preemptions = cluster.decode[0].metric("vllm:num_preemptions_total")
        verified = cluster.decode[0].metric("vllm:kv_pd_verified_total")
    counts = Counter(answer.outcome for answer, *_ in soak.ended)
    details = Counter(re.sub(r"\b[0-9a-f]{8,}(?:-[0-9a-f]+)*\b", "...", answer.detail) for answer, *_ in soak.ended)
    print({outcome.value: count for outcome, count in counts.items()}, f"{requests / seconds:.1f} requests/s")
    print(f"{retries:.0f} retries, {preemptions:.0f} preemptions, {verified:.0f} verified")
    assert counts.total() == requests
    assert counts.keys() <= {Outcome.RIGHT, Outcome.LEFT, Outcome.FAILED}, details
    assert soak.unexplained() == []
    assert counts[Outcome.RIGHT] > requests * 0.8
    assert counts[Outcome.LEFT] > 0
    assert preemptions > 0 or requests < 10_000  # there may be none among few
    assert verified > requests / 4
    logs = "".join(log.read_text(errors="replace") for log in tmp_path.rglob("*.log"))
    assert "KV differs from what prefill computed" not in logs, "verify_kv has found wrong KV"
