"""Training batches: random tokens, in sequences or in documents.

| data     | a batch                                                                                        |
|----------|------------------------------------------------------------------------------------------------|
| `full`   | sequences of random tokens without padding, all with labels                                    |
| `padded` | documents of random lengths (median 545), padded to the longest; the first 75% have no labels  |
| `packed` | the same documents packed into one row, separated by their position ids                        |
| `images` | rows of text with images of three sizes, padded to the longest; images have no labels          |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_models.architectures import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.images.scenes import Document, Image, Scenes

DATA = ("full", "padded", "packed")
IMAGES = "images"  # for vision-language models
MASKED = 0.75  # fraction of a document's tokens without labels
# In patches, rounded to the projector's merge size; for Llama 3.2 Vision one tile, two and four.
SMALL, MIDDLE, LARGE = Image(32, 32), Image(64, 50), Image(92, 66)


def make_batch(
    data: str, batch: int, seq: int, config: Mapping[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """Model inputs: `batch` sequences of `seq` tokens, or documents of up to that many."""
    if data == IMAGES:
        torch.manual_seed(0)
        scenes = _scenes(config)
        call = scenes.make(_with_images(batch, seq, scenes))
        return {name: tensor.to(device) for name, tensor in call.items()}
    # Gemma 3n has no embeddings by layer for its last ids, which stand for images and sounds.
    text = config.get("text_config", config)  # of families that hear
    vocab_size = min(text[key] for key in ("vocab_size", "vocab_size_per_layer_input") if text.get(key))
    generator = torch.Generator().manual_seed(0)
    if data == "full":
        ids = torch.randint(vocab_size, (batch, seq), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids}
    lengths = _lengths(batch, seq)
    documents = [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]
    labels = [ids.where(torch.arange(len(ids)) >= int(MASKED * len(ids)), -100) for ids in documents]
    if data == "packed":
        positions = torch.cat([torch.arange(length) for length in lengths])
        row = {"input_ids": torch.cat(documents), "position_ids": positions, "labels": torch.cat(labels)}
        return {name: tensor[None].to(device) for name, tensor in row.items()}
    pad = torch.nn.utils.rnn.pad_sequence
    rows = {
        "input_ids": pad(documents, batch_first=True),
        "attention_mask": pad([torch.ones(length, dtype=torch.long) for length in lengths], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }
    return {name: tensor.to(device) for name, tensor in rows.items()}


def count_tokens(data: str, batch: int, seq: int, config: Mapping[str, Any]) -> int:
    """Tokens of a batch without padding."""
    if data == IMAGES:
        scenes = _scenes(config)
        return sum(len(scenes.tokens(document)) for document in _with_images(batch, seq, scenes))
    return batch * seq if data == "full" else sum(_lengths(batch, seq))


def rows_of(data: str, batch: int, seq: int) -> tuple[int, int, int]:
    """Rows, tokens per row, and the longest document, for a batch without images."""
    if data == "full":
        return batch, seq, seq
    lengths = _lengths(batch, seq)
    longest = max(lengths)
    return (1, sum(lengths), longest) if data == "packed" else (batch, longest, longest)


def _lengths(batch: int, seq: int) -> list[int]:
    """Log-normal, like lengths of conversations."""
    spread = torch.randn(batch, generator=torch.Generator().manual_seed(0)).exp()
    return [int(length.clamp(32, seq)) for length in 545 * spread]


def _scenes(config: Mapping[str, Any]) -> Scenes:
    family = find_architecture(config["model_type"])
    return Scenes(family.spec(HFConfig.load(dict(config))), config)


def _with_images(batch: int, seq: int, scenes: Scenes) -> list[Document]:
    merge = getattr(getattr(scenes.vision, "projector", None), "merge", 1)
    small, middle, large = (
        Image(image.height // merge * merge, image.width // merge * merge) for image in (SMALL, MIDDLE, LARGE)
    )
    rows = [[small], [middle], [large], [small, middle]]
    return [_with_text(rows[i % len(rows)], seq, scenes) for i in range(batch)]


def _with_text(images: list[Image], seq: int, scenes: Scenes) -> Document:
    """Images, each with an equal part of `seq` tokens of text after it; of fewer where a row has a limit."""
    limit = scenes.position_limit
    if limit is not None:
        taken = len(scenes.tokens([part for image in images for part in (image, 1)])) - len(images)
        seq = min(seq, limit - taken)
    half = seq // len(images)
    texts = [half] * (len(images) - 1) + [seq - half * (len(images) - 1)]
    return [part for pair in zip(images, texts, strict=True) for part in pair]
