# SPDX-License-Identifier: Apache-2.0
"""Digests of a prompt. A ticket carries decode's, and prefill refuses a prompt with other digests.

Each part has a digest of its own, so that a refusal names what differs. The ticket's id is the digests' key, so those
of two tickets cannot be compared.
"""

import hashlib
from collections.abc import Iterable
from typing import Annotated, Protocol

import msgspec

_DIGEST_BYTES = 16
_Digest = Annotated[str, msgspec.Meta(max_length=2 * _DIGEST_BYTES)]
_Name = Annotated[str, msgspec.Meta(max_length=1024)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class PromptDigest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What decides a prompt's KV, apart from the model. A field is empty if the prompt has nothing of the kind."""

    # Of the token ids that the ticket is for. Empty if the prompt is embeddings only.
    tokens: _Digest = ""
    # Of vLLM's hashes of images, sounds and videos. Empty beside a `num_media` if no other engine can compute them.
    media: _Digest = ""
    # How those hashes are made. Hashes that differ say nothing if they are made in different ways.
    media_hashing: _Digest = ""
    # The number of images, sounds and videos.
    num_media: _Count = 0
    # Of the prompt's embeddings.
    embeddings: _Digest = ""
    # The LoRA adapter's content (`connector/weights.py`).
    adapter: _Name = ""
    # Of the cache salt.
    salt: _Digest = ""


class NamesPrompt(Protocol):
    """Names one prompt: a ticket, or a release."""

    @property
    def ticket_id(self) -> str:
        """The key of the digests."""

    @property
    def num_tokens(self) -> int:
        """How many of the prompt's tokens count."""

    @property
    def prompt(self) -> PromptDigest | None:
        """Of these tokens. None: any prompt of that length is meant."""


def digest_of(ticket_id: str, *parts: bytes | memoryview) -> str:
    """Returns a digest of `parts` and their lengths. Without the ticket's id it cannot be computed."""
    digest = hashlib.blake2b(key=ticket_id.encode()[: hashlib.blake2b.MAX_KEY_SIZE], digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def digest_of_tokens(ticket_id: str, token_ids: list[int]) -> str:
    """Returns the digest of token ids. The scheduler's thread calls it: it takes about 1.5 ms for 128 Ki tokens."""
    return digest_of(ticket_id, msgspec.json.encode(token_ids))


def digest_of_names(ticket_id: str, names: Iterable[str]) -> str:
    """Returns the digest of strings, such as media hashes or a salt."""
    return digest_of(ticket_id, *(name.encode(errors="surrogatepass") for name in names))


def differences(decode: PromptDigest, prefill: PromptDigest) -> list[str]:
    """Returns what differs, in words that tell an operator where to look. Empty if prefill has decode's prompt."""
    found = []
    if decode.tokens != prefill.tokens:
        found.append(
            "the prompt's tokens differ: decode and prefill rendered or tokenized it differently (chat template, "
            "tokenizer, time zone?)"
        )
    same_hashing = bool(decode.media and prefill.media) and decode.media_hashing == prefill.media_hashing
    if decode.num_media != prefill.num_media or (same_hashing and decode.media != prefill.media):
        found.append("the prompt's images, sounds or videos differ: decode and prefill fetched or processed others")
    if decode.embeddings != prefill.embeddings:
        found.append("the prompt's embeddings differ")
    if decode.adapter != prefill.adapter:
        found.append("the LoRA adapter differs: another one, or one of the same name with other content")
    # A salt keeps prompts apart in the prefix cache. If decode has no salt, prefill's has no effect on the KV.
    if decode.salt and decode.salt != prefill.salt:
        found.append("the cache salt differs")
    return found


def why_media_not_compared(decode: PromptDigest, prefill: PromptDigest) -> str | None:
    """Returns why the images, sounds and videos may differ although `differences` does not name them, else None.

    Equal hashes mean equal content, however they are made.
    """
    if not prefill.num_media or (decode.media and decode.media == prefill.media):
        return None
    for side, digest in (("prefill", prefill), ("decode", decode)):
        if not digest.media:
            return f"{side} does not hash them: turn on prefix caching or --mm-processor-cache-gb there"
    if decode.media_hashing != prefill.media_hashing:
        return "the engines hash them differently: use one model path, vLLM version and --mm-hasher-algorithm"
    return None
