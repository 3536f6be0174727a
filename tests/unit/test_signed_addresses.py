# SPDX-License-Identifier: Apache-2.0
"""Signatures of addresses: each is for one use, one address and one cluster."""

from itertools import combinations

import pytest

from vllm_ascend_pd.core.secret import Secret, Use
from vllm_ascend_pd.core.signed_addresses import (
    is_signed_listener,
    is_signed_metaserver,
    metaserver_tokens,
    sign_listener,
    sign_metaserver,
    signature_in,
)

SECRET, OTHER = Secret([32 * b"s"]), Secret([32 * b"o"])
URL = "http://10.0.0.1:8000/v1/metaserver"

LISTENERS = [
    ("prefill-0", "10.0.0.1", 5600, "t"),
    ("prefill-0", "10.0.0.1", 5600, None),
    ("prefill-0", "10.0.0.1", 5600, ""),
    ("prefill-0", "10.0.0.1", 5601, "t"),
    ("prefill-01", "0.0.0.1", 5600, "t"),
    ("prefill-0", "10.0.0.15", 600, "t"),
    ("prefill-010.0.0.1", "", 5600, "t"),
]
"""They differ from each other, also where the border between two fields lies."""


@pytest.mark.parametrize("listener", LISTENERS, ids=str)
def test_what_was_signed_is_accepted(listener: tuple[str, str, int, str | None]) -> None:
    assert is_signed_listener(SECRET, sign_listener(SECRET, *listener), *listener)
    assert not is_signed_listener(OTHER, sign_listener(SECRET, *listener), *listener)


@pytest.mark.parametrize(("one", "other"), list(combinations(LISTENERS, 2)), ids=str)
def test_no_signature_is_for_two_listeners(
    one: tuple[str, str, int, str | None], other: tuple[str, str, int, str | None]
) -> None:
    assert not is_signed_listener(SECRET, sign_listener(SECRET, *one), *other)


def test_metaservers() -> None:
    signature = sign_metaserver(SECRET, URL)
    assert is_signed_metaserver(SECRET, signature, URL)
    assert not is_signed_metaserver(SECRET, signature, URL + "/")
    assert not is_signed_metaserver(OTHER, signature, URL)
    assert not is_signed_metaserver(SECRET, SECRET.sign(Use.TICKET_LISTENER, URL.encode()), URL)


def test_a_token_for_each_secret() -> None:
    both = metaserver_tokens(Secret([32 * b"s", 32 * b"o"]))
    assert both == [*metaserver_tokens(SECRET), *metaserver_tokens(OTHER)]
    assert all(len(bytes.fromhex(token)) == 32 for token in both)


@pytest.mark.parametrize("value", [None, 7, True, ["a"], {"a": 1}, 65 * "0", 64.0])
def test_a_value_that_cannot_be_a_signature_is_none(value: object) -> None:
    assert signature_in({"key": value}, "key") == ""


def test_a_signature_from_outside_may_be_any_text() -> None:
    for text in ("\ud800", 64 * "é", "0" * 63 + "\n"):
        assert signature_in({"key": text}, "key") == text
        assert not is_signed_metaserver(SECRET, text, URL)
        assert not is_signed_listener(SECRET, text, *LISTENERS[0])
