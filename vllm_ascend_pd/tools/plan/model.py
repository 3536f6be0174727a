# SPDX-License-Identifier: Apache-2.0
"""Reads what a model's layers keep from its `config.json`, as vLLM does.

The installed transformers says what the file leaves to the model's code. Where it cannot, such a file is refused.
"""

import enum
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_ascend_pd.core.layout import Packing
from vllm_ascend_pd.tools.plan.defaults import as_transformers
from vllm_ascend_pd.tools.plan.layers import (
    RATIOS,
    LayerCache,
    ModelShape,
    TensorEntry,
    compressed_caches,
    linear_state,
)


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
    CHUNK = "attention within chunks"
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
    "chunked_attention": Cached.CHUNK,
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
    "attention_other_setting": "layers that differ in their KV heads",
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
# (`_CONFIG_REGISTRY` of its `transformers_utils/config.py`). Hunyuan-Large has a type of its own for the same code.
_READ_AS = {
    "LongcatFlashForCausalLM": "longcat_flash",
    "kimi_k2": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "hunyuan": "hunyuan_v1_moe",
}

# Two attentions in each layer, numbered as layers of their own.
_TWO_ATTENTIONS = "longcat_flash"

# Fields with the text part of multimodal models, outermost first.
_TEXT_PARTS = ("thinker_config", "text_config", "llm_config", "language_config")

# Gated DeltaNet's heads of keys and their elements, those of values, and the convolution's kernel.
_DELTA_NET = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)

# The same of Mamba 2, as models spell it: groups of B and C, their elements, heads, elements of a head, kernel.
_MAMBA_2 = (
    ("mamba_n_groups", "mamba_d_state", "mamba_n_heads", "mamba_d_head", "mamba_d_conv"),
    ("n_groups", "ssm_state_size", "mamba_num_heads", "mamba_head_dim", "conv_kernel"),
)

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
    "attention_chunk_size",
    "num_kv_shared_layers",
    *_DELTA_NET,
    *_MAMBA_2[0],
    *_MAMBA_2[1],
    *_NOT_DESCRIBED,
)


def read_model(path: Path, dtype: CacheDtype = CacheDtype.AUTO) -> ModelShape:
    """Reads the model whose `config.json` is `path` or in that folder. Raises PlanError or OSError."""
    file = path / "config.json" if path.is_dir() else path
    shape = parse_model(_read_object(file), dtype)
    described = file.with_name(QUANTIZATION)
    return shape if shape.is_compressed or not described.exists() else _quantized(shape, described)


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
    layers = found & set(range(len(shape.layers)))
    if not layers:
        return shape
    caches = {cache for layer in layers for cache in shape.layers[layer]}
    if any(len(cache.tensors) > 2 or any(tensor.itemsize != 2 for tensor in cache.tensors) for cache in caches):
        raise PlanError(f"{file} has layers in int8, of an attention or a type that is not supported with them")
    packings = (Packing.INT8_NZ, Packing.NZ if shape.mla else Packing.INT8_NZ)
    packed = tuple(
        tuple(replace(cache, packings=packings) if number in layers else cache for cache in kept)
        for number, kept in enumerate(shape.layers)
    )
    note = f"{len(layers)} layers are in int8 on decode; prefill keeps 16 bits and quantizes what it sends"
    return replace(shape, layers=packed, notes=(*shape.notes, note))


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
        raise UnsaidError(f"{error}, and transformers does not fill it in ({why}): {_advice(problems)}") from None


def _advice(problems: Iterable[str]) -> str:
    """Returns what helps if `config.json` lacks a field, by what kept transformers from filling it in."""
    if any("ModuleNotFoundError" in problem for problem in problems):
        return "install the transformers that comes with vLLM, or add the field to a copy of the file"
    return "add the field to a copy of the file; vLLM may have a configuration of its own for this model, which has it"


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
    kinds = _cached(text, is_known)
    notes = []
    if model_type == _TWO_ATTENTIONS:
        notes.append("each layer of this model has two attentions, which are counted as layers here")
    notes += _notes_of_drafts(text)
    model_dtype = _dtype(config, text, notes if dtype is CacheDtype.AUTO else [])
    chosen = model_dtype if dtype is CacheDtype.AUTO else dtype
    mla = text.get("kv_lora_rank") is not None
    tensors = _latent(text, chosen) if mla else _keys_and_values(text, heads, is_known, chosen)
    without = _without_key(text, len(kinds)) if len(tensors) > 2 else frozenset()
    if without and not text.get("indexer_types"):
        notes.append(
            f"{len(without)} layers take the indices of an earlier one and are counted without an indexer's key, as in "
            "vLLM 0.32; vllm-ascend 0.23 keeps a key there unless config.json marks them in indexer_types"
        )
    keeps = {kind: _caches(text, kind, tensors, model_dtype) for kind in kinds}
    layers = [
        tuple(replace(cache, tensors=tensors[:-1]) for cache in keeps[kind])
        if layer in without and kind is Cached.FULL
        else keeps[kind]
        for layer, kind in enumerate(kinds)
    ]
    if states := keeps.get(Cached.STATE):
        if not states[0].tensors:
            unknown = f"{kinds.count(Cached.STATE)} layers have a state of a kind that this command does not know"
            notes.append(f"{unknown}: it is sent once per prompt, and is not in the figures")
        notes.append("vLLM chooses the block size of such models itself, see its log: give it with --block-size")
    return ModelShape(_name(config, text), heads, tuple(layers), tuple(notes), mla)


