"""Tiny vision-language model with tokenizer and processor, and drawn images."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

import liger_models
from liger_models.architectures import find_architecture

SPECIAL = (
    *("<pad>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
COLOURS = {"red": (230, 20, 20), "green": (20, 230, 20), "blue": (20, 20, 230)}
WORDS = (*SPECIAL, "user", "assistant", "\n", " ", "what", "?", "and", *COLOURS)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(folder: Path) -> None:
    """Write a Qwen2.5-VL checkpoint with fresh weights, tokenizer and processor."""
    tiny = find_architecture("qwen2_5_vl").tiny
    ids = {f"{name}_token_id": WORDS.index(f"<|{name}_pad|>") for name in ("image", "video")}
    ids |= {f"vision_{end}_token_id": WORDS.index(f"<|vision_{end}|>") for end in ("start", "end")}
    text = {**tiny["text_config"], "vocab_size": len(WORDS), "eos_token_id": 2, "bos_token_id": None}
    torch.manual_seed(1)
    liger_models.from_config({**tiny, **ids, "text_config": text}, device="cpu").save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|\w+|[^\w\s]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    vision = tiny["vision_config"]
    written = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<pad>",
        },
        "chat_template.json": {"chat_template": TEMPLATE},
        "preprocessor_config.json": {
            "processor_class": "Qwen2_5_VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": vision["patch_size"],
            "temporal_patch_size": vision["temporal_patch_size"],
            "merge_size": vision["spatial_merge_size"],
            "min_pixels": 64,
            "max_pixels": 4096,
        },
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))


def picture(colour: str, size: tuple[int, int]):
    from PIL import Image

    return Image.new("RGB", size, COLOURS[colour])


def png(colour: str, size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    picture(colour, size).save(file, format="PNG")
    return file.getvalue()


def asked(part: dict, colour: str, more: str = "what?") -> dict:
    question = {"role": "user", "content": [part, {"type": "text", "text": more}]}
    return {"messages": [question, {"role": "assistant", "content": colour}]}
