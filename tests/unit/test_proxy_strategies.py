# SPDX-License-Identifier: Apache-2.0
"""Routing: which engine is preferred, and what is known of a prompt."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxied import registry

from vllm_ascend_pd.proxy.http.bodies import parse_client_request
from vllm_ascend_pd.proxy.http.endpoints import REQUEST_FORMATS, Endpoint
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.load import EngineLoad, InFlightLoad
from vllm_ascend_pd.proxy.routing.strategies import (
    NO_PROMPT,
    Costs,
    PrefixAffinity,
    PromptEstimate,
    decode_costs,
    prefill_costs,
    prompt_of,
    prompts_of,
)

COSTS = pytest.mark.parametrize("costs", [prefill_costs, decode_costs])
ROOM, BLOCK = 100_000, 128

keys = st.lists(st.integers(0, 5), max_size=6).map(tuple)
prompts = st.builds(PromptEstimate, st.integers(0, 10_000), keys, st.sampled_from([0.0, 128.0]), st.integers(0, 4))
loads = st.lists(
    st.builds(
        EngineLoad,
        st.sampled_from("abcdef"),
        st.integers(0, 50),
        st.integers(0, 10**6),
        st.none() | st.integers(0, 10**6),
    ),
    max_size=6,
    unique_by=lambda load: load.url,
)


def prompt(tokens: int, group: int) -> PromptEstimate:
    """Of whole blocks, which all prompts of its group have."""
    return PromptEstimate(tokens, tuple(hash((group, number)) for number in range(tokens // BLOCK)), BLOCK)


# --- properties -------------------------------------------------------------------------------------------


@COSTS
@settings(max_examples=40)
@given(st.lists(st.tuples(prompts, loads), min_size=1, max_size=5))
def test_each_engine_comes_exactly_once(costs: Costs, requests: list[tuple[PromptEstimate, list[EngineLoad]]]) -> None:
    strategy = PrefixAffinity(costs)
    for each, engines in requests:
        order = strategy.order(each, engines)
        assert sorted(order) == sorted(engine.url for engine in engines)
        if order:
            assert 0 <= strategy.sent(each, order[0]) <= each.tokens


@COSTS
@given(prompts, loads)
def test_the_engine_with_less_of_everything_comes_first(
    costs: Costs, each: PromptEstimate, engines: list[EngineLoad]
) -> None:
    engines = [engine._replace(capacity=ROOM) for engine in engines]
    place = {url: number for number, url in enumerate(PrefixAffinity(costs).order(each, engines))}
    for one in engines:
        for other in engines:
            if one.requests < other.requests and one.tokens < other.tokens:
                assert place[one.url] < place[other.url]


@given(prompts, st.integers(0, 5000), st.integers(0, 5000))
def test_prefix_affinity_ends_where_waiting_costs_more(each: PromptEstimate, here: int, there: int) -> None:
    """The engine with the prefix is used only if less is then computed before the prompt's KV is complete."""
    strategy = PrefixAffinity(prefill_costs)
    strategy.sent(each, "here")
    new = each.new_tokens(len(each.keys))
    first, _ = strategy.order(each, [EngineLoad("there", tokens=there), EngineLoad("here", tokens=here)])
    if here + new != there + each.tokens:
        assert (first == "here") == (here + new < there + each.tokens)


def test_engines_with_equal_costs_take_turns() -> None:
    strategy = PrefixAffinity(prefill_costs)
    engines = [EngineLoad(url) for url in "abc"]
    assert [strategy.order(NO_PROMPT, engines)[0] for _ in range(6)] == list("abcabc")


def test_several_proxies_send_a_prefix_to_the_same_engine() -> None:
    one, other = PrefixAffinity(prefill_costs), PrefixAffinity(prefill_costs)
    engines = [EngineLoad(url) for url in "abc"]
    other.order(NO_PROMPT, engines)  # its turns are elsewhere
    firsts = [prompt(4 * BLOCK, group) for group in range(60)]
    chosen = [one.order(each, engines)[0] for each in firsts]
    assert chosen == [other.order(each, engines[::-1])[0] for each in firsts]
    assert min(chosen.count(url) for url in "abc") >= 10


def test_remembered_prefixes_are_bounded() -> None:
    strategy = PrefixAffinity(prefill_costs, max_keys=10)
    first, second = prompt(6 * BLOCK, 1), prompt(8 * BLOCK, 2)
    assert strategy.sent(first, "a") == 6 * BLOCK
    assert strategy.sent(first, "a") == 0
    assert strategy.sent(first, "b") == 6 * BLOCK
    strategy.sent(second, "a")
    assert strategy.sent(first, "a") == 4 * BLOCK  # its end was given up first
    assert strategy.sent(prompt(20 * BLOCK, 3), "b") == 20 * BLOCK
    assert strategy.sent(prompt(20 * BLOCK, 3), "b") == 10 * BLOCK
    strategy.forget("b")
    assert strategy.sent(first, "b") == 6 * BLOCK


