# SPDX-License-Identifier: Apache-2.0
"""Whether two engines give the same greedy answers, as far as their arithmetic allows.

float32: the same tokens. The rounding of float32 is far below the distance between a model's best two tokens.

bfloat16: a sum depends on the order of its terms in the third digit. Engines of unequal TP, or that compute a prompt
in other chunks, give other log probabilities then, and another token where the best two are that close. So answers are
compared place by place, as long as they follow from the same tokens:

- At each place, the log probabilities of both engines' tokens are within `TOLERANCE` of each other.
- Where the tokens differ, they are a near-tie by the same measure. What follows is not compared: its context differs.
- Of all places of all answers, `LEAST_COMPARED` at least are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.client import Completion, Prompt
    from harness.pool import Reference

TOLERANCE = 0.2
"""In log probability. Rounding moves those of `models.for_npu`'s models by 0.06 at most, as measured."""
LEAST_COMPARED = 0.125
"""Two places of an answer of 16 tokens. About one place in fifteen is a near-tie that engines of unequal TP decide
differently, so an answer is compared over ten places or so; a few answers may do with less."""
LISTED = 10
"""Tokens whose log probabilities are asked for at each place."""


def is_exact(dtype: str) -> bool:
    """Whether engines that compute in `dtype` give the same tokens in whatever order they add."""
    return dtype == "float32"


def listed_logprobs(dtype: str) -> int:
    """Returns how many log probabilities clients ask for from engines that compute in `dtype`."""
    return 0 if is_exact(dtype) else LISTED


def assert_agree(reference: Reference, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
    """Checks that `completions` of `prompts` agree with the single engine's (see the module)."""
    if is_exact(reference.dtype):
        assert [each.token_ids for each in completions] == [reference.complete(prompt) for prompt in prompts]
        return
    expected = [reference.answer(prompt) for prompt in prompts]
    results = [compare(ours, theirs) for ours, theirs in zip(completions, expected, strict=True)]
    found = {f"prompt of {len(p)} tokens": why for p, (_, why) in zip(prompts, results, strict=True) if why}
    assert not found
    places = sum(len(answer.token_ids) for answer in expected)
    assert sum(compared for compared, _ in results) >= LEAST_COMPARED * places, "too many near-ties to tell"


def compare(ours: Completion, theirs: Completion, tolerance: float = TOLERANCE) -> tuple[int, str | None]:
    """Returns how many places of two answers could be compared, and what is wrong at the first place that differs by
    too much.

    Without log probabilities, all tokens must be equal.
    """
    if not theirs.logprobs:
        same = ours.token_ids == theirs.token_ids
        return len(theirs.token_ids) if same else 0, None if same else "other tokens"
    if len(ours.token_ids) != len(theirs.token_ids):
        return 0, f"{len(ours.token_ids)} and {len(theirs.token_ids)} tokens"
    place = 0
    for place, tokens in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
        listed = (ours.logprobs[place], theirs.logprobs[place])
        where = f"place {place}, tokens {tokens[0]} and {tokens[1]}"
        if not all(token in each for each in listed for token in tokens):
            return place, f"{where}: one of them is far from likely for the other engine"
        apart = max(abs(listed[0][token] - listed[1][token]) for token in tokens)
        if apart > tolerance:
            return place, f"{where}: log probabilities are {apart:.2f} apart"
        if tokens[0] != tokens[1]:
            return place + 1, None  # each is the best of its engine, so both are within twice the tolerance
    return place + 1, None
