# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of a checkpoint's or an adapter's files.

A fingerprint covers samples of the files, so it takes seconds for a checkpoint of any size. Files are the operator's,
but nothing in them is trusted: each read is bounded.
"""

import functools
import hashlib
import os
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

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
