# SPDX-License-Identifier: Apache-2.0
"""What is known of a model's weights and of their updates, and fingerprints of a checkpoint's or an adapter's files.

Engines compare both (R8). A fingerprint covers samples of the files, so it takes seconds for a checkpoint of any size.
Files are the operator's, but nothing in them is trusted: each read is bounded.
"""

import functools
import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

UNKNOWN = "unknown"
"""Instead of the fingerprint of files: weights that are not in files that can be read here."""

_UPDATES_BYTES = 8


@dataclass(frozen=True)
class Weights:
    """What is known of a model's weights at one moment."""

    # Rises with every change, so between two equal versions nothing has changed.
    version: int = 0
    # The fingerprint of the files that they were loaded from, or UNKNOWN. Then, behind a "+", a digest of the updates
    # since, if there were any. `are_alike` compares it.
    fingerprint: str = UNKNOWN
    # Whether they are being changed, so that some are new and some old.
    loading: bool = False


NOTHING_KNOWN = Weights()


def are_alike(one: str, other: str) -> bool:
    """Whether two engines' weights may be the same, as far as both know. By `Weights.fingerprint`, "" if one does not
    say."""
    if not one or not other:
        return True
    files, _, updates = one.partition("+")
    other_files, _, other_updates = other.partition("+")
    return updates == other_updates and (files == other_files or UNKNOWN in (files, other_files))


class LoadedWeights:
    """Records the weights of one model. The model thread calls all methods. Any thread may read `current`."""

    def __init__(self, files: str = UNKNOWN) -> None:
        """`files`: fingerprint of the files that they were loaded from."""
        self._files = files
        # Names of the updates since, in order, as a digest.
        self._updates = b""
        # The model thread replaces it as a whole, so any thread may read it without a lock.
        self.current = Weights(0, files)

    @contextmanager
    def changing(self, update: str, files: Callable[[], str] | None = None) -> Iterator[None]:
        """The weights change meanwhile, even if an error ends it.

        `update`: its name, such as "update_weights". Engines with the same updates in the same order count as equal.
        `files`: returns the fingerprint of the files that hold all weights now. None: no files do.
        """
        if self.current.loading:  # a part of an update that is recorded as a whole
            yield
            return
        self._publish(loading=True)
        known = ""
        try:
            yield
            known = files() if files is not None else ""
        finally:
            if known and known != UNKNOWN:
                self._files, self._updates = known, b""
            else:
                hashed = hashlib.blake2b(self._updates + update.encode(), digest_size=_UPDATES_BYTES)
                self._updates = hashed.digest()
            self._publish(loading=False)

    def caches_lost(self) -> None:
        """The memory of the KV caches was freed (`/sleep`). As after an update, KV that was computed before is not used
        any more. The fingerprint stays."""
        self._publish(self.current.loading)

    def _publish(self, loading: bool) -> None:
        updates = f"+{self._updates.hex()}" if self._updates else ""
        self.current = Weights(self.current.version + 1, self._files + updates, loading)


class WeightUpdates:
    """Counts how often a rank's weights have changed since it started to serve. The model thread calls all methods."""

    def __init__(self, rank: str, loaded: LoadedWeights) -> None:
        self._rank = rank
        self._loaded = loaded
        self._reported = 0

    def take_news(self) -> dict[str, int]:
        """Returns {rank: number of updates}, once for each number; else {}."""
        count = self._loaded.current.version
        if count == self._reported:
            return {}
        self._reported = count
        return {self._rank: count}

    def report_again(self) -> None:
        """The last news may not have reached the scheduler."""
        self._reported = 0

    def are_unknown_to(self, known: dict[str, int]) -> bool:
        """Returns whether the scheduler made a step without knowing the latest update. `known`: as in the step."""
        return known.get(self._rank, 0) != self._loaded.current.version


# Fingerprints of files.

# How many files are read at a time. More help only where a read takes long, as over a network.
_THREADS = 16
# How many pieces of a tensor are read: fewer where that makes too many reads in all.
_SAMPLES, _ALL_SAMPLES = 4, 100_000
_SAMPLE_BYTES = 128
# How many pieces are read of a file that is not safetensors.
_FILE_SAMPLES, _FILE_SAMPLE_BYTES = 64, 4096
# The limit of the safetensors library.
_MAX_HEADER_BYTES = 100 << 20

