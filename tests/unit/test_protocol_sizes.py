# SPDX-License-Identifier: Apache-2.0
"""How large messages may be, and what older engines leave out of them."""

import msgspec
import pytest
from test_protocol import CACHES, TICKET, WRITER, body, frame

from vllm_ascend_pd.core.layout import CacheTensor, RankCaches
from vllm_ascend_pd.core.protocol import (
    MAX_DESCRIPTION_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_SETTINGS,
    MAX_TICKET_BYTES,
    EngineDescription,
    GrantRequest,
    OfferTicket,
    ProtocolError,
    RankDescription,
    decode,
    encode,
)
from vllm_ascend_pd.core.topology import sharding


def test_large_engines_stay_within_the_bounds():
    """64 ranks of 61 layers with K and V: still far from what a listener accepts."""
    layers = tuple(
        CacheTensor(f"model.layers.{n}.self_attn.attn", part, 2**47, 100_000, 0) for n in range(61) for part in (0, 1)
    )
    caches = RankCaches(CACHES.geometries, layers)
    ranks = tuple(RankDescription(0, n, "tcp://10.0.0.1:55555", "10.0.0.1:55555", caches) for n in range(64))
    assert len(encode(0, EngineDescription("decode-0", "large", 64, 1, ranks))) < MAX_DESCRIPTION_BYTES / 4
    request = GrantRequest("0" * 32, "f" * 32, WRITER, sharding(64), tuple(range(10_000)), 5.0)
    assert len(encode(0, request)) < 1024 + 5 * len(request.covers) < MAX_MESSAGE_BYTES


def test_the_ticket_of_a_long_prompt_stays_within_the_bounds() -> None:
    """A million tokens in blocks of 16, in two cache groups."""
    blocks = list(range(2**31 - 62_500, 2**31))
    ticket = msgspec.structs.replace(TICKET, remote_block_ids=[blocks, blocks], remote_block_size=[16, 16])
    assert len(encode(0, OfferTicket("prefill-0", "xfer-0", ticket))) < MAX_TICKET_BYTES


def test_an_engine_that_says_nothing_of_its_weights_and_settings_is_understood() -> None:
    asked = GrantRequest("0" * 32, "f" * 32, WRITER, sharding(4), (0, 1, 2), 5.0, weights="0123456789abcdef")
    described = EngineDescription("decode-0", "llama", 1, 1, (), settings={"rope_theta": "10000"})
    for message, field, nothing in ((asked, "weights", ""), (described, "settings", {})):
        old = {name: value for name, value in msgspec.to_builtins(message).items() if name != field}
        assert getattr(decode(frame(body(old)))[1], field) == nothing


@pytest.mark.parametrize("weights", ["x" * 65, "two\nlines"])
def test_a_fingerprint_of_weights_is_a_short_name(weights: str) -> None:
    asked = GrantRequest("0" * 32, "f" * 32, WRITER, sharding(4), (0, 1, 2), 5.0)
    with pytest.raises(ProtocolError):
        decode(frame(body(msgspec.to_builtins(asked) | {"weights": weights})))


def test_settings_are_not_without_number() -> None:
    settings = {str(i): "" for i in range(MAX_SETTINGS + 1)}
    described = EngineDescription("decode-0", "llama", 1, 1, (), settings=settings)
    with pytest.raises(ProtocolError):
        decode(frame(body(described)))
