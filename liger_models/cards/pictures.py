"""Picture of a family, docs/families/FAMILY.svg: the layers of its smallest known model, and their memory."""

from __future__ import annotations

from pathlib import Path

from liger_models.architectures import Architecture
from liger_models.cards.published import published
from liger_models.families import about

TOKENS = 4096


def picture_of_family(family: Architecture, repository: Path) -> str:
    """The picture as SVG text; of the test config if no model of the family is known."""
    import torch

    import liger_models
    from liger_models.layers.recompute.activation_memory import LEVELS
    from liger_models.pictures.layers import layers
    from liger_models.pictures.svg import LEFT, WIDTH, picture, stacked, text

    models = published(family, repository)
    name, config = (models[0].name, models[0].config) if models else ("a tiny config", family.tiny)
    model = liger_models.from_config(dict(config), device="meta", dtype=torch.bfloat16, dropout=0.0)
    title = f"{about(family.model_type).name}: the layers of {name}"
    drawn, width, bottom = layers(model.spec, 34)
    kept: dict[str, dict[str, float]] = {}
    for level in LEVELS:
        by_token = sum(layer.activation_bytes(level, 2) for layer in model.layers)
        kept[level] = {"activations": TOKENS * by_token / 2**30}
    words = f"Kept for the backward pass, {TOKENS:,} tokens in bfloat16, by activation memory level"
    chart, height = stacked(words, kept, "GiB", top=bottom + 6)
    parts = [text(12, 22, title, size=14), *drawn, *chart]
    return picture(max(width, LEFT + WIDTH + 90), height, title, parts)
