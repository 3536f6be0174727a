# SPDX-License-Identifier: Apache-2.0
"""What prefill compares of a prompt with decode's, and what a refusal says."""

import msgspec
import pytest

from vllm_ascend_pd.core.prompt_digest import (
    PromptDigest,
    differences,
    digest_of_names,
    digest_of_tokens,
    why_media_not_compared,
)

ID, OTHER_ID = "0123456789abcdef" * 2, "f" * 32
FULL = PromptDigest(
    tokens="0a" * 16, media="1b" * 16, media_hashing="2c" * 16, num_media=2, embeddings="3d" * 16, adapter="4e" * 16,
    salt="5f" * 16,
)  # fmt: skip


def test_equal_prompts():
    assert differences(FULL, FULL) == differences(PromptDigest(), PromptDigest()) == []


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ("tokens", "the prompt's tokens differ: decode and prefill rendered or tokenized it differently"),
        ("media", "images, sounds or videos differ"),
        ("num_media", "images, sounds or videos differ"),
        ("embeddings", "embeddings differ"),
        ("adapter", "the LoRA adapter differs: another one, or one of the same name with other content"),
        ("salt", "the cache salt differs"),
    ],
)
def test_what_differs_is_named(part, complaint):
    value = getattr(FULL, part)
    for other in (value + 1, 0) if isinstance(value, int) else ("6a" * 16,):
        [said] = differences(FULL, msgspec.structs.replace(FULL, **{part: other}))
        assert complaint in said


@pytest.mark.parametrize("part", ["tokens", "embeddings", "adapter", "salt"])
def test_a_part_that_prefill_does_not_have_differs(part):
    assert len(differences(FULL, msgspec.structs.replace(FULL, **{part: ""}))) == 1


@pytest.mark.parametrize("part", ["tokens", "embeddings", "adapter"])
def test_a_part_that_decode_does_not_have_differs(part):
    assert len(differences(msgspec.structs.replace(FULL, **{part: ""}), FULL)) == 1


def test_all_that_differs_is_named():
    assert len(differences(FULL, PromptDigest(tokens="7b" * 16))) == 5


def test_prefill_may_keep_a_prompt_apart_that_decode_does_not():
    """Some routes of vLLM 0.23 ignore the field."""
    assert differences(msgspec.structs.replace(FULL, salt=""), FULL) == []


@pytest.mark.parametrize("changes", [{"media_hashing": "8c" * 16}, {"media": "", "media_hashing": ""}], ids=str)
def test_other_hashes_of_images_say_nothing_where_they_are_made_differently(changes):
    other = msgspec.structs.replace(FULL, **{"media": "6a" * 16, **changes})
    for one, another in ((FULL, other), (other, FULL)):
        assert differences(one, another) == []
        assert why_media_not_compared(one, another) is not None
    assert differences(FULL, msgspec.structs.replace(other, num_media=1)) != []


def test_equal_hashes_of_images_mean_equal_images():
    for other in (FULL, msgspec.structs.replace(FULL, media_hashing="8c" * 16)):
        assert differences(FULL, other) == []
        assert why_media_not_compared(FULL, other) is None


def test_images_that_are_made_up_names_are_never_equal():
    unnamed = PromptDigest(num_media=1)
    assert "prefill does not hash them" in why_media_not_compared(unnamed, unnamed)
    assert why_media_not_compared(PromptDigest(), PromptDigest()) is None


def test_digests_tell_prompts_and_tickets_apart():
    prompts = ([1, 2, 3], [1, 23], [12, 3], [3, 2, 1], [1, 2], [], [1, 2, 3, 0])
    digests = {digest_of_tokens(ticket, prompt) for prompt in prompts for ticket in (ID, OTHER_ID)}
    assert len(digests) == 2 * len(prompts)
    names = (["a", "b"], ["ab"], ["a", "b", ""], ["b", "a"], [])
    assert len({digest_of_names(ID, each) for each in names}) == len(names)
