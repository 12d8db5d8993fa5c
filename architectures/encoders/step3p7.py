"""Step 3.7's encoder: blocks whose branches are scaled, rotary embeddings by column and row, and two
convolutions that make a token of sixteen patches.
"""

from __future__ import annotations

from typing import Any

from liger_models.architectures.common import activation
from liger_models.architectures.encoders.parts import LINEAR_NAMES, axial_attention
from liger_models.convert.checkpoints.layout import Joined
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    BilinearTable,
    BlockSpec,
    CroppedPictures,
    LayerNormSpec,
    MLPSpec,
    PatchSpec,
    StridedProjectorSpec,
    VisionSpec,
)

NAMES = (
    ("encoder.patch_embed.", "vision_model.embeddings.patch_embedding."),
    ("encoder.table.", "vision_model.embeddings.position_embedding."),
    ("encoder.norm_before.", "vision_model.pre_layernorm."),
    ("encoder.layers.", "vision_model.layers."),
    (".input_layernorm.", ".layernorm_before."),
    (".post_attention_layernorm.", ".layernorm_after."),
    (".o_proj.", ".out_proj."),
    *LINEAR_NAMES,
    (".attention_scale.weight", ".lambda_1"),
    (".mlp_scale.weight", ".lambda_2"),
    ("projector.conv", "vision_model.downsampler"),
    ("projector.linear.", "multi_modal_projector."),
)
"""Names of the encoder and the projector in transformers' modules."""
RELEASED = (
    *NAMES,
    ("embeddings.patch_embedding.", "conv1."),
    ("embeddings.position_embedding.weight", "positional_embedding"),
    ("pre_layernorm.", "ln_pre."),
    ("vision_model.layers.", "vision_model.transformer.resblocks."),
    *((".layernorm_before.", ".ln_1."), (".layernorm_after.", ".ln_2.")),
    *((".lambda_1", ".ls_1.gamma"), (".lambda_2", ".ls_2.gamma")),
    *((".mlp.fc1.", ".mlp.c_fc."), (".mlp.fc2.", ".mlp.c_proj.")),
    *((".self_attn.", ".attn."), (".in_proj.", ".in_proj_")),
    ("vision_model.downsampler", "vision_model.vit_downsampler"),
    ("multi_modal_projector.", "vit_large_projector."),
)
"""The same in released checkpoints."""
JOINED = (Joined("in_proj", ("q_proj", "k_proj", "v_proj"), within="vision."),)
PERMUTED = tuple(
    (f"vision.*.{name}_proj.{kind}", f"(heads pairs 2){rest} -> (heads 2 pairs){rest}")
    for name in "qk"
    for kind, rest in (("weight", " d"), ("bias", ""))
)
"""Released checkpoints have the two dimensions of a rotated pair side by side."""
TINY: dict[str, Any] = {
    "model_type": "step3p5_vision",
    "hidden_size": 32,
    "mlp_ratio": 1.25,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 3,
    "layer_norm_eps": 2e-3,
}


def vision(c: HFConfig, v: HFConfig) -> VisionSpec:
    """Spec of the encoder, from the model's config and its own.

    Raises:
        ConfigError: images that are not whole tokens.
    """
    for key in ("layer_scale_init_value", "ls_init_value", "intermediate_size", "max_position_embeddings"):
        v.take(key, None)  # of fresh weights, or computed from others in the reference
    v.take_only(num_channels=3)
    v.fill({"hidden_act": "quick_gelu"})
    width = v.take_count(("hidden_size", "width"), 1536)
    heads, ratio = v.take_count(("num_attention_heads", "heads"), 16), v.take_number("mlp_ratio", 8960 / 1536)
    norm = LayerNormSpec(v.take_number("layer_norm_eps", 1e-5))
    mlp = MLPSpec(int(width * ratio), activation(v, gated=False), bias=True, gated=False)
    block = BlockSpec(axial_attention(v, width, heads, axes=(1, 0)), mlp, norm, "layer_scale")
    size, patch = v.take_count("image_size", 728), v.take_count("patch_size", 14)
    projector = StridedProjectorSpec(c.take_flag("projector_bias", False))
    if not size // patch or size // patch % projector.merge:
        raise ConfigError(
            f"{v.name}: images of {size} pixels have {size // patch} times {size // patch} patches; expected "
            f"a multiple of {projector.merge}, which make a token"
        )
    return VisionSpec(
        width,
        PatchSpec(patch),
        (block,) * v.take_count(("num_hidden_layers", "layers"), 47),
        projector,
        c.take_count("image_token_id", 151679, least=0),
        position_table=BilinearTable(size // patch),
        pictures=CroppedPictures(size),
        norm_before=norm,
    )
