# SPDX-License-Identifier: Apache-2.0
"""Small Qwen3-VL and Qwen3.5 models with random weights, images for them, and chats about them."""

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

from harness.client import Messages
from harness.models import BOS, EOS, NPU_HEAD_SIZE, NPU_INITIALIZER_RANGE, PAD, SLOW_DECAY, ModelSpec

IMAGE_WORDS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH = 16
"""Pixels of a patch's side. The model sees 2 by 2 patches as one token."""

VISION = ModelSpec(
    "vision",
    "qwen3_vl",
    head_size=NPU_HEAD_SIZE,
    hidden=256,
    dtype="bfloat16",
    initializer_range=NPU_INITIALIZER_RANGE,
    words=IMAGE_WORDS,
    chat_template=(
        "{% for message in messages %}<{{ message.role }}>"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
        "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    vision=(
        ("depth", 2),
        ("hidden_size", 2 * NPU_HEAD_SIZE),
        ("num_heads", 2),
        ("intermediate_size", 256),
        ("num_position_embeddings", 256),
        ("deepstack_visual_indexes", (0,)),
        ("patch_size", PATCH),
        ("initializer_range", NPU_INITIALIZER_RANGE),
    ),
)
"""Rotates Q and K by three positions (time, height, width), and adds what the vision tower's first layer computes to
the text model's first layer."""

QWEN3_5 = ModelSpec(
    "qwen3.5",
    "qwen3_5",
    layers=6,
    kv_heads=2,
    head_size=NPU_HEAD_SIZE,
    hidden=256,
    dtype="bfloat16",
    initializer_range=NPU_INITIALIZER_RANGE,
    words=IMAGE_WORDS,
    config=(
        ("layer_types", 2 * ("linear_attention", "linear_attention", "full_attention")),
        ("linear_num_key_heads", 2),
        ("linear_num_value_heads", 4),
        ("linear_key_head_dim", NPU_HEAD_SIZE),
        ("linear_value_head_dim", NPU_HEAD_SIZE),
        ("partial_rotary_factor", 0.25),
    ),
    vision=tuple(each for each in VISION.vision if each[0] != "deepstack_visual_indexes"),
)
"""Four layers with linear attention, whose cache is a state per request, and two with full attention. vllm-ascend wants
a state as large as K of a multiple of 128 tokens."""

LANGUAGE_ONLY = ("--language-model-only",)
"""An engine's option: without the part that sees images."""

ONE_IMAGE = ("--limit-mm-per-prompt", '{"image": 1, "video": 0}')
"""An engine's options. vLLM reserves memory for the largest input that they allow."""


def save_vision_model(spec: ModelSpec, folder: Path) -> None:
    """Saves a model of `spec` and how images are processed for it; the tokenizer is saved by `make_model`."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    first = spec.vocab_size - len(IMAGE_WORDS)
    more = {name: list(value) if isinstance(value, tuple) else value for name, value in spec.config}
    rotated = more.pop("partial_rotary_factor", 1.0)
    frequencies = round(spec.head_size * rotated) // 2
    text = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "initializer_range": spec.initializer_range,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [frequencies - 2 * (frequencies // 3), frequencies // 3, frequencies // 3],
            "mrope_interleaved": True,
            **({"partial_rotary_factor": rotated} if rotated < 1 else {}),
        },
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": spec.dtype,
        **more,
    }
    vision = {name: list(value) if isinstance(value, tuple) else value for name, value in spec.vision}
    config = AutoConfig.for_model(
        spec.family,
        text_config=text,
        vision_config=vision | {"out_hidden_size": spec.hidden_size, "dtype": spec.dtype},
        **{f"{name}_token_id": first + i for i, name in enumerate(("vision_start", "vision_end", "image", "video"))},
        tie_word_embeddings=False,
        dtype=spec.dtype,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(SLOW_DECAY)
    model.to(getattr(torch, spec.dtype)).save_pretrained(folder)
    sizes = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (4 * PATCH) ** 2, "longest_edge": (16 * PATCH) ** 2},
        "image_mean": 3 * [0.5],
        "image_std": 3 * [0.5],
    }
    images = {"image_processor_type": "Qwen2VLImageProcessor"}
    videos = {"video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images | sizes))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos | sizes))


def png(seed: str, width: int = 128, height: int = 96) -> bytes:
    """Returns an image of random squares, one per token of the model."""
    from PIL import Image

    side = 2 * PATCH
    drawn = Image.frombytes(
        "RGB", (width // side, height // side), random.Random(seed).randbytes(3 * (width // side) * (height // side))
    )
    buffer = io.BytesIO()
    drawn.resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def chat_about(text: str, *urls: str) -> Messages:
    """Returns a conversation with images at `urls` before `text`."""
    images: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]
