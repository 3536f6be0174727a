# SPDX-License-Identifier: Apache-2.0
"""Digests of what an engine computes with: its checkpoint, and each LoRA adapter, by content."""

import functools
import glob
import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from vllm_ascend_pd.core.weights import UNKNOWN, LoadedWeights, of_file, of_tensors

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest


logger = logging.getLogger(__name__)

# Load formats that read whole tensors of a checkpoint's safetensors files.
_FORMATS = (
    *("auto", "hf", "safetensors", "mistral"),
    *("fastsafetensors", "instanttensor", "runai_streamer", "bitsandbytes"),
)
_CHECKPOINT_READ_S = 60.0
"""How long reading may take. Reading is done once, when a rank starts."""


class _UnknownError(Exception):
    """Why the files of the weights are not known."""


class _Index(msgspec.Struct):
    """Names of tensors, and the files that they are in."""

    weight_map: dict[str, str]


def loaded_weights(
    vllm_config: "VllmConfig", follow: Callable[[LoadedWeights, Callable[[str | None], str]], None], logs: bool
) -> LoadedWeights:
    """Returns the record of the weights that this rank has just loaded.

    `follow` records their updates from now on. `logs`: whether the rank logs which weights these are.
    """
    read = functools.partial(_fingerprint, vllm_config, logs)
    loaded = LoadedWeights(read(None))
    follow(loaded, read)
    return loaded


