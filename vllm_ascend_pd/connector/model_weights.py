# SPDX-License-Identifier: Apache-2.0
"""Which weights an engine has: the fingerprint of the files that vLLM has loaded, and updates since."""

import functools
import glob
import logging
import os
from typing import TYPE_CHECKING

import msgspec

from vllm_ascend_pd.connector.patches import vllm_0_23_to_0_32_weight_updates
from vllm_ascend_pd.core.fingerprint import of_tensors
from vllm_ascend_pd.core.weights import UNKNOWN, LoadedWeights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

# Load formats that read whole tensors of a checkpoint's safetensors files.
_FORMATS = (
    *("auto", "hf", "safetensors", "mistral"),
    *("fastsafetensors", "instanttensor", "runai_streamer", "bitsandbytes"),
)
_READ_S = 60.0
"""How long reading may take. Reading is done once, when a rank starts."""


class _UnknownError(Exception):
    """Why the files of the weights are not known."""


class _Index(msgspec.Struct):
    """Names of tensors, and the files that they are in."""

    weight_map: dict[str, str]


def loaded_weights(vllm_config: "VllmConfig", logs: bool) -> LoadedWeights:
    """Returns the record of the weights that this rank has just loaded. `logs`: whether it logs which these are."""
    read = functools.partial(_fingerprint, vllm_config, logs)
    loaded = LoadedWeights(read(None))
    vllm_0_23_to_0_32_weight_updates.follow(loaded, read)
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
        found = of_tensors(_files(vllm_config, folder), _READ_S)
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