def _caches(
    text: Mapping[str, Any], kind: Cached, tensors: tuple[TensorEntry, ...], model_dtype: CacheDtype
) -> tuple[LayerCache, ...]:
    """Returns the caches of a layer of this kind. `tensors`: of attention."""
    if kind is Cached.NOTHING:
        return ()
    if kind is Cached.STATE:
        return (_state(text, model_dtype),)
    window = _number(text, "sliding_window") if kind is Cached.WINDOW else 0
    chunk = _number(text, "attention_chunk_size") if kind is Cached.CHUNK else 0
    return (LayerCache("attn", tensors, window=window, chunk=chunk),)


def _state(text: Mapping[str, Any], model_dtype: CacheDtype) -> LayerCache:
    """Returns the state of a layer, in the types that vLLM takes unless told otherwise. Without tensors if its kind is
    not known."""
    kimi = text.get("linear_attn_config")
    fields: Iterable[Any] = ()
    ssm = text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype")
    if isinstance(kimi, dict):
        of_head = (kimi.get("num_heads"), kimi.get("head_dim"))
        fields, ssm = (*of_head, *of_head, kimi.get("short_conv_kernel_size")), "float32"
    else:
        fields = next((map(text.get, names) for names in (_DELTA_NET, *_MAMBA_2) if text.get(names[2])), ())
    sizes = [size for size in fields if isinstance(size, int) and size > 0]
    if len(sizes) != len(_DELTA_NET):
        return LayerCache("state", (), is_state=True)
    conv = (model_dtype.torch_name, model_dtype.itemsize)
    recurrent = (str(ssm), CacheDtype(ssm).itemsize) if ssm in ("float32", "float16", "bfloat16") else conv
    return linear_state((sizes[0], sizes[1]), (sizes[2], sizes[3]), sizes[4], conv, recurrent)


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
    caches = tuple(compressed_caches(ratio, head, index, window, chosen.torch_name) for ratio in ratios)
    return ModelShape(_name(config, text), _number(text, "num_attention_heads"), caches, tuple(notes), mla=True)


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


def _cached(text: Mapping[str, Any], is_known: bool) -> list[Cached]:
    kinds = _kinds(text, is_known, _layers(text))
    if text.get("num_kv_shared_layers"):
        # The last ones, which read what earlier layers wrote.
        shared = min(_number(text, "num_kv_shared_layers"), len(kinds))
        kinds[len(kinds) - shared :] = [Cached.NOTHING] * shared
    if text.get("use_cla"):
        # Layers in groups of so many, whose first one writes for all (Hunyuan's cross-layer attention).
        group = _number(text, "cla_share_factor")
        kinds = [Cached.NOTHING if layer % group else kind for layer, kind in enumerate(kinds)]
    if not {Cached.FULL, Cached.WINDOW, Cached.CHUNK} & set(kinds):
        raise PlanError("no layer of this model has its own attention, so there is no KV cache to transfer")
    return kinds


def _kinds(text: Mapping[str, Any], is_known: bool, layers: int) -> list[Cached]:
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
    return [_LAYER_KINDS[kind] for kind in kinds]


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


def _latent(text: Mapping[str, Any], dtype: CacheDtype) -> tuple[TensorEntry, ...]:
    """Returns MLA's latent, its rotary part and, with sparse attention, the indexer's key."""
    if dtype.itemsize == 1:
        raise PlanError(f"with MLA, a KV cache of {dtype.value} has another memory layout: not supported")
    widths = [_number(text, "kv_lora_rank"), _number(text, "qk_rope_head_dim")]
    widths += [_number(text, "index_head_dim")] if text.get("index_head_dim") else []
    return tuple(TensorEntry(dtype.torch_name, dtype.itemsize, 1, width) for width in widths)


def _keys_and_values(
    text: Mapping[str, Any], heads: int, is_known: bool, dtype: CacheDtype
) -> tuple[TensorEntry, TensorEntry]:
    """`heads`: of attention."""
    kv_heads = _number(text, "num_key_value_heads", text.get("num_kv_heads") or (heads if is_known else None))
    # 0 stands for the default, too.
    default = _number(text, "hidden_size") // heads if is_known else None
    given = text.get("head_dim") or text.get("attention_head_dim")
    width = _number({"head_dim": given or default}, "head_dim")
    values = text.get("v_head_dim") or width
    if values != width:
        raise PlanError(f"keys of {width} and values of {values} elements per head: not supported")
    entry = TensorEntry(dtype.torch_name, dtype.itemsize, kv_heads, width)
    return entry, entry


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