def local_folder(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """Returns the folder `model`, or the local copy of the model hub's repository `model`. Downloads nothing.

    Raises OSError if neither is here. `cache`: the folder of local copies, if it is not the hub's own.
    """
    path = os.path.expanduser(model)
    if os.path.isabs(path) or os.path.exists(path):
        return os.path.abspath(path)
    from huggingface_hub import snapshot_download

    return str(snapshot_download(repo_id=path, revision=revision, cache_dir=cache, local_files_only=True))


def _fingerprint(vllm_config: "VllmConfig", logs: bool, folder: str | None) -> str:
    """Returns the fingerprint of the files in `folder`, or in the model's if that is None; UNKNOWN if there is none."""
    try:
        found = of_tensors(_files(vllm_config, folder), _CHECKPOINT_READ_S)
    except (OSError, ValueError, msgspec.MsgspecError, _UnknownError) as error:
        if logs:
            logger.warning(
                "this engine's weights are not known (%s), so they are not compared with the other engines'", error
            )
        return UNKNOWN
    if logs:
        logger.info("the model's weights are %s", found)
    return found


def _files(vllm_config: "VllmConfig", folder: str | None) -> list[str]:
    """Returns the files that vLLM's loader reads (`DefaultModelLoader._prepare_weights`)."""
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format not in _FORMATS:
        raise _UnknownError(f"load format {load_format} does not read them from safetensors files of a checkpoint")
    if folder is None:
        if remote := getattr(model, "model_weights", ""):
            raise _UnknownError(f"they are at {remote}")
        folder = local_folder(model.model, model.revision, load.download_dir)
    name = "consolidated" if load_format in ("auto", "mistral") else ""
    files = glob.glob(os.path.join(glob.escape(folder), f"{name}*.safetensors"))
    if not files and load_format == "auto":
        name, files = "", glob.glob(os.path.join(glob.escape(folder), "*.safetensors"))
    if not files:
        raise _UnknownError(f"there are no safetensors files in {folder}")
    index = os.path.join(folder, f"{name or 'model'}.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, "rb") as file:
            named = {*msgspec.json.decode(file.read(), type=_Index).weight_map.values()}
        files = [path for path in files if os.path.basename(path) in named]
    return files


# Digests of LoRA adapters by content: the same name or path may have other weights on another engine.

_MAX_CACHED = 1024
"""How many adapters' digests are cached. The least recently used one is dropped first."""
_MAX_NAMES = 1 << 16
"""How many adapters' names may each have one content that the prefix cache knows by the name."""

_UNREAD = "unread:"
"""Begins the digest of an adapter whose files cannot be read."""

_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The order is vLLM's."""

_MAX_CONFIG_BYTES = 1 << 20
_ADAPTER_READ_S = 10.0
"""How long reading an adapter may take."""
_MAX_READING = 16
"""How many adapters are read at once. Those on a file system that hangs count until it answers."""
# PEFT's keys that change what the tensors mean. The other keys name the base model, describe training, or are versions.
_CONFIG_KEYS = (
    "r",
    "lora_alpha",
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "bias",
    "lora_bias",
    "use_rslora",
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
    "layer_replication",
    "alora_invocation_tokens",
)
_LISTS_WITHOUT_ORDER = ("target_modules", "target_parameters", "modules_to_save")


_K = TypeVar("_K")
_V = TypeVar("_V")


class _Recent(OrderedDict[_K, _V]):
    """A cache of the `_MAX_CACHED` entries used last."""

    def remember(self, key: _K, make: Callable[[], _V]) -> _V:
        if key not in self:
            self[key] = make()
            while len(self) > _MAX_CACHED:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]


# Digests of loaded adapters. Used by the scheduler's thread.
_loaded: _Recent[tuple[str, int], str] = _Recent()
# Adapter's name -> the first content that it stood for. Entries are never dropped, and at most `_MAX_NAMES` made.
# Used by the scheduler's thread.
_first_contents: dict[str, str] = {}


class AdapterContent(NamedTuple):
    """What is known of an adapter's files."""

    # `adapter_digest`.
    digest: str
    # `content_beyond_name`.
    beyond_name: str


@dataclass
class AdapterRead:
    """What `Adapters` knows of an adapter."""

    # What counts. None: nothing yet.
    latest: AdapterContent | None = None
    # Since when the files are to be read, in monotonic seconds. None: they are not.
    since: float | None = None
    # The read, once it has a thread.
    reading: "Future[str | Exception] | None" = None


class Adapters:
    """Reads adapters' files. Each read has a thread of its own (`pd-adapters`): a file system that hangs holds up only
    the adapters on it.

    The scheduler's thread calls all methods. None of them waits. An adapter that has not been read within
    `_ADAPTER_READ_S` counts as one that cannot be read, until it has been.
    """

    def __init__(self) -> None:
        self._known: _Recent[tuple[str, int, str], AdapterRead] = _Recent()
        # Reads that have threads, at most `_MAX_READING`.
        self._reading: list[Future[str | Exception]] = []

    def read(self, adapter: "LoRARequest") -> AdapterRead:
        """Begins to read the adapter's files. Until that has ended, what was read before counts, if anything.

        Nothing counts that was read before if workers read the files anew in every step (`load_inplace`).
        """
        known = self._of(adapter)
        if known.since is None:
            known.since = time.monotonic()
        self._begin(known, adapter)
        if getattr(adapter, "load_inplace", False):
            known.latest = None
        return known

    def content(self, adapter: "LoRARequest", known: AdapterRead) -> AdapterContent | None:
        """Returns None if the adapter has not been read yet. `known`: as `read` returned it, since it may be one of too
        many to be remembered."""
        if known.since is None:
            return known.latest
        self._begin(known, adapter)
        if known.reading is not None and known.reading.done():
            known.latest = _content_of(adapter, known.reading.result())
            known.since = known.reading = None
        elif known.latest is None and time.monotonic() - known.since > _ADAPTER_READ_S:
            known.latest = _content_of(adapter, TimeoutError(f"it was not read within {_ADAPTER_READ_S:g} s"))
        return known.latest

    def _begin(self, known: AdapterRead, adapter: "LoRARequest") -> None:
        """Begins the read if it has no thread, and there may be another one."""
        if known.reading is None:
            self._reading = [reading for reading in self._reading if not reading.done()]
            if len(self._reading) < _MAX_READING:
                known.reading = _start(functools.partial(read_adapter, adapter))
                self._reading.append(known.reading)

    def _of(self, adapter: "LoRARequest") -> AdapterRead:
        return self._known.remember((adapter.lora_name, adapter.lora_int_id, adapter.lora_path), AdapterRead)


def _start(function: Callable[[], _V]) -> "Future[_V]":
    """Runs `function`, which raises nothing, on a thread of its own. A process that ends does not wait for it."""
    future: Future[_V] = Future()
    threading.Thread(target=lambda: future.set_result(function()), name="pd-adapters", daemon=True).start()
    return future


def read_adapter(adapter: "LoRARequest") -> str | Exception:
    """Returns a digest of the content of an adapter's files, or why they cannot be read. Any thread may call it.

    The digest does not depend on where the files are. It covers the settings in `adapter_config.json` that change what
    the weights mean, and samples of each tensor. That takes milliseconds. Unchanged files are read once. Nothing is
    downloaded.
    """
    try:
        return _digest_of_folder(local_folder(adapter.lora_path))
    except Exception as error:  # noqa: BLE001 - the files are the user's, and the scheduler must go on
        return error


def unread_adapter(adapter: "LoRARequest") -> str:
    """Returns the digest of an adapter whose files are not known. It equals that of an engine that does not know them
    either."""
    return f"{_UNREAD}{adapter.lora_name}"


def _content_of(adapter: "LoRARequest", found: str | Exception) -> AdapterContent:
    digest = adapter_digest(adapter, found)
    return AdapterContent(digest, content_beyond_name(adapter, digest))


def adapter_digest(adapter: "LoRARequest", found: str | Exception) -> str:
    """Returns the digest of an adapter's content. `found`: as `read_adapter` returns it.

    Two cases have no digest of content:
    - The files cannot be read here: `unread_adapter`.
    - The files changed after the engine loaded the adapter, and it was not loaded again: `changed:RANDOM`. It equals no
      other digest, since each worker may have either content.
    """
    if isinstance(found, Exception):
        _warn(
            "LoRA adapter %s at %s cannot be read (%s): it is compared with the other engines' by its name alone",
            adapter.lora_name,
            adapter.lora_path,
            repr(found),
        )
        return unread_adapter(adapter)
    if getattr(adapter, "load_inplace", False):  # workers read the files again for every step with the adapter
        return found
    loaded = _loaded.remember((adapter.lora_name, adapter.lora_int_id), lambda: found)
    if loaded != found:
        _warn(
            "LoRA adapter %s: the files at %s changed after it was loaded (%s): its requests fail until it is unloaded "
            "and loaded again",
            adapter.lora_name,
            adapter.lora_path,
            f"{loaded} is now {found}",
        )
        return f"changed:{secrets.token_hex(8)}"
    return found


def content_beyond_name(lora_request: "LoRARequest", content: str) -> str:
    """Returns what tells an adapter apart from the first one of its name; "" for that first one. `content`: its digest.

    The prefix cache needs it: vLLM 0.23 knows an adapter there by its name alone, vLLM 0.30 by its name and path. So KV
    of replaced files would still be found.
    """
    if content.startswith(_UNREAD):  # each load has an id of its own
        content = f"{content} {lora_request.lora_int_id}"
    if lora_request.lora_name not in _first_contents and len(_first_contents) < _MAX_NAMES:
        _first_contents[lora_request.lora_name] = content
    return "" if _first_contents.get(lora_request.lora_name) == content else content


@functools.lru_cache(_MAX_CACHED)
def _warn(message: str, *about: str) -> None:
    """Logs a warning once."""
    logger.warning(message, *about)


def _digest_of_folder(folder: str) -> str:
    config = os.path.join(folder, _CONFIG_FILE)
    weights = next(filter(os.path.isfile, (os.path.join(folder, name) for name in _WEIGHTS_FILES)), None)
    if weights is None:
        raise FileNotFoundError(f"none of {', '.join(_WEIGHTS_FILES)} in {folder}")
    return _digest_of_files(config, weights, _state(config), _state(weights))


@functools.lru_cache(_MAX_CACHED)
def _digest_of_files(config: str, weights: str, *states: tuple[int, ...]) -> str:
    """`states`: of both files, so that they are read again when one has changed."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(_settings(config))
    is_tensors = weights.endswith(".safetensors")
    digest.update((of_tensors([weights], _ADAPTER_READ_S) if is_tensors else of_file(weights)).encode())
    return digest.hexdigest()


def _state(path: str) -> tuple[int, ...]:
    """Returns a value that changes whenever the file's content does."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _settings(path: str) -> bytes:
    """Returns the settings that matter, as canonical JSON. Settings that are off are left out."""
    with open(path, "rb") as file:
        text = file.read(_MAX_CONFIG_BYTES + 1)
    if len(text) > _MAX_CONFIG_BYTES:
        raise ValueError(f"{path} is longer than {_MAX_CONFIG_BYTES} bytes")
    config = msgspec.json.decode(text, type=dict[str, Any])
    said = {key: config[key] for key in _CONFIG_KEYS if config.get(key) not in (None, False, [], {}, "none")}
    for key in _LISTS_WITHOUT_ORDER:
        if isinstance(said.get(key), list):
            said[key] = sorted(map(str, said[key]))
    return json.dumps(said, sort_keys=True).encode()
