"""Arguments of several commands: how a model is named, and numbers and sizes with their errors."""

from __future__ import annotations

import argparse

MODEL = "hub id, or folder of a checkpoint, an adapter or a training run"
MODEL_TO_TRAIN = (
    "hub id; folder of a Hugging Face checkpoint, of an adapter (which is trained further) or of a run (its "
    "latest checkpoint); or a preset (random weights; see `list`)"
)
TOKENIZER = "model whose tokenizer is used: hub id, folder of a run, or folder with tokenizer.json"


def tokens(text: str) -> int | None:
    """Parse --seq-len; None means as many as fit."""
    return None if text == "max" else positive(text)


def count(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, found {text}")
    return value


def size_of_image(text: str) -> tuple[int, int]:
    height, by, width = text.partition("x")
    if not by or not height.isdecimal() or not width.isdecimal() or not int(height) * int(width):
        raise argparse.ArgumentTypeError(f"expected height and width such as 1024x768, found {text}")
    return int(height), int(width)


def share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, found {text}")
    return value


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return value
