# SPDX-License-Identifier: Apache-2.0
"""Derives keys from a cluster's secret, signs with them, and changes the secret."""

import hashlib
import hmac
import itertools
import pickle
import re

import pytest

from vllm_ascend_pd.core.secret import Secret, Use

OLD, NEW = b"o" * 32, b"n" * 64


def test_each_use_has_the_key_that_rfc_5869_gives():
    secret = Secret([OLD])
    pseudorandom = hmac.digest(bytes(32), OLD, "sha256")
    for use in Use:
        assert secret.keys(use) == [hmac.digest(pseudorandom, use.value + b"\1", "sha256")]
    assert len({secret.keys(use)[0] for use in Use}) == len(Use)


def test_a_signature_holds_for_its_content_and_use_only():
    secret = Secret([OLD])
    signature = secret.sign(Use.TICKET, b"content")
    assert signature == hmac.new(secret.keys(Use.TICKET)[0], b"content", hashlib.sha256).hexdigest()
    assert secret.accepts(Use.TICKET, b"content", signature)
    assert not secret.accepts(Use.TICKET, b"contents", signature)
    assert not secret.accepts(Use.METASERVER, b"content", signature)
    assert not secret.accepts(Use.TICKET, b"content", "")
    assert not secret.accepts(Use.TICKET, b"content", "\ud800\xff")


def test_a_secret_changes_in_three_steps_and_neighbours_always_accept_each_other():
    steps = [Secret([OLD]), Secret([OLD, NEW]), Secret([NEW, OLD]), Secret([NEW])]
    for before, after in itertools.pairwise(steps):
        assert after.accepts(Use.TICKET, b"content", before.sign(Use.TICKET, b"content"))
        assert before.accepts(Use.TICKET, b"content", after.sign(Use.TICKET, b"content"))
        assert before.keys(Use.SIDE_CHANNEL_SERVER)[0] in after.keys(Use.SIDE_CHANNEL_SERVER)
        assert after.keys(Use.SIDE_CHANNEL_SERVER)[0] in before.keys(Use.SIDE_CHANNEL_SERVER)
    assert not steps[0].accepts(Use.TICKET, b"content", steps[2].sign(Use.METASERVER, b"content"))
    assert not steps[0].accepts(Use.TICKET, b"content", steps[3].sign(Use.TICKET, b"content"))


def test_a_fingerprint_tells_secrets_apart_and_shows_no_key_that_is_used() -> None:
    assert Secret([OLD, NEW]).fingerprints() == [*Secret([OLD]).fingerprints(), *Secret([NEW]).fingerprints()]
    [shown] = Secret([OLD]).fingerprints()
    assert re.fullmatch("[0-9a-f]{8}", shown)
    assert Secret([NEW]).fingerprints() != [shown]
    used = [key for use in Use if use is not Use.FINGERPRINT for key in Secret([OLD]).keys(use)]
    assert not any(shown in key.hex() for key in [OLD, *used])


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "holds 0 secrets"),
        ([b"a" * 31], "31 bytes are too short"),
        ([OLD, b""], "0 bytes are too short"),
        ([OLD, OLD], "the same"),
        ([OLD, NEW, b"t" * 32], "holds 3 secrets"),
    ],
)
def test_an_unusable_secret_is_refused(lines, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        Secret(lines)
    assert OLD.decode() not in str(refused.value)


def test_a_secret_is_shown_nowhere():
    secret = Secret([OLD, NEW])
    assert repr(secret) == "Secret(...)"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(secret)