def test_a_prompt_that_an_engine_refuses_is_not_cached_there() -> None:
    """While it is there, it counts as cached, so that prompts of a burst with one prefix go to one engine."""
    engines = registry(EngineRole.PREFILL)
    engine = engines.add("http://a", "test")
    long, tokens = prompt(50_000 // BLOCK * BLOCK, 1), 50_000 // BLOCK * BLOCK

    def ended(*loads: InFlightLoad, is_taken: bool) -> None:
        for load in loads:
            engines.ended(long, engine, load, is_taken)

    sent, beside = engines.sent(long, engine), engines.sent(long, engine)
    assert (sent.tokens, beside.tokens) == (tokens, 0)
    ended(sent, beside, is_taken=False)
    sent, beside = engines.sent(long, engine), engines.sent(long, engine)
    assert sent.tokens == tokens
    ended(beside, is_taken=True)
    ended(sent, is_taken=False)
    refused = engines.sent(long, engine)
    assert refused.tokens == 0
    ended(refused, is_taken=False)
    assert engines.sent(long, engine).tokens == 0, "one of them was taken"


def test_an_engine_that_forgets_its_cache_while_a_prompt_is_there() -> None:
    strategy = PrefixAffinity(prefill_costs)
    first = prompt(6 * BLOCK, 1)
    for is_taken in (True, False):
        strategy.sent(first, "a")
        strategy.forget("a")
        strategy.ended(first, "a", is_taken)
        assert strategy.sent(first, "a") == 6 * BLOCK
        strategy.forget("a")


def test_decode_goes_where_the_kv_fits() -> None:
    full = EngineLoad("full", requests=1, tokens=900, capacity=1000)
    busy = EngineLoad("busy", requests=50, tokens=9_000, capacity=10_000)
    assert PrefixAffinity(decode_costs).order(PromptEstimate(200), [full, busy]) == ["busy", "full"]
    assert PrefixAffinity(decode_costs).order(PromptEstimate(50), [full, busy]) == ["full", "busy"]


# --- what is known of a prompt ----------------------------------------------------------------------------


def chat(*turns: str, **fields: object) -> PromptEstimate:
    messages = [{"role": "user", "content": turn} for turn in turns]
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return prompts_of(parse_client_request(Endpoint.CHAT, body))


def completion(given: object, **fields: object) -> PromptEstimate:
    body = json.dumps({"model": "m", "prompt": given, **fields}).encode()
    return prompts_of(parse_client_request(Endpoint.COMPLETIONS, body))


def shared(one: PromptEstimate, other: PromptEstimate) -> int:
    return next((i for i, (a, b) in enumerate(zip(one.keys, other.keys, strict=False)) if a != b), len(one.keys))


def test_an_estimate_takes_no_longer_with_more_fields() -> None:
    """For each of 4,096 prompts, all fields were once copied: 3.4 s."""
    fields = {f"f{number}": 0 for number in range(30_000)}
    request = parse_client_request(Endpoint.COMPLETIONS, json.dumps({"prompt": ["a"] * 4096, **fields}).encode())
    begun = time.process_time()
    assert prompts_of(request).sequences == 4096
    assert time.process_time() - begun < 0.5


def test_large_prompts_are_estimated_by_their_first_part() -> None:
    image, text = "data:image/png;base64," + "A" * (1 << 20), "word " * (1 << 21)
    few, many = chat(image), chat(*[image] * 10)
    assert few.tokens < 1100
    assert 10_000 < many.tokens < 12_000
    assert abs(chat(text).tokens - len(text) // 4) < 100
    assert abs(completion([100_000] * 1_200_000).tokens - 1_200_000) < 100


@pytest.mark.parametrize(
    ("each", "tokens", "sequences", "blocks"),
    [
        (completion("x" * 2046), 512, 1, 4),
        (completion(list(range(100, 1000))), 900, 1, 8),
        (completion([[1, 2, 3], [4, 5]]), 5, 2, 0),
        (completion(["x" * 38] * 3, n=2), 30, 6, 0),
        (completion("x", n="many"), 1, 1, 0),
        (chat("x" * 970), 250, 1, 1),
        (chat("x" * 970, tools=["y" * 396]), 350, 1, 1),
    ],
)
def test_size_of_a_prompt(each: PromptEstimate, tokens: int, sequences: int, blocks: int) -> None:
    assert (each.tokens, each.sequences, len(each.keys)) == (tokens, sequences, blocks)
    assert 0 <= each.new_tokens(len(each.keys)) <= each.tokens


def test_an_image_is_not_counted_by_its_bytes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    body = json.dumps({"messages": [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]})
    assert 1000 < prompts_of(parse_client_request(Endpoint.CHAT, body.encode())).tokens < 1200


def test_prompts_with_a_common_beginning_share_keys() -> None:
    system, first, second = "s" * 3000, "f" * 3000, "g" * 3000
    assert shared(chat(system), chat(system, first)) == len(chat(system).keys) > 4
    assert len(chat(system).keys) <= shared(chat(system, first), chat(system, second)) < len(chat(system, first).keys)
    assert shared(chat(system), chat(first)) == 0
    for other in ({"model": "n"}, {"cache_salt": "mine"}, {"tools": []}):
        assert shared(chat(system), chat(system, **other)) == 0
    assert shared(completion(system), completion(system + first)) == len(completion(system).keys)


@given(st.sampled_from(Endpoint), st.binary(max_size=50))
def test_every_accepted_body_has_a_size(endpoint: Endpoint, noise: bytes) -> None:
    for value in (noise.hex(), list(noise), [noise.hex(), ""], {"a": 1}, None, [], [[]], 7):
        required = dict.fromkeys(REQUEST_FORMATS[endpoint].required, value)
        body = json.dumps({**required, "prompt": value, "messages": value, "n": value}).encode()
        request = parse_client_request(endpoint, body)
        assert prompts_of(request).tokens >= 0
        assert all(prompt_of(request, index).tokens > 0 for index in range(len(request.prompts)))
