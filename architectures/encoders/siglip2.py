"""SigLIP 2's encoder (arXiv:2502.14786, NaFlex) for images of any size; its position table is resized.

Below it, the encoder of MiniCPM-V 4.6 and 4.7 and MiniCPM-OCR, for images and frames of any size: SigLIP's
layers. Windows of four patches are merged between two of them, except in the mode that keeps detail.
"""

from __future__ import annotations

import math
from typing import Any

from liger_models.architectures.common import mlp
from liger_models.architectures.encoders import clip
from liger_models.architectures.encoders.parts import whole_attention
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    AntialiasedTable,
    BlockSpec,
    FractionTable,
    LayerNormSpec,
    PatchMergerSpec,
    PatchSpec,
    ProjectorSpec,
    ShapedPictures,
    StripPictures,
    VisionSpec,
    WindowMergerSpec,
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


# -- MiniCPM-V

WHOLE, DETAILED = "16x", "4x"
STRIP_NAMES = (
    ("projector.norm.", "merger.mlp.0.pre_norm."),
    ("projector.", "merger.mlp.0."),
    ("encoder.window_merger.norm.", "vision_tower.vit_merger.layer_norm1."),
    ("encoder.window_merger.merged_norm.", "vision_tower.vit_merger.pre_norm."),
    *(
        (f"encoder.window_merger.{name}_proj.", f"vision_tower.vit_merger.self_attn.{name}_proj.")
        for name in "qkv"
    ),
    ("encoder.window_merger.out_proj.", "vision_tower.vit_merger.self_attn.out_proj."),
    ("encoder.window_merger.", "vision_tower.vit_merger."),
    *((f"encoder.{here}", f"vision_tower.{there}") for here, there in clip.NAMES if not here.startswith(".")),
    *(name for name in clip.NAMES if name[0].startswith(".")),
)
"""Names of the encoder and the projector."""
TINY_STRIPS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 3,
    "layer_norm_eps": 2e-3,
}
_STRIP_DEFAULTS = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh"},
}
UNREAD_STRIPS = {
    "drop_vision_last_layer": "the reference does not read it",
    "image_size": "read by the processor",
    "patch_size": "a copy of the encoder's",
}


def strip_vision(c: HFConfig, v: HFConfig, mode: str, **settings: Any) -> VisionSpec:
    """Spec of the encoder, from the model's config and its own.

    Args:
        mode: the default of `downsample_mode`.
        settings: other fields of the spec.

    Raises:
        ConfigError: an unknown mode, no layer after which patches are merged, or an image size of several
            numbers.
    """
    v.fill(_STRIP_DEFAULTS)
    v.take("insert_layer_id", None)  # the model's own counts
    v.take_only(window_kernel_size=[2, 2])
    c.take_only(merge_kernel_size=[2, 2], merger_times=1)
    width, heads = v.take_count("hidden_size"), v.take_count("num_attention_heads")
    norm, patch = LayerNormSpec(v.take_number("layer_norm_eps", 1e-6)), v.take_count("patch_size")
    block = BlockSpec(whole_attention(v, width, heads), mlp(v, bias=True, gated=False), norm)
    layers, merger = v.take_count("num_hidden_layers"), None
    after, mode = c.take("insert_layer_id", 6), c.take("downsample_mode", mode)
    if mode not in (WHOLE, DETAILED):
        raise ConfigError(
            f"{c.name}: downsample_mode must be {WHOLE!r} or {DETAILED!r}, found {abbreviate(mode)}"
        )
    if mode == WHOLE:
        if type(after) is not int or not 0 <= after < layers:
            raise ConfigError(
                f"{c.name}: insert_layer_id must be one of the encoder's {layers} layers, found "
                f"{abbreviate(after)}"
            )
        merger = WindowMergerSpec(after, heads, 4 * v.take_count("intermediate_size"), norm)
    return VisionSpec(
        width,
        PatchSpec(patch, channels=v.take_count("num_channels", 3), bias=True),
        (block,) * layers,
        PatchMergerSpec(2, LayerNormSpec(1e-6), norm_merged=True),
        c.take_count("image_token_id", least=0),
        c.take_count("video_token_id", least=0),
        position_table=FractionTable(v.take_count("image_size") // patch, divided=True),
        pictures=StripPictures(),
        norm_after=norm,
        merger=merger,
        **settings,
    )


def unread_tensors(c: HFConfig, mode: str) -> tuple[str, ...]:
    """Patterns of the merger's tensors where it does not run; `mode` is the default of `downsample_mode`."""
    return () if c.take("downsample_mode", mode) == WHOLE else ("*vision_tower.vit_merger.*",)
