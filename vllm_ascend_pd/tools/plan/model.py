# SPDX-License-Identifier: Apache-2.0
"""Reads the shape of a model's KV cache from its `config.json`, as vLLM does.

The installed transformers says what the file leaves to the model's code. Where it cannot, such a file is refused.

The caches of DeepSeek V4's layers keep one entry for several tokens. Their sizes are those of vllm-ascend 0.23 on Atlas
A2 and A3 (`models/deepseek_v4.py`, `models/layer/attention/layer.py`).
"""

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_ascend_pd.tools.plan.defaults import as_transformers

BLOCK_SIZES = (32, 64, 128)
"""The values of `--block-size` that vllm-ascend takes for this model."""

RATIOS = (4, 128)
"""The tokens per entry that vllm-ascend's compressor takes. With 0 or 1, a layer has its window alone."""

_LATENT, _INDEX, _SCALE, _STATE = 2, 1, 2, 4  # bytes of an element


@dataclass(frozen=True)
class TensorEntry:
    """An entry of one tensor."""

    dtype: str  # as torch names it
    width: int  # elements
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.width * self.itemsize


@dataclass(frozen=True)
class LayerCache:
    """One of a layer's caches."""

    name: str  # in vllm-ascend, without the layer's name
    tensors: tuple[TensorEntry, ...]
    tokens_per_entry: int = 1
    window: int = 0  # tokens at a prompt's end that are sent. 0: all of them
    block_share: int = 1  # a block has `--block-size` divided by this many entries
    int8: bool = False  # whether decode keeps it in int8, and prefill does not

    def entries(self, block_size: int) -> int:
        """Returns the entries of a block. `block_size`: the engine's `--block-size`."""
        return block_size // self.block_share

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token of a long prompt and one KV head. 0 for a window, whose bytes do not grow with prompts."""
        return 0 if self.window else self._entry_bytes / self.tokens_per_entry

    @property
    def window_bytes(self) -> int:
        """Bytes of a whole window."""
        return self.window * self._entry_bytes

    @property
    def _entry_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def layer_caches(ratio: int, head: int, index: int, window: int, latent_dtype: str) -> tuple[LayerCache, ...]:
    """Returns the caches of a layer. `ratio`: tokens per entry. `head`, `index`: elements of a latent and of an
    indexer's key. `window`: tokens that every layer sees uncompressed. `latent_dtype`: of two bytes."""
    latent = TensorEntry(latent_dtype, head, _LATENT)
    found = [LayerCache("swa_cache", (latent,), window=window)]
    if ratio <= 1:
        return tuple(found)
    found.append(LayerCache("attn", (latent,), ratio))
    found.append(_compressor("compressor.state_cache", ratio, head))
    if ratio == RATIOS[0]:
        keys = (TensorEntry("int8", index, _INDEX), TensorEntry("float16", 1, _SCALE))
        found.append(LayerCache("indexer.k_cache", keys, ratio))
        found.append(_compressor("indexer.compressor.state_cache", ratio, index))
    return tuple(found)


def _compressor(name: str, ratio: int, width: int) -> LayerCache:
    """Returns the cache of what an unfinished entry is computed from. Entries for 4 tokens overlap."""
    both = 2 if ratio == RATIOS[0] else 1
    state = TensorEntry("float32", 2 * both * width, _STATE)  # keys and their scores
    return LayerCache(name, (state,), window=both * ratio, block_share=16 if ratio == RATIOS[0] else 4)


class PlanError(ValueError):
    """The engines do not fit together or to the model, or this command cannot describe the model."""


class UnsaidError(PlanError):
    """`config.json` lacks a field."""


class CacheDtype(enum.StrEnum):
    """The data type of a cache. AUTO is the model's."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FP8 = "fp8"
    INT8 = "int8"

    @property
    def torch_name(self) -> str:
        """The name of the cache tensor's dtype. vLLM stores fp8 as bytes."""
        return "uint8" if self is CacheDtype.FP8 else self.value

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "fp8": 1, "int8": 1}.get(self.value, 2)


class Cached(enum.Enum):
    """What a layer caches."""

    FULL = "full attention"
    WINDOW = "attention within a window"
    STATE = "a state, not keys and values"
    NOTHING = "nothing"


# More layers than any model has: each is looked at.
_MAX_LAYERS = 10_000

