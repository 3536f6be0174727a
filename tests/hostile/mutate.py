# SPDX-License-Identifier: Apache-2.0
"""Makes inputs that are almost valid, and some that are random. Each follows from (seed, number) alone."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

Encode = Callable[[Any], bytes]

INTERESTING = (
    -(2**63), -(2**31), -1, 0, 1, 2, 127, 128, 1023, 1024, 1025, 65536, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1,
    2**64 - 1, 0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"), None, True, False, "", "0", "\0",
    "é\u2028\U0001f600", "x" * 300, "x" * 70_000, "0" * 32, "http://127.0.0.1:1/v1/metaserver", b"", b"\xff" * 40,
    [], {}, [[]], [None], {"": None}, [0] * 2000, [-1, 2**63 - 1],
)  # fmt: skip
_HEADS = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1")
_WORDS = (
    b"NaN",
    b"1e999",
    b"-0",
    b"9" * 400,
    b'"\\ud800"',
    b"\\u0000",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"null",
    b"\xef\xbb\xbf",
)


def msgpack(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:
        return b"\xcf" + b"\xff" * 8


def json_text(value: Any) -> bytes:
    return json.dumps(value, default=lambda other: other.decode("latin-1")).encode()


def hostile_bytes(seed: int, number: int, valid: Sequence[Any], encode: Encode, max_bytes: int = 4096) -> bytes:
    """Returns bytes made from `valid` messages, which are builtins. A few are longer than `max_bytes`."""
    chance = random.Random(seed << 40 | number)
    kind = chance.randrange(12)
    if kind == 0:
        return chance.randbytes(chance.randrange(min(200, max_bytes)))
    if kind <= 5:
        return encode(hostile_value(chance, chance.choice(valid)))
    data = bytearray(encode(chance.choice(valid)))
    if kind == 6:
        return bytes(data[: chance.randrange(len(data) + 1)])
    if kind == 7:  # the beginning of one, the end of another
        other = encode(chance.choice(valid))
        return bytes(data[: chance.randrange(len(data) + 1)]) + other[chance.randrange(len(other) + 1) :]
    for _ in range(chance.choice((1, 1, 1, 2, 3, 10))):
        at = chance.randrange(len(data) + 1)
        if kind == 8 and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 9:  # lengths, numbers
            filler = chance.choice((b"\xff", b"\0", b"\x7f", b"\x80"))
            data[at : at + chance.choice((1, 2, 4, 8))] = filler * chance.choice((1, 2, 4, 8))
        elif kind == 10:
            data[at:at] = chance.choice(_HEADS + _WORDS)
        else:
            data[at:at] = data[at : at + chance.randrange(40)] * chance.choice((1, 2, 30))
    return bytes(data)


def hostile_value(chance: random.Random, value: Any) -> Any:
    """Returns a copy of `value` with one to three places changed."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        value = _changed(chance, value)
    return value


def _changed(chance: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        act = chance.randrange(10)
        if act == 0:
            return {k: v for k, v in value.items() if k != key}
        if act == 1:
            return {**value, chance.choice(("extra", "", "type", key * 2)): chance.choice(INTERESTING)}
        return {**value, key: _changed(chance, value[key])}
    if isinstance(value, list | tuple) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        act = chance.randrange(8)
        if act == 0:
            return [*value[:at], *value[at + 1 :]]
        if act == 1:
            return [*value, *value]
        return [*value[:at], _changed(chance, value[at]), *value[at + 1 :]]
    if chance.random() < 0.05:
        nested: Any = value
        for _ in range(chance.choice((10, 100, 300))):
            nested = [nested] if chance.random() < 0.5 else {"a": nested}
        return nested
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.3:
        return value + chance.choice((-1, 1, 2, 1000))
    if isinstance(value, str) and value and chance.random() < 0.3:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice(("", "x", "\0", "\n", "é", "%00", "..", "@", "[", "]", "0")) + value[at + 1 :]
    return chance.choice(INTERESTING)
