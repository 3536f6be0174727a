# SPDX-License-Identifier: Apache-2.0
"""Small Llama models with random weights, made once and shared by every engine that is started.

`--load-format dummy` will not do: its weights may depend on the tensor-parallel size. These are saved as
real float32 checkpoints, so that engines of every size compute the same function. Their weights are large
enough (`initializer_range`) for attention to decide the next token: with the usual 0.02 the last prompt
token alone would, and a KV cache full of garbage would go unnoticed.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import string
import tempfile
from pathlib import Path

RECIPE = 1
"""Raise it whenever the code below makes other files from the same `ModelSpec`: it is part of the key."""

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(len(SPECIAL_TOKENS))
FIRST_TEXT_TOKEN = len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Everything that decides a model's weights."""

    name: str
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 32
    intermediate_size: int = 512
    vocab_size: int = 512
    max_positions: int = 4096
    initializer_range: float = 0.3
    seed: int = 0

    @property
    def hidden_size(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_bytes_per_token(self) -> int:
        """float32 K and V of one token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_size * 4

    @property
    def key(self) -> str:
        """Names the content: equal for equal specs made by an equal recipe."""
        fields = json.dumps([RECIPE, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()[:12]


TINY = ModelSpec("tiny")
WIDE = ModelSpec("wide", layers=8, heads=16, kv_heads=8, head_size=64, intermediate_size=2048)
"""64 KiB of KV per token: enough bytes to see a transfer's speed."""


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
        _save_weights(spec, scratch)
        _save_tokenizer(spec, scratch)
        try:
            os.rename(scratch, path)
        except OSError:
            if not path.is_dir():  # else another process was faster with the same content
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _save_weights(spec: ModelSpec, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
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
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        LlamaForCausalLM(config).save_pretrained(folder)


def _save_tokenizer(spec: ModelSpec, folder: Path) -> None:
    """Byte-level BPE: special tokens, 256 bytes, and pairs of letters up to the vocabulary's size.

    Every id has a text and every text has ids, so string prompts and chats work with any content.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase
    singles = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [(a, b) for a in letters for b in letters][: spec.vocab_size - len(singles)]
    tokens = [*singles, *(a + b for a, b in pairs)]
    if len(tokens) != spec.vocab_size:
        raise ValueError(f"the tokenizer has {len(tokens)} tokens, the model {spec.vocab_size}")

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD],
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        unk_token=SPECIAL_TOKENS[UNK],
        model_max_length=spec.max_positions,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