_DIGEST_BYTES = 16
_MODULUS = 1 << (8 * _DIGEST_BYTES)


class _Tensor(msgspec.Struct):
    """A tensor's entry in a safetensors header."""

    dtype: str
    shape: list[int]
    # From the end of the header.
    data_offsets: tuple[int, int]


class _Header(NamedTuple):
    path: str
    # Where the tensors begin in the file.
    begin: int
    # By name.
    tensors: dict[str, _Tensor]


def of_tensors(paths: Sequence[str], timeout_s: float) -> str:
    """Returns the fingerprint of the tensors in safetensors files: of their names, types, shapes and sampled bytes.

    It does not depend on the files' names, on how tensors are spread over files, nor on their order. Reads each header,
    and of each tensor up to 4 pieces of 128 bytes.

    Raises ValueError for a file that is no safetensors file, TimeoutError, and OSError.
    """
    deadline = time.monotonic() + timeout_s
    with ThreadPoolExecutor(min(_THREADS, max(1, len(paths))), "pd-fingerprint") as threads:
        headers = list(threads.map(functools.partial(_header, deadline=deadline), paths))
        count = sum(len(header.tensors) for header in headers)
        samples = max(1, min(_SAMPLES, _ALL_SAMPLES // max(1, count)))
        sums = threads.map(functools.partial(_sum, samples=samples, deadline=deadline), headers)
        return _hexdigest(f"{count} {sum(sums) % _MODULUS}".encode())


def of_file(path: str) -> str:
    """Returns the fingerprint of a file of any format: of its length and sampled bytes. Raises ValueError, OSError."""
    with _opened(path) as (file, size):
        pieces = _pieces(file, 0, size, _FILE_SAMPLES, _FILE_SAMPLE_BYTES)
        return _hexdigest(str(size).encode(), *pieces)


def _header(path: str, deadline: float) -> _Header:
    if time.monotonic() > deadline:
        raise TimeoutError(f"it was not read in time: {path}")
    try:
        with _opened(path) as (file, size):
            (length,) = struct.unpack("<Q", _piece(file, 0, 8))
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header says {length} bytes")
            entries = msgspec.json.decode(_piece(file, 8, length), type=dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            tensors = {name: msgspec.json.decode(entry, type=_Tensor) for name, entry in entries.items()}
            for name, tensor in tensors.items():
                first, last = tensor.data_offsets
                if not 0 <= first <= last <= size - 8 - length:
                    raise ValueError(f"its tensor {name} lies outside of it")
            return _Header(path, 8 + length, tensors)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: {error}") from error


def _sum(header: _Header, samples: int, deadline: float) -> int:
    """Returns the sum of the tensors' digests, which does not depend on their order."""
    total = 0
    with _opened(header.path) as (file, _):
        for name, tensor in header.tensors.items():
            if time.monotonic() > deadline:
                raise TimeoutError(f"it was not read in time: {header.path}")
            first, last = tensor.data_offsets
            hashed = hashlib.blake2b(f"{name} {tensor.dtype} {tensor.shape}".encode(), digest_size=_DIGEST_BYTES)
            for piece in _pieces(file, header.begin + first, last - first, samples, _SAMPLE_BYTES):
                hashed.update(piece)
            total += int.from_bytes(hashed.digest())
    return total


@contextmanager
def _opened(path: str) -> Iterator[tuple[int, int]]:
    """Yields the file's descriptor and size. Pieces are far apart, so the system shall not read ahead."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        yield file, os.fstat(file).st_size
    finally:
        os.close(file)


def _pieces(file: int, begin: int, size: int, samples: int, length: int) -> Iterable[bytes]:
    """Returns `samples` pieces, evenly spread from the first byte to the last, or everything if that is less."""
    if size <= samples * length:
        return (_piece(file, begin, size),)
    if samples == 1:
        return (_piece(file, begin + (size - length) // 2, length),)
    return (_piece(file, begin + i * (size - length) // (samples - 1), length) for i in range(samples))


def _piece(file: int, offset: int, length: int) -> bytes:
    data = os.pread(file, length, offset)
    if len(data) < length:
        raise ValueError("it is cut short")
    return data


def _hexdigest(*parts: bytes) -> str:
    hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()
