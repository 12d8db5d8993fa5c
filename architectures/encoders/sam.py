"""SAM's encoder (arXiv:2304.02643) for square images, as GOT-OCR 2.0 has it: windows, relative positions, and
convolutions after its blocks.
"""

from __future__ import annotations

from typing import Any

from liger_models.architectures.common import activation
from liger_models.architectures.encoders.parts import patches
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    BlockSpec,
    ConvolutionProjectorSpec,
    FixedTable,
    GridAttentionSpec,
    LayerNormSpec,
    MLPSpec,
    SquarePictures,
    VisionSpec,
)

NAMES = (
    ("patch_embed.", "patch_embed.projection."),
    ("table.weight", "pos_embed"),
    (".input_layernorm.", ".layer_norm1."),
    (".post_attention_layernorm.", ".layer_norm2."),
    (".self_attn.qkv_proj.", ".attn.qkv."),
    (".self_attn.o_proj.", ".attn.proj."),
    (".self_attn.", ".attn."),
    (".up_proj.", ".lin1."),
    (".down_proj.", ".lin2."),
)
"""Names of the encoder."""
WHOLE = ("vision.encoder.layers.*.qkv_proj.*",)
PERMUTED = (("vision.encoder.table.weight", "1 side columns d -> (1 side columns) d"),)
TINY: dict[str, Any] = {
    "model_type": "got_ocr2_vision",
    "hidden_size": 32,
    "output_channels": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 3,
    "layer_norm_eps": 2e-3,
    "window_size": 3,
    "global_attn_indexes": [1],
    "mlp_dim": 40,
}


def vision(v: HFConfig, image_id: int) -> VisionSpec:
    """Spec of the encoder, from its config.

    Raises:
        ConfigError: incompatible numbers.
    """
    v.fill({"hidden_act": "gelu"})
    v.take_only(use_abs_pos=True, use_rel_pos=True)
    width, heads = v.take_count("hidden_size", 768), v.take_count("num_attention_heads", 12)
    spec, size = patches(v, 16, bias=True, frames=1), v.take_count("image_size", 1024)
    side, depth = size // spec.size, v.take_count("num_hidden_layers", 12)
    projector = ConvolutionProjectorSpec(side, v.take_count("output_channels", 256))
    if width % heads or size % spec.size or side % projector.merge:
        raise ConfigError(
            f"{v.name}: {heads} heads of {width} dimensions together, and images of {size} pixels with "
            f"patches of {spec.size}; expected multiples, and a multiple of {projector.merge} patches"
        )
    norm, inner = LayerNormSpec(v.take_number("layer_norm_eps", 1e-6)), v.take_count("mlp_dim", 3072)
    window = v.take_count("window_size", 14, least=0) or None
    whole = v.take_layers("global_attn_indexes", [2, 5, 8, 11])
    bias, dim = v.take_flag("qkv_bias", True), width // heads
    mlp = MLPSpec(inner, activation(v, gated=False), bias=True, gated=False)
    blocks = []
    for layer in range(depth):
        own = None if layer in whole else window
        mixer = GridAttentionSpec(heads, dim, dim**-0.5, side, projector.merge, own, bias)
        blocks.append(BlockSpec(mixer, mlp, norm))
    return VisionSpec(
        width,
        spec,
        tuple(blocks),
        projector,
        image_id,
        position_table=FixedTable(side),
        pictures=SquarePictures(size),
    )
