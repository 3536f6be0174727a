# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, made once and shared by every engine that is started.

`--load-format dummy` will not do: its weights may depend on the tensor-parallel size. These are saved as
real checkpoints, float32 where the backend can run that, so that engines of every size compute the same
function. Their weights are large enough (`initializer_range`) for attention to decide the next token: with
the usual 0.02 the last prompt token alone would, and a KV cache full of garbage would go unnoticed.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import string
import tempfile
from pathlib import Path
from typing import Any

RECIPE = 2
"""Raise it whenever the code below makes other files from the same `ModelSpec`: it is part of the key."""

SLOW_DECAY = -4.0
"""`A_log` of layers with a state. As initialized, a token would wipe out most of what the ones before it left there,
and a state that got lost would go unnoticed."""

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(len(SPECIAL_TOKENS))
FIRST_TEXT_TOKEN = len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Everything that decides a model's weights. `family` is transformers' `model_type`, `config` what its
    configuration has beyond the sizes here, as pairs so that the spec stays hashable."""

    name: str
    family: str = "llama"
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 32
    hidden: int | None = None
    """None: as wide as all heads."""
    intermediate_size: int = 512
    vocab_size: int = 512
    max_positions: int = 4096
    initializer_range: float = 0.3
    dtype: str = "float32"
    config: tuple[tuple[str, object], ...] = ()
    seed: int = 0
    words: tuple[str, ...] = ()
    """Tokens that the tokenizer has for whole words, behind all others: those that start and end reasoning, say."""
    chat_template: str = CHAT_TEMPLATE
    vision: tuple[tuple[str, object], ...] = ()
    """The configuration of the part that sees images, for models that have one (`harness.vision`)."""
    eagle_of: "ModelSpec | None" = None
    """An EAGLE head that drafts for this model of one layer, of the same sizes."""

    @property
    def hidden_size(self) -> int:
        return self.hidden or self.heads * self.head_size

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers, of models that cache just that."""
        itemsize = {"float32": 4, "bfloat16": 2}[self.dtype]
        return self.layers * 2 * self.kv_heads * self.head_size * itemsize

    @property
    def key(self) -> str:
        """Names the content: equal for equal specs made by an equal recipe."""
        fields = json.dumps([RECIPE, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()[:12]


TINY = ModelSpec("tiny")
DEMO = ModelSpec("demo", layers=10, heads=8, kv_heads=8, head_size=64, intermediate_size=1024)
"""40 KiB of KV per token, in layers that a CPU computes about as fast as it sends them."""
WIDE = ModelSpec("wide", layers=8, heads=16, kv_heads=8, head_size=64, intermediate_size=2048)
"""64 KiB of KV per token: enough bytes to see a transfer's speed."""

ONE_HEAD = ModelSpec("one-head", kv_heads=1)
"""With tensor parallelism every rank holds a copy of the only KV head."""
TWO_LAYERS = ModelSpec("two-layers", layers=2)
ONE_LAYER = ModelSpec("one-layer", layers=1)
EAGLE = ModelSpec("eagle", layers=1, eagle_of=ONE_LAYER)
"""An EAGLE head is one layer over its target's hidden states and the next token's embedding. This one is its target's
only layer over the embedding, so it drafts what the target computes, as long as its own KV cache is right."""

MTP = ModelSpec(
    "mtp",
    "glm4_moe",
    layers=1,
    config=(
        ("num_nextn_predict_layers", 1),
        ("first_k_dense_replace", 0),
        ("n_routed_experts", 2),
        ("num_experts_per_tok", 2),
        ("moe_intermediate_size", 128),
        ("attention_bias", False),
    ),
)
"""GLM-4.x with a layer for multi-token prediction (MTP). That layer is a copy of the only other one, so it drafts what
the model computes, as long as its own KV cache is right. All experts are always used."""

SIX_HEADS = ModelSpec("six-heads", heads=6, kv_heads=6, intermediate_size=768, vocab_size=576)
"""Sizes that 2 and 3 divide."""

MLA = ModelSpec(
    "mla",
    "deepseek_v2",
    layers=2,
    heads=4,
    kv_heads=4,
    initializer_range=0.1,
    config=(
        ("first_k_dense_replace", 2),
        ("q_lora_rank", None),
        ("kv_lora_rank", 512),
        ("qk_nope_head_dim", 128),
        ("qk_rope_head_dim", 64),
        ("v_head_dim", 128),
        ("n_routed_experts", 2),
    ),
)
"""DeepSeek-V2's attention: one latent of 512 and a rope part of 64 elements per token, the same on every rank.
All layers are dense: the emulated NPU cannot route tokens to experts."""

WINDOW = 200
SLIDING = ModelSpec(
    "sliding",
    "gemma3_text",
    layers=6,
    config=(
        ("sliding_window", WINDOW),
        ("layer_types", 2 * ("sliding_attention", "sliding_attention", "full_attention")),
        ("query_pre_attn_scalar", 32),
    ),
)
"""Layers that see the last `WINDOW` tokens only, and layers that see all: two cache groups that share memory."""


def sliding_bytes(tokens: int, block_size: int) -> int:
    """KV of a `SLIDING` prompt but for its last token, which decode computes, in whole blocks: all of full attention's,
    and those that this token sees."""
    layers = dict(SLIDING.config)["layer_types"]
    assert isinstance(layers, tuple)
    sliding, full = (layers.count(f"{kind}_attention") for kind in ("sliding", "full"))
    blocks = -(-(tokens - 1) // block_size)
    in_window = blocks - (tokens - WINDOW) // block_size
    block_bytes = block_size * SLIDING.kv_bytes_per_token // SLIDING.layers
    return (blocks * full + in_window * sliding) * block_bytes


SHARED = ModelSpec(
    "shared",
    "gemma3n_text",
    layers=5,
    config=(
        ("sliding_window", WINDOW),
        ("layer_types", ("full_attention", *2 * ("sliding_attention", "full_attention"))),
        ("num_kv_shared_layers", 2),
        ("activation_sparsity_pattern", 5 * (0.0,)),
        ("hidden_size_per_layer_input", 32),
        ("vocab_size_per_layer_input", 512),
        ("laurel_rank", 8),
        ("tie_word_embeddings", True),
    ),
)
"""Gemma 3n: the last two layers read the caches of the two before them."""

MAMBA = ModelSpec(
    "mamba",
    "granitemoehybrid",
    config=(
        ("layer_types", ("mamba", "attention", "mamba", "mamba")),
        ("mamba_n_heads", 8),
        ("mamba_d_head", 64),
        ("mamba_n_groups", 2),
        ("mamba_d_state", 16),
        ("mamba_expand", 2),
        ("shared_intermediate_size", 16),  # what states add to the residual stream must not drown in it
        ("num_local_experts", 0),
        ("num_experts_per_tok", 0),
        ("position_embedding_type", "nope"),
        ("attention_multiplier", 32**-0.5),
    ),
)
"""Mamba 2 layers, whose cache is a state per request, and an attention layer."""

GATED_DELTA = ModelSpec(
    "gated-delta",
    "qwen3_next",
    dtype="bfloat16",
    config=(
        ("layer_types", ("linear_attention", "full_attention", "linear_attention", "linear_attention")),
        ("linear_num_key_heads", 2),
        ("linear_num_value_heads", 4),
        ("linear_key_head_dim", 64),
        ("linear_value_head_dim", 64),
        ("num_experts", 2),
        ("num_experts_per_tok", 2),
        ("moe_intermediate_size", 64),
        ("shared_expert_intermediate_size", 64),
        ("mlp_only_layers", (1, 2, 3)),
    ),
)
"""Linear attention (a state per request, more value than key heads) and an attention layer. bfloat16: vLLM's CPU
kernels for it take nothing else. One layer has experts, which vLLM insists on; all of them are always used."""


NPU_HEAD_SIZE = 64
"""The smallest that an NPU's attention takes in the layout that vllm-ascend calls it with."""
NPU_INITIALIZER_RANGE = 0.1
"""bfloat16's rounding moves log probabilities by 0.06 then, a wrong head in one block by 0.1 to 0.7 (`agreement.py`).
At 0.3 layers amplify rounding as much as a wrong head; at 0.05 attention has too little weight."""


def for_npu(spec: ModelSpec) -> ModelSpec:
    """A model like `spec` in what an NPU computes: bfloat16, and heads of a size that its attention takes."""
    return dataclasses.replace(
        spec,
        name=f"{spec.name}-npu",
        dtype="bfloat16",
        hidden=spec.hidden_size,
        head_size=spec.head_size if spec.family == MLA.family else max(spec.head_size, NPU_HEAD_SIZE),
        initializer_range=NPU_INITIALIZER_RANGE,
    )


def inspect_here() -> None:
    """Lets this process look at models' classes itself. vLLM imports itself in another one for each, so as not to start
    CUDA: 10 s of a core."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def make_model(spec: ModelSpec, folder: Path) -> Path:
    """Return the checkpoint of `spec` inside `folder`, making it first where it is missing.

    Safe to call from several processes at once: a model appears whole, by one rename.
    """
    path = folder / f"{spec.name}-{spec.key}"
    if path.is_dir():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=folder))
    try:
        if spec.vision:
            from harness.vision import save_vision_model  # needs this module

            save_vision_model(spec, scratch)
        elif spec.family == "deepseek_v4":
            from harness.deepseek_v4 import save_deepseek_v4  # needs this module

            save_deepseek_v4(spec, scratch)
        elif spec.eagle_of is None:
            _random_model(spec).save_pretrained(scratch)
            if spec == MTP:
                _add_mtp_layer(scratch)
        else:
            _save_eagle_head(spec, scratch)
        _save_tokenizer(spec, scratch)
        try:
            os.rename(scratch, path)
        except OSError:
            if not path.is_dir():  # else another process was faster with the same content
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _random_model(spec: ModelSpec) -> Any:
    """The transformers model of `spec`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(
        spec.family,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_size,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_positions,
        initializer_range=spec.initializer_range,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype=spec.dtype,
        **{"tie_word_embeddings": False}
        | {name: list(value) if isinstance(value, tuple) else value for name, value in spec.config},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(SLOW_DECAY)
    if spec in (ONE_LAYER, MTP):
        # An EAGLE head does not normalize its input, and an MTP layer normalizes it once more: for them to compute what
        # the target's layer does, embeddings are normalized already, to a root mean square of 1.
        embeddings = model.get_input_embeddings().weight.data
        embeddings /= embeddings.pow(2).mean(dim=1, keepdim=True).sqrt().clamp(min=1e-6)  # padding's are zeros
    return model.to(getattr(torch, spec.dtype))


def _save_eagle_head(spec: ModelSpec, folder: Path) -> None:
    """What vLLM's `EagleLlamaForCausalLM` loads: a layer without input norm, and `fc`, which makes the layer's input
    of `[embedding, hidden state]`. It shares its target's embeddings and head."""
    import torch
    from safetensors.torch import save_file

    assert spec.eagle_of is not None
    target = _random_model(spec.eagle_of)
    weights = {f"layers.0.{name}": w for name, w in target.model.layers[0].state_dict().items() if "input_" not in name}
    identity = torch.eye(spec.hidden_size)
    weights["fc.weight"] = torch.cat((identity, torch.zeros_like(identity)), dim=1)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    target.config.architectures = ["LlamaForCausalLM"]
    target.config.save_pretrained(folder)


def _add_mtp_layer(folder: Path) -> None:
    """Copies the checkpoint's only layer as the MTP layer. `eh_proj` makes its input of `[embedding, hidden state]`."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    layer = "model.layers.0."
    copies = {name.replace(layer, "model.layers.1."): w.clone() for name, w in weights.items() if layer in name}
    norm = weights["model.norm.weight"]
    identity = torch.eye(len(norm))
    copies |= {
        "model.layers.1.enorm.weight": torch.ones_like(norm),
        "model.layers.1.hnorm.weight": torch.ones_like(norm),
        "model.layers.1.eh_proj.weight": torch.cat((identity, torch.zeros_like(identity)), dim=1),
        "model.layers.1.shared_head.norm.weight": norm.clone(),
        "model.layers.1.shared_head.head.weight": weights["lm_head.weight"].clone(),
        "model.layers.1.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }
    save_file(weights | copies, folder / "model.safetensors", metadata={"format": "pt"})


def _save_tokenizer(spec: ModelSpec, folder: Path) -> None:
    """Byte-level BPE: special tokens, 256 bytes, and pairs of letters up to the vocabulary's size.

    Every id has a text and every text has ids, so string prompts and chats work with any content.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase
    singles = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [(a, b) for a in letters for b in letters][: spec.vocab_size - len(singles) - len(spec.words)]
    tokens = [*singles, *(a + b for a, b in pairs)]
    if len(tokens) + len(spec.words) != spec.vocab_size:
        raise ValueError(f"the tokenizer has {len(tokens) + len(spec.words)} tokens, the model {spec.vocab_size}")

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD],
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        unk_token=SPECIAL_TOKENS[UNK],
        model_max_length=spec.max_positions,
        chat_template=spec.chat_template,
    )
    fast.add_tokens([*spec.words])
    fast.save_pretrained(folder)