# Spellings of `layer_types` and `layers_block_type`.
_LAYER_KINDS = {
    "full_attention": Cached.FULL,
    "attention": Cached.FULL,
    "indexed_attention": Cached.FULL,
    "deepseek_sparse_attention": Cached.FULL,
    "qwen_sparse_attention": Cached.FULL,
    "sliding_attention": Cached.WINDOW,
    "chunked_attention": Cached.WINDOW,
    "linear_attention": Cached.STATE,
    "mamba": Cached.STATE,
    "mamba2": Cached.STATE,
    "conv": Cached.STATE,
    "recurrent": Cached.STATE,
    "mlp": Cached.NOTHING,
    "moe": Cached.NOTHING,
}

# Fields that change the cache in a way that this command does not support. It refuses such models.
_NOT_DESCRIBED = {
    "block_configs": "layers that differ in their KV heads",
    "global_head_dim": "layers that differ in their head size",
    "num_global_key_value_heads": "layers that differ in their KV heads",
    "swa_num_key_value_heads": "layers that differ in their KV heads",
    "swa_head_dim": "layers that differ in their head size",
    "multi_query": "an older way to say how many KV heads there are",
    "multi_query_group_num": "an older way to say how many KV heads there are",
    "is_encoder_decoder": "an encoder with caches of its own",
    "index_kpool": "an index with one entry for several tokens",
}

_COMPRESSING_MODEL = "deepseek_v4"
_COMPRESSED_NOTE = (
    "every rank has all of the compressed caches, which are those of Atlas A2 and A3 (A5 has others); whole blocks are "
    "sent, so short prompts take more bytes"
)

# Fields of models in which only some layers have attention, and no list names them.
_HYBRID_PREFIXES = ("mamba_", "ssm_", "attn_layer_", "hybrid_")

# The model types as which vLLM reads models that have none (by architecture), or that transformers need not know
# (`_CONFIG_REGISTRY` of its `transformers_utils/config.py`).
_READ_AS = {"LongcatFlashForCausalLM": "longcat_flash", "kimi_k2": "deepseek_v3", "deepseek_v32": "deepseek_v3"}

# Two attentions in each layer, numbered as layers of their own.
_TWO_ATTENTIONS = "longcat_flash"

# Fields with the text part of multimodal models, outermost first.
_TEXT_PARTS = ("thinker_config", "text_config", "llm_config", "language_config")

# Fields that transformers is asked for: a model's code fills them in or overrules them.
_ASKED = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "head_dim",
    "num_key_value_heads",
    "num_kv_heads",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "index_head_dim",
    "layer_types",
    "layers_block_type",
    "sliding_window",
    "num_kv_shared_layers",
    *_NOT_DESCRIBED,
)


@dataclass(frozen=True)
class ModelShape:
    """What the size of a model's KV cache depends on."""

    name: str
    cached: tuple[Cached, ...]  # by layer
    attention_heads: int
    kv_heads: int  # 1 for MLA, whose latent every rank has
    mla: bool
    # Elements per head and token in each separate tensor of a layer: K and V. For MLA: the latent, its rotary part and,
    # with sparse attention, the indexer's key, which layers of `without_key` lack.
    widths: tuple[int, ...]
    dtype: CacheDtype
    notes: tuple[str, ...]  # what the figures leave out
    # By layer: the caches of DeepSeek V4, which differ in their sizes. Empty for models with `widths` in all layers.
    compressed: tuple[tuple[LayerCache, ...], ...] = ()
    # Layers that take the indices of an earlier layer, so they have no indexer of their own.
    without_key: frozenset[int] = frozenset()
    # Layers whose K and V (with MLA: whose latent) decode keeps in int8, and prefill does not (C8, FAKQuant).
    int8_layers: frozenset[int] = frozenset()

    @property
    def cached_layers(self) -> int:
        """The number of layers that have a KV cache."""
        return sum(map(bool, self.layers))

    @cached_property
    def layers(self) -> tuple[tuple[LayerCache, ...], ...]:
        """The caches of each layer."""
        return self.compressed or tuple(map(self._caches, range(len(self.cached))))

    def _caches(self, layer: int) -> tuple[LayerCache, ...]:
        if self.cached[layer] not in (Cached.FULL, Cached.WINDOW):
            return ()
        widths = self.widths[:-1] if layer in self.without_key else self.widths
        tensors = tuple(TensorEntry(self.dtype.torch_name, width, self.dtype.itemsize) for width in widths)
        return (LayerCache("attn", tensors, int8=layer in self.int8_layers),)

    @cached_property
    def kinds(self) -> tuple[LayerCache, ...]:
        """The different caches of `layers`."""
        return tuple(dict.fromkeys(cache for caches in self.layers for cache in caches))


