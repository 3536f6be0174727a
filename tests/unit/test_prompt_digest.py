# SPDX-License-Identifier: Apache-2.0
"""What prefill compares of a prompt with decode's, and what a refusal says."""

import msgspec
import pytest

from vllm_ascend_pd.core.prompt_digest import (
    PromptDigest,
    differences,
    digest_of_names,
    digest_of_tokens,
)

ID, OTHER_ID = "0123456789abcdef" * 2, "f" * 32
FULL = PromptDigest(
    tokens="0a" * 16, media="1b" * 16, media_hashing="2c" * 16, num_media=2, embeddings="3d" * 16, adapter="4e" * 16,
    salt="5f" * 16,
)  # fmt: skip


@pytest.mark.parametrize("part", ["tokens", "embeddings", "adapter", "salt"])
def test_a_part_that_prefill_does_not_have_differs(part):
    assert len(differences(FULL, msgspec.structs.replace(FULL, **{part: ""}))) == 1


@pytest.mark.parametrize("part", ["tokens", "embeddings", "adapter"])
def test_a_part_that_decode_does_not_have_differs(part):
    assert len(differences(msgspec.structs.replace(FULL, **{part: ""}), FULL)) == 1


def test_prefill_may_keep_a_prompt_apart_that_decode_does_not():
    """Some routes of vLLM 0.23 ignore the field."""
    assert differences(msgspec.structs.replace(FULL, salt=""), FULL) == []


def test_digests_tell_prompts_and_tickets_apart():
    prompts = ([1, 2, 3], [1, 23], [12, 3], [3, 2, 1], [1, 2], [], [1, 2, 3, 0])
    digests = {digest_of_tokens(ticket, prompt) for prompt in prompts for ticket in (ID, OTHER_ID)}
    assert len(digests) == 2 * len(prompts)
    names = (["a", "b"], ["ab"], ["a", "b", ""], ["b", "a"], [])
    assert len({digest_of_names(ID, each) for each in names}) == len(names)
