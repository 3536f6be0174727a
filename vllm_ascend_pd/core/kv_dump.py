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

from vllm_ascend_pd.core.checksum import Sums, place_weights, word_bytes
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
    # What the checksum lacks. None if other places differ, too.
    missing: int | None
    # Other blocks that seem to have the same bytes.
    copies: list[int]


def write_dump(
    folder: str, geometry: Geometry, content: npt.NDArray[np.uint8], entries: Sums, heads: Sums, place: Place
) -> None:
    """Writes a dump into a new file, unless the folder has `MAX_DUMPS`. Raises `OSError`.

    `content`: `[units, bytes]`. `entries`, `heads`: their weights, `[units, entries]` and `[heads]`.
    """
    form = geometry.sent
    words = content.reshape(-1).view(_WORDS[word_bytes(form)])
    shape = (-1, geometry.heads, len(place_weights(form)))
    if form.order is Order.HEAD_MAJOR:
        assert entries.shape[1] == 1
    for n in range(MAX_DUMPS):
        try:
            file = os.open(Path(folder) / f"verify-{n}.npz", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(file, "wb") as opened:
            np.savez(
                opened,
                words=words.reshape(shape),  # [entries, heads, places]
                entries=entries.reshape(-1),
                heads=heads,
                places=place_weights(form),
                text=np.array(place.text),
                missing=np.array([] if place.missing is None else [place.missing], dtype=np.uint64),
                copies=np.array(place.copies, dtype=np.int64),
            )
        return


class Dump(NamedTuple):
    """A dump, as it was read."""

    text: str
    # `[entries, heads, places]`.
    words: npt.NDArray[np.int64]
    # What each word counts in the checksum.
    entries: Sums
    heads: Sums
    places: Sums
    missing: int | None
    copies: list[int]


def read_dump(file: Path) -> Dump:
    """Reads a dump. Raises `OSError`, `ValueError` or `KeyError`."""
    with file.open("rb") as opened:
        if not zipfile.is_zipfile(opened):  # numpy would advise to let it run code
            raise ValueError("it is not an .npz file")
    with np.load(file, allow_pickle=False) as of:
        missing = of["missing"].tolist()
        words = of["words"].astype(np.int64)
        entries, heads, places = (of[name].astype(np.uint64) for name in ("entries", "heads", "places"))
        if words.shape != (len(entries), len(heads), len(places)):
            raise ValueError("its shapes do not fit each other")
        return Dump(
            one_line(str(of["text"]), _MAX_TEXT_CHARS),
            words,
            entries,
            heads,
            places,
            missing[0] if missing else None,
            of["copies"].tolist(),
        )


def pattern(dump: Dump) -> tuple[str, str]:
    """Returns what is wrong with the dumped KV, and what that usually means."""
    words = dump.words.astype(np.uint64)
    if not dump.words.any():
        return "zeros", "nothing was written there, or it was cleared afterwards"
    if dump.copies:
        blocks = ", ".join(map(str, dump.copies))
        return f"the KV of blocks {blocks}", "another request's KV: a block was written to, or handed out, twice"
    if dump.missing is None:
        return "several tensors or tokens", "one fault of many: read which layers, blocks and ranks the log names"
    missing = np.array([dump.missing], dtype=np.uint64)
    by_head = (words * dump.places).sum(2, dtype=np.uint64)  # [entries, heads]
    weights = dump.entries[:, None, None] * dump.heads[:, None] * dump.places
    for bit in range(32):
        change = weights << np.uint64(bit)
        if len(at := np.argwhere((change == missing) | (change == -missing))):
            entry, head, word = at[0].tolist()
            where = f"bit {bit} of word {word} of head {head} of entry {entry}"
            return f"one bit: {where}", "memory or a link flips bits: see the error counters of both hosts"
    right = (by_head * dump.entries[:, None] * dump.heads).sum(dtype=np.uint64) + missing
    of_head = (by_head * dump.entries[:, None]).sum(0, dtype=np.uint64)
    heads, orders = np.arange(len(dump.heads)), {}
    for one, other in combinations(heads.tolist(), 2):
        orders[f"heads {one} and {other} exchanged"] = order = heads.copy()
        order[[one, other]] = other, one
    orders |= {f"heads {shift} places off": np.roll(heads, -shift) for shift in heads[1:].tolist()}
    for name, order in orders.items():
        if (of_head * dump.heads[order]).sum(dtype=np.uint64) == right:
            return name, "the exchange of heads, or a wrong stride: report it, with the shapes of both sides"
    if (dump.words == dump.words.flat[0]).all():
        return "one value everywhere", "the block's old content, or a fill: its write never arrived"
    return (
        "the whole block, or much of it",
        "the block's old content: its write never arrived, came late, or was overwritten",
    )