def read_model(path: Path, dtype: CacheDtype = CacheDtype.AUTO) -> ModelShape:
    """Reads the model whose `config.json` is `path` or in that folder. Raises PlanError or OSError."""
    file = path / "config.json" if path.is_dir() else path
    shape = parse_model(_read_object(file), dtype)
    described = file.with_name(QUANTIZATION)
    return shape if shape.compressed or not described.exists() else _quantized(shape, described)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"{file} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise PlanError(f"{file} is not a JSON object")
    return read


QUANTIZATION = "quant_model_description.json"
"""Where ModelSlim says how a checkpoint is quantized. It lies beside `config.json`."""

INT8_KEYS = {"fa_quant_type": "fa_k.scale", "kv_cache_type": "k_proj.kv_cache_scale"}
"""Keys there by which vllm-ascend keeps decode's caches in int8, of MLA (FAKQuant) and of dense attention (C8), and a
part of the names of its layers' scales (`quantization/modelslim_config.py`)."""


def _quantized(shape: ModelShape, file: Path) -> ModelShape:
    """Returns the shape with the layers that are in int8 on decode. Raises PlanError or OSError."""
    described = _read_object(file)
    scales = [scale for key, scale in INT8_KEYS.items() if described.get(key)]
    found = {
        int(number[1]) for name in described for scale in scales if scale in name and (number := _IN_NAME.search(name))
    }
    layers = frozenset(found & set(range(len(shape.cached))))
    if not layers:
        return shape
    if len(shape.widths) > 2 or shape.dtype.itemsize != 2:
        raise PlanError(f"{file} has layers in int8, of an attention or a type that is not supported with them")
    note = f"{len(layers)} layers are in int8 on decode; prefill keeps 16 bits and quantizes what it sends"
    return replace(shape, int8_layers=layers, notes=(*shape.notes, note))


_IN_NAME = re.compile(r"\.(\d+)\.")


def parse_model(config: Mapping[str, Any], dtype: CacheDtype = CacheDtype.AUTO) -> ModelShape:
    """Raises PlanError, which names the missing or unsupported field."""
    parts = [config]
    for name in _TEXT_PARTS:
        inner = parts[-1].get(name)
        parts += [inner] if isinstance(inner, dict) else []
    text = parts[-1]
    model_types = [each for part in reversed(parts) for each in _model_types(part)]
    known, problems = as_transformers(text, model_types, _ASKED)
    try:
        return _parse(config, {**text, **known}, model_types[0] if model_types else None, dtype, is_known=bool(known))
    except UnsaidError as error:
        why = "; ".join(problems) or "its class leaves it out"
        raise UnsaidError(
            f"{error}, and transformers does not fill it in ({why}): install the transformers that comes with vLLM, or "
            "add the field to a copy of the file"
        ) from None


def _model_types(part: Mapping[str, Any]) -> list[str]:
    """Returns the part's model type, and what else it is read as."""
    own = [str(part["model_type"])] if part.get("model_type") else []
    return own + [_READ_AS[name] for name in (*own, *_names(part, "architectures")) if name in _READ_AS]


def _parse(
    config: Mapping[str, Any], text: Mapping[str, Any], model_type: str | None, dtype: CacheDtype, *, is_known: bool
) -> ModelShape:
    """`text`: the text part of `config`, with what transformers fills in. `is_known`: whether it knows the model, so
    that all other models' rules hold for a field that it leaves open."""
    for field, meaning in _NOT_DESCRIBED.items():
        if text.get(field):
            raise PlanError(f"config.json has {field}, {meaning}: this command does not describe such models")
    heads = _number(text, "num_attention_heads")
    if text.get("compress_ratios"):
        return _compressed(config, text, model_type, dtype)
    if model_type == _TWO_ATTENTIONS and text.get("num_layers"):
        text = {**text, "num_hidden_layers": 2 * _layers(text, "num_layers")}
    cached = _cached(text, is_known)
    notes = _notes_of_kinds(text, cached)
    if model_type == _TWO_ATTENTIONS:
        notes.append("each layer of this model has two attentions, which are counted as layers here")
    notes += _notes_of_drafts(text)
    chosen = _dtype(config, text, notes) if dtype is CacheDtype.AUTO else dtype
    mla = text.get("kv_lora_rank") is not None
    if mla:
        kv_heads, widths = 1, _latent_widths(text, chosen)
    else:
        kv_heads = _number(text, "num_key_value_heads", text.get("num_kv_heads") or (heads if is_known else None))
        widths = _head_widths(text, heads, is_known)
    name = _name(config, text)
    without = _without_key(text, len(cached)) if len(widths) > 2 else frozenset()
    if without and not text.get("indexer_types"):
        notes.append(
            f"{len(without)} layers take the indices of an earlier one and are counted without an indexer's key, as in "
            "vLLM 0.32; vllm-ascend 0.23 keeps a key there unless config.json marks them in indexer_types"
        )
    return ModelShape(name, cached, heads, kv_heads, mla, widths, chosen, tuple(notes), without_key=without)


