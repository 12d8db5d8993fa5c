"""SigLIP 2's encoder (arXiv:2502.14786) for images of any size (NaFlex): positions are resized to each."""

from __future__ import annotations

import math
from typing import Any

from liger_models.architectures.common import mlp
from liger_models.architectures.encoders.parts import whole_attention
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    AntialiasedTable,
    BlockSpec,
    LayerNormSpec,
    PatchSpec,
    ProjectorSpec,
    ShapedPictures,
    VisionSpec,
)

SIGLIP2 = "siglip2_vision_model"
TINY: dict[str, Any] = {
    "model_type": SIGLIP2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_patches": 25,
    "patch_size": 3,
    "layer_norm_eps": 2e-3,
}
CHANNELS_LAST = (("vision.encoder.patch_embed.weight", "d (h w c) -> d c h w"),)
"""`permuted` of a `Layout`: the patch embedding is a linear layer over pixels with channels last."""


def vision(v: HFConfig, projector: ProjectorSpec, image_id: int) -> VisionSpec:
    """Spec of the encoder, from its config.

    Raises:
        ConfigError: another encoder, or positions that do not form a square.
    """
    if v.raw.get("model_type", SIGLIP2) != SIGLIP2:
        raise ConfigError(
            f"{v.name}: the encoder is of the type {abbreviate(v.raw['model_type'])}; supported is {SIGLIP2}"
        )
    v.take("vision_use_head", None)  # of a tensor that nothing reads
    v.fill({"hidden_act": "gelu_pytorch_tanh", "intermediate_size": 3072})
    width, norm = v.take_count("hidden_size", 768), LayerNormSpec(eps=v.take_number("layer_norm_eps", 1e-6))
    attention = whole_attention(v, width, v.take_count("num_attention_heads", 12))
    positions = v.take_count("num_patches", 256)
    side = math.isqrt(positions)
    if side**2 != positions:
        raise ConfigError(f"{v.name}: num_patches is {positions}; expected a square number of positions")
    patch = PatchSpec(v.take_count("patch_size", 16), channels=v.take_count("num_channels", 3), bias=True)
    return VisionSpec(
        width,
        patch,
        (BlockSpec(attention, mlp(v, bias=True, gated=False), norm),) * v.take_count("num_hidden_layers", 12),
        projector,
        image_id,
        position_table=AntialiasedTable(side),
        pictures=ShapedPictures(),
        norm_after=norm,
    )
