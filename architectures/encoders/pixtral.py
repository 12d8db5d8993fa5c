"""Pixtral's encoder (arXiv:2410.07073), for images of any size: gated MLPs, RMSNorm, and rotary embeddings by
row and column; no biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from liger_models.architectures.common import mlp
from liger_models.architectures.encoders.parts import axial_attention, patches
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, NormSpec, PaddedPictures, ProjectorSpec, VisionSpec

PIXTRAL = "pixtral"
NAMES = (
    ("encoder.patch_embed.", "vision_tower.patch_conv."),
    ("encoder.norm_before.", "vision_tower.ln_pre."),
    ("encoder.layers.", "vision_tower.transformer.layers."),
    (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.", ".attention."),
    (".mlp.", ".feed_forward."),
)
OWN_NAMES = (
    *((".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3.")),
    *((f".{name}_proj.", f".w{name}.") for name in "qkvo"),
)
"""Mistral's own names of linear layers, in checkpoints that are not in transformers' form."""
RELEASED = (
    *NAMES,
    *OWN_NAMES,
    ("vision_tower.", "vision_encoder."),
    ("projector.norm.", "pre_mm_projector_norm."),
    ("projector.merging_layer.", "patch_merger.merging_layer."),
    *(("projector.linear_1.", "vision_language_adapter.w_in."),),
    *(("projector.linear_2.", "vision_language_adapter.w_out."),),
)
"""The names of the encoder and the projector in such checkpoints."""
PERMUTED = tuple((f"vision.*.{name}_proj.weight", "(heads pairs 2) d -> (heads 2 pairs) d") for name in "qk")
"""Such checkpoints have the two dimensions of a rotated pair side by side."""
TINY: dict[str, Any] = {
    "model_type": PIXTRAL,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 3,
    "image_size": 60,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}


def vision(v: HFConfig, projector: ProjectorSpec, image_id: int, states: Sequence[int] = ()) -> VisionSpec:
    """Spec of the encoder, from its config. Pairs with even frequencies are rotated by the row, the others by
    the column. `states` selects its output, as for CLIP.
    """
    for key in ("image_size", "vocab_size"):
        v.take(key, None)  # the image size limits the processor, and there is no vocabulary
    v.fill({"hidden_act": "gelu", "intermediate_size": 4096})
    width, heads = v.take_count("hidden_size", 1024), v.take_count("num_attention_heads", 16)
    v.take_only(head_dim=width // heads)
    pairs = range(width // heads // 2)
    attention = axial_attention(v, width, heads, bias=False, frequencies=(*pairs[::2], *pairs[1::2]))
    norm = NormSpec(eps=1e-5)
    return VisionSpec(
        width,
        patches(v, 16, bias=False, frames=1),
        (BlockSpec(attention, mlp(v), norm),)
        * (max(states) if states else v.take_count("num_hidden_layers", 24)),
        projector,
        image_id,
        pictures=PaddedPictures(),
        norm_before=norm,
        taken=() if len(states) == 1 and states[0] > 0 else tuple(states),
    )