def _compressed(
    config: Mapping[str, Any], text: Mapping[str, Any], model_type: str | None, dtype: CacheDtype
) -> ModelShape:
    """Returns the shape of DeepSeek V4."""
    if model_type != _COMPRESSING_MODEL:
        raise PlanError(f"config.json has compress_ratios: only {_COMPRESSING_MODEL} is described, not {model_type}")
    layers, ratios = _layers(text), text["compress_ratios"]
    # Those of the prediction layers follow.
    if not isinstance(ratios, list) or len(ratios) < layers:
        raise PlanError(f"config.json: compress_ratios is not a list with a number for each of {layers} layers")
    ratios = ratios[:layers]
    if unknown := [ratio for ratio in ratios if ratio not in (0, 1, *RATIOS)]:
        raise PlanError(f"config.json: compress_ratios has {unknown[0]!r}, and vllm-ascend takes 0, 4 and 128")
    notes = [*_notes_of_drafts(text), _COMPRESSED_NOTE]
    chosen = _dtype(config, text, notes) if dtype is CacheDtype.AUTO else dtype
    if chosen.itemsize != 2:
        raise PlanError(f"with compressed caches, a KV cache of {chosen.value} has another layout: not supported")
    head, index, window = (_number(text, field) for field in ("head_dim", "index_head_dim", "sliding_window"))
    caches = tuple(layer_caches(ratio, head, index, window, chosen.torch_name) for ratio in ratios)
    cached = tuple(Cached.FULL if ratio > 1 else Cached.WINDOW for ratio in ratios)
    heads = _number(text, "num_attention_heads")
    return ModelShape(_name(config, text), cached, heads, 1, True, (head,), chosen, tuple(notes), caches)


