# SPDX-License-Identifier: Apache-2.0
"""Dumps of KV that differs from what prefill computed, for `vllm-ascend-pd verify`: no prompt, one place each."""

from __future__ import annotations

import os
import zipfile
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.core.checksum import Form, Sums, half_weights, of_lane, place_weights, word_bytes, words_of
from vllm_ascend_pd.core.layout import Geometry, Order
from vllm_ascend_pd.core.text import one_line

MAX_DUMPS = 8
"""Most dumps of a folder."""
# Longest text that is read. It has names of a request and an engine, of 512 characters each.
_MAX_TEXT_CHARS = 4000
_WORDS = {4: np.int32, 2: np.int16, 1: np.uint8}


class Place(NamedTuple):
    """Where KV differs."""

    # The request, the tensor, the blocks and the prefill rank.
    text: str
    # What the checksum lacks; of `Form.SUM_32`, both sums' bits. None if other places differ, too.
    missing: int | None
    # Other blocks that seem to have the same bytes.
    copies: list[int]


def write_dump(
    folder: str,
    geometry: Geometry,
    content: npt.NDArray[np.uint8],
    entries: Sums,
    heads: Sums,
    place: Place,
    form: Form = Form.SUM_64,
) -> None:
    """Writes a dump into a new file, unless the folder has `MAX_DUMPS`. Raises `OSError`.

    `content`: `[units, bytes]`. `entries`, `heads`: their weights of 64 bits, `[units, entries]` and `[heads]`.
    """
    sent = geometry.sent
    if form is Form.SUM_64:
        words, places = content.reshape(-1).view(_WORDS[word_bytes(sent)]), place_weights(sent)[None]
    else:  # the halves of a word follow each other
        words = content.reshape(-1).view(np.uint16)
        places = half_weights(sent)[:, :, : words_of(sent)].transpose(0, 2, 1).reshape(2, -1)
    if sent.order is Order.HEAD_MAJOR:
        assert entries.shape[1] == 1
    lacks = [] if place.missing is None else [place.missing >> (32 * (lane or 0)) for lane in form.lanes]
    for n in range(MAX_DUMPS):
        try:
            file = os.open(Path(folder) / f"verify-{n}.npz", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(file, "wb") as opened:
            np.savez(
                opened,
                words=words.reshape(-1, geometry.heads, places.shape[1]),  # [entries, heads, places]
                # Of each sum:
                entries=np.stack([of_lane(entries.reshape(-1), lane) for lane in form.lanes]),
                heads=np.stack([of_lane(heads, lane) for lane in form.lanes]),
                places=places,
                text=np.array(place.text),
                missing=np.array(lacks, dtype=np.uint64).astype(places.dtype),
                copies=np.array(place.copies, dtype=np.int64),
            )
        return


class Dump(NamedTuple):
    """A dump, as it was read."""

    text: str
    # `[entries, heads, places]`.
    words: npt.NDArray[np.int64]
    # What each word counts in the checksum, `[sums, ...]`.
    entries: Sums
    heads: Sums
    places: Sums
    # `[sums]`.
    missing: Sums | None
    copies: list[int]


def read_dump(file: Path) -> Dump:
    """Reads a dump. Raises `OSError`, `ValueError` or `KeyError`."""
    with file.open("rb") as opened:
        if not zipfile.is_zipfile(opened):  # numpy would advise to let it run code
            raise ValueError("it is not an .npz file")
    with np.load(file, allow_pickle=False) as of:
        words, kind = of["words"].astype(np.int64), of["places"].dtype
        entries, heads, places = (of[name] for name in ("entries", "heads", "places"))
        missing, sums = of["missing"], places.shape[0] if places.ndim else 0
        shapes = [(sums, size) for size in words.shape]
        if kind not in (np.uint32, np.uint64) or [entries.shape, heads.shape, places.shape] != shapes:
            raise ValueError("its shapes do not fit each other")
        if missing.shape not in ((0,), (sums,)) or any(each.dtype != kind for each in (entries, heads, missing)):
            raise ValueError("its numbers do not fit each other")
        return Dump(
            one_line(str(of["text"]), _MAX_TEXT_CHARS),
            words,
            entries,
            heads,
            places,
            missing if len(missing) else None,
            of["copies"].tolist(),
        )


def pattern(dump: Dump) -> tuple[str, str]:
    """Returns what is wrong with the dumped KV, and what that usually means."""
    kind = dump.places.dtype
    words = dump.words.astype(kind)
    if not dump.words.any():
        return "zeros", "nothing was written there, or it was cleared afterwards"
    if dump.copies:
        blocks = ", ".join(map(str, dump.copies))
        return f"the KV of blocks {blocks}", "another request's KV: a block was written to, or handed out, twice"
    if dump.missing is None:
        return "several tensors or tokens", "one fault of many: read which layers, blocks and ranks the log names"
    missing = dump.missing[:, None, None, None]
    by_head = (words * dump.places[:, None, None]).sum(3, dtype=kind)  # [sums, entries, heads]
    weights = dump.entries[:, :, None, None] * dump.heads[:, None, :, None] * dump.places[:, None, None]
    for bit in range(32 if kind == np.uint64 else 16):
        change = weights << kind.type(bit)
        if len(at := np.argwhere((change == missing).all(0) | (change == -missing).all(0))):
            entry, head, word = at[0].tolist()
            where = f"bit {bit} of word {word} of head {head} of entry {entry}"
            return f"one bit: {where}", "memory or a link flips bits: see the error counters of both hosts"
    of_head = (by_head * dump.entries[:, :, None]).sum(1, dtype=kind)
    right = (of_head * dump.heads).sum(1, dtype=kind) + dump.missing
    heads, orders = np.arange(dump.heads.shape[1]), {}
    for one, other in combinations(heads.tolist(), 2):
        orders[f"heads {one} and {other} exchanged"] = order = heads.copy()
        order[[one, other]] = other, one
    orders |= {f"heads {shift} places off": np.roll(heads, -shift) for shift in heads[1:].tolist()}
    for name, order in orders.items():
        if ((of_head * dump.heads[:, order]).sum(1, dtype=kind) == right).all():
            return name, "the exchange of heads, or a wrong stride: report it, with the shapes of both sides"
    if (dump.words == dump.words.flat[0]).all():
        return "one value everywhere", "the block's old content, or a fill: its write never arrived"
    return (
        "the whole block, or much of it",
        "the block's old content: its write never arrived, came late, or was overwritten",
    )
