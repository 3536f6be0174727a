# SPDX-License-Identifier: Apache-2.0
"""Takes a fingerprint of a model's weights while they are loaded, without a pass over them afterwards."""

import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch

_T = TypeVar("_T")

NamedTensor = tuple[str, torch.Tensor]

# Places of a tensor that are sampled, evenly spread. Each costs a page of the checkpoint's file.
_RUNS = 8
# Neighbouring values that are read at each place.
_RUN_VALUES = 8

_DIGEST_BYTES = 16
_MODULUS = 1 << (8 * _DIGEST_BYTES)
_FINGERPRINT_CHARS = 16

# Tensors that the fingerprint leaves out: without effect on KV, or not in every rank or checkpoint format.
_LEFT_OUT = re.compile(
    r"\.experts\.\d+\."  # routed experts: with expert parallelism, loaders skip those of other ranks
    r"|(^|\.)lm_head\."  # the output head has no effect on KV; safetensors leaves it out where it is tied
    r"|rotary_emb\.inv_freq$"  # computed, never loaded
)


@dataclass(frozen=True)
class Weights:
    """What is known of a model's weights at one moment."""

    # Rises with every change, so between two equal versions nothing has changed.
    version: int = 0
    # Equal for equal weights. "" if it is not known what was loaded.
    fingerprint: str = ""
    # Whether a load is in progress, so that some weights are new and some old.
    loading: bool = False


NOTHING_KNOWN = Weights()


class LoadedWeights:
    """Records the weights of one model. The model thread calls all methods. Any thread may read `current`.

    The fingerprint covers each checkpoint tensor's name, shape and up to 64 sampled values. It does not depend on:
    - the tensor-parallel and pipeline-parallel size, since every rank is handed every tensor;
    - the order of tensors, nor into how many calls a load is divided;
    - the file format, nor the data type of equal floating-point values.

    It does not cover the tensors of `_LEFT_OUT`. Of tensors that torch cannot index (torchao's,
    packed 4-bit floats), it covers name and shape alone.
    """

    def __init__(self) -> None:
        # By the tensor's name in the checkpoint.
        self._digests: dict[str, int] = {}
        # Sum of the digests.
        self._sum = 0
        # Names of the updates whose tensors were not seen, in order, as a digest.
        self._unseen = b""
        # Whether fingerprints of engines can be compared.
        self._comparable = True
        # The model thread replaces it as a whole, so any thread may read it without a lock.
        self.current = NOTHING_KNOWN

    def load(self, weights: Iterable[NamedTensor], into: Callable[[Iterable[NamedTensor]], _T]) -> _T:
        """Calls `into(weights)`, which loads them, and records them meanwhile. A load that fails counts, too."""
        if _nested.active:  # a part of a model that is recorded as a whole
            return into(weights)
        self._publish(loading=True)
        _nested.active = True
        try:
            return into(self._noted(weights))
        finally:
            _nested.active = False
            self._publish(loading=False)

    def changed_unseen(self, update: str) -> None:
        """Records an update without checkpoint tensors. Engines with the same updates in the same order count as equal.

        `update`: its name, for example "update_weights". What it wrote is not known.
        """
        self._unseen = hashlib.blake2b(self._unseen + update.encode(), digest_size=_DIGEST_BYTES).digest()
        self._publish(loading=False)

    def stay_unknown(self) -> None:
        """Gives no fingerprint from now on. For loaders that give ranks other tensors at other parallel sizes.

        The version still rises with every change.
        """
        self._comparable = False
        self._publish(loading=self.current.loading)

    def _noted(self, weights: Iterable[NamedTensor]) -> Iterable[NamedTensor]:
        if isinstance(weights, list | tuple):  # a model may read these more than once
            for name, tensor in weights:
                self._note(name, tensor)
            return weights
        return self._passing(weights)

    def _passing(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        for name, tensor in weights:
            self._note(name, tensor)
            yield name, tensor

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        if _LEFT_OUT.search(name) or tensor.is_meta:
            return
        before = self._digests.get(name, 0)
        hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        hashed.update(f"{name} {tuple(tensor.shape)} ".encode())
        if (sample := _sample(tensor)) is not None:
            hashed.update(sample.kind.encode())
            hashed.update(sample.values)
            if sample.partial:
                hashed.update(before.to_bytes(_DIGEST_BYTES))
        digest = int.from_bytes(hashed.digest())
        self._digests[name] = digest
        self._sum = (self._sum + digest - before) % _MODULUS

    def _publish(self, loading: bool) -> None:
        fingerprint = ""
        if self._digests and self._comparable:
            content = f"{self._sum} {len(self._digests)} {self._unseen.hex()}".encode()
            fingerprint = hashlib.blake2b(content, digest_size=_FINGERPRINT_CHARS // 2).hexdigest()
        self.current = Weights(self.current.version + 1, fingerprint, loading)


class WeightUpdates:
    """Counts how often a rank's weights have changed since it started to serve. The model thread calls all methods."""

    def __init__(self, rank: str, loaded: LoadedWeights) -> None:
        self._rank = rank
        self._loaded = loaded
        self._at_start = loaded.current.version
        self._reported = 0

    def take_news(self) -> dict[str, int]:
        """Returns {rank: number of updates}, once for each number; else {}."""
        count = self._count()
        if count == self._reported:
            return {}
        self._reported = count
        return {self._rank: count}

    def are_unknown_to(self, known: dict[str, int]) -> bool:
        """Returns whether the scheduler made a step without knowing the latest update. `known`: as in the step."""
        return known.get(self._rank, 0) != self._count()

    def _count(self) -> int:
        return self._loaded.current.version - self._at_start


class _Nested(threading.local):
    active = False


_nested = _Nested()


class _Sample(NamedTuple):
    """Sampled values of a tensor."""

    # Their type. "floating" for all floating-point types, which are compared as float32.
    kind: str
    values: bytes
    # Whether some are NaN, which stands for a value that an update leaves as it was.
    partial: bool = False


def _sample(tensor: torch.Tensor) -> _Sample | None:
    """Returns None for a tensor that torch cannot index. It is loaded all the same."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    tensor, dtype = tensor.detach(), tensor.dtype
    try:
        # Torch cannot index 8-bit floats, so types of one byte are read as bytes.
        indexable = tensor if dtype.itemsize > 1 else tensor.view(torch.uint8)
        values = _picked(indexable).cpu().view(dtype)
        if not (dtype.is_floating_point and (dtype.itemsize > 1 or dtype in _FLOATS_OF_8_BITS)):
            return _Sample(str(dtype), values.contiguous().view(torch.uint8).numpy().tobytes())
        values = values.to(torch.float32) + 0.0  # -0 equals 0
        return _Sample("floating", values.numpy().tobytes(), bool(values.isnan().any()))
    except (RuntimeError, TypeError):
        return None


_FLOATS_OF_8_BITS = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


def _picked(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sampled values of a tensor, in one dimension. Reads nothing else of it."""
    if tensor.numel() <= _RUNS * _RUN_VALUES:
        return tensor.reshape(-1)
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    return tensor[tuple(index.to(tensor.device) for index in _places(tensor.shape))]


@functools.lru_cache(maxsize=256)
def _places(shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """Returns the indices of the sampled values, by dimension."""
    starts = [i * (shape.numel() - _RUN_VALUES) // (_RUNS - 1) for i in range(_RUNS)]
    places = [start + i for start in starts for i in range(_RUN_VALUES)]
    # From arrays, because a loader makes the model's device torch's default.
    return tuple(torch.from_numpy(index) for index in np.unravel_index(places, shape))