def _name(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    return (*_names(config, "architectures"), str(text.get("model_type") or "a model without a name"))[0]


def _notes_of_drafts(text: Mapping[str, Any]) -> list[str]:
    if extra := text.get("num_nextn_predict_layers"):
        return [f"speculating with the model's own prediction layers ({extra}) adds their caches on both sides"]
    return []


def _number(text: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = text.get(field)
    value = default if value is None else value
    if value is None:
        raise UnsaidError(f"config.json does not say {field}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"config.json: {field} is {value!r}, not a positive number")
    return value


def _layers(text: Mapping[str, Any], field: str = "num_hidden_layers") -> int:
    if (layers := _number(text, field)) > _MAX_LAYERS:
        raise PlanError(f"config.json: {field} is {layers}, and {_MAX_LAYERS} at most are counted")
    return layers


def _names(part: Mapping[str, Any], field: str) -> list[str]:
    names = part.get(field)
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PlanError(f"config.json: {field} is {names!r}, not a list of names")
    return names


def _cached(text: Mapping[str, Any], is_known: bool) -> tuple[Cached, ...]:
    kinds = _kinds(text, is_known, _layers(text))
    if text.get("num_kv_shared_layers"):
        # The last ones, which read what earlier layers wrote.
        shared = min(_number(text, "num_kv_shared_layers"), len(kinds))
        kinds = (*kinds[: len(kinds) - shared], *[Cached.NOTHING] * shared)
    if not {Cached.FULL, Cached.WINDOW} & set(kinds):
        raise PlanError("no layer of this model has its own attention, so there is no KV cache to transfer")
    return kinds


def _kinds(text: Mapping[str, Any], is_known: bool, layers: int) -> tuple[Cached, ...]:
    kinds = _numbered_kinds(text, layers) or _names(text, "layer_types") or _names(text, "layers_block_type")
    if not kinds:
        if not is_known or "layer_types" in text:
            raise UnsaidError("config.json does not say layer_types")
        if text.get("sliding_window") and "max_window_layers" in text:
            raise PlanError("config.json has max_window_layers but no layer_types: add which layers see the window")
        if hybrid := [field for field in text if field.startswith(_HYBRID_PREFIXES)]:
            raise PlanError(f"config.json has {hybrid[0]} but no layer_types: add which layers have attention")
        kinds = ["sliding_attention" if text.get("sliding_window") else "full_attention"] * layers
    if unknown := sorted(set(kinds) - _LAYER_KINDS.keys()):
        raise PlanError(f"config.json: this command does not know layers of kind {unknown[0]}")
    if len(kinds) != layers:
        raise PlanError(f"config.json lists {len(kinds)} kinds of layers for {layers} layers")
    return tuple(_LAYER_KINDS[kind] for kind in kinds)


def _numbered_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """Returns the kinds of layers where a list has a number for each (MiniMax), or the numbers of some, from 1 on
    (Kimi Linear). Empty if there is no such list."""
    if types := text.get("attn_type_list"):
        if not isinstance(types, list) or any(each not in (0, 1) for each in types):
            raise PlanError(f"config.json: attn_type_list is {types!r}, not a list of 0 and 1")
        return ["full_attention" if each else "linear_attention" for each in types]
    if some := text.get("linear_attn_config"):
        full = some.get("full_attn_layers") if isinstance(some, dict) else None
        if not isinstance(full, list):
            raise PlanError("config.json: linear_attn_config has no list full_attn_layers")
        return ["full_attention" if layer + 1 in full else "linear_attention" for layer in range(layers)]
    return []


def _without_key(text: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Returns the layers that have no indexer, as vLLM's DeepSeek model decides it (IndexCache)."""
    if types := _names(text, "indexer_types"):
        return frozenset(layer for layer, kind in enumerate(types[:layers]) if kind.lower() == "shared")
    if (pattern := text.get("index_topk_pattern")) is not None:
        if not isinstance(pattern, str):
            raise PlanError(f"config.json: index_topk_pattern is {pattern!r}, not a text of F and S")
        return frozenset(layer for layer, kind in enumerate(pattern[:layers]) if kind == "S")
    every, offset = _number(text, "index_topk_freq", 1), text.get("index_skip_topk_offset", 2)
    if not isinstance(offset, int):
        raise PlanError(f"config.json: index_skip_topk_offset is {offset!r}, not a number")
    return frozenset(layer for layer in range(layers) if max(layer - offset + 1, 0) % every)


def _notes_of_kinds(text: Mapping[str, Any], cached: tuple[Cached, ...]) -> list[str]:
    notes = []
    if states := cached.count(Cached.STATE):
        notes.append(
            f"{states} layers have a state instead of keys and values, sent once per prompt: not in the figures"
        )
        notes.append("vLLM chooses the block size of such models itself, see its log: give it with --block-size")
    if windows := cached.count(Cached.WINDOW):
        size = text.get("sliding_window") or text.get("attention_chunk_size") or "unknown"
        notes.append(f"{windows} layers have a window of {size} tokens: less is sent for them if the prompt is longer")
    return notes


def _latent_widths(text: Mapping[str, Any], dtype: CacheDtype) -> tuple[int, ...]:
    if dtype.itemsize == 1:
        raise PlanError(f"with MLA, a KV cache of {dtype.value} has another memory layout: not supported")
    widths = (_number(text, "kv_lora_rank"), _number(text, "qk_rope_head_dim"))
    return (*widths, _number(text, "index_head_dim")) if text.get("index_head_dim") else widths


def _head_widths(text: Mapping[str, Any], heads: int, is_known: bool) -> tuple[int, ...]:
    # 0 stands for the default, too.
    default = _number(text, "hidden_size") // heads if is_known else None
    key = _number({"head_dim": text.get("head_dim") or default}, "head_dim")
    value = text.get("v_head_dim") or key
    if value != key:
        raise PlanError(f"keys of {key} and values of {value} elements per head: not supported")
    return (key, key)


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], notes: list[str]) -> CacheDtype:
    names = (part.get(field) for part in (config, text) for field in ("dtype", "torch_dtype"))
    name = str(next((name for name in names if name), "")).removeprefix("torch.")
    if name in ("bfloat16", "float16"):
        return CacheDtype(name)
    # vLLM runs float32 models in half precision unless told otherwise.
    notes.append(
        f"config.json says {name or 'no'} dtype, so the KV cache is assumed to be bfloat16: see --kv-cache-dtype"
    )
    return CacheDtype.BFLOAT16
