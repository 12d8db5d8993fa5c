"""MoonViT-3D, Kimi K2.5's encoder, for images and clips of any size: the time steps of a clip attend to one
another and share their tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import mlp
from liger_models.architectures.encoders.parts import axial_attention, patches
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import (
    BlockSpec,
    ClipTable,
    GridPictures,
    LayerNormSpec,
    PatchMergerSpec,
    VisionSpec,
)

NAMES = (
    ("encoder.patch_embed.", "vision_tower.patch_embed.proj."),
    ("encoder.table.", "vision_tower.patch_embed.pos_emb."),
    ("encoder.norm_after.", "vision_tower.encoder.final_layernorm."),
    ("encoder.layers.", "vision_tower.encoder.blocks."),
    (".input_layernorm.", ".norm0."),
    (".post_attention_layernorm.", ".norm1."),
    (".self_attn.qkv_proj.", ".wqkv."),
    (".self_attn.o_proj.", ".wo."),
    (".up_proj.", ".fc0."),
    (".down_proj.", ".fc1."),
    ("projector.norm.", "mm_projector.pre_norm."),
    ("projector.linear_1.", "mm_projector.proj.0."),
    ("projector.linear_2.", "mm_projector.proj.2."),
)
"""Names of the encoder and the projector in released checkpoints."""
_SAVED = (
    ("encoder.patch_embed.", "vision_tower.encoder.patch_embed.proj."),
    ("projector.norm.", "model.mm_projector.pre_norm."),
)
NAMES_SAVED = (*_SAVED, *(name for name in NAMES if name[0] not in dict(_SAVED)))
"""The same in checkpoints that transformers saves."""
NAMES_IN_MODULES = (
    ("encoder.patch_embed.", "vision_tower.patch_embed.proj."),
    ("encoder.table.weight", "vision_tower.patch_embed.pos_emb.position_embeddings"),
    ("encoder.norm_after.", "vision_tower.final_layernorm."),
    ("encoder.layers.", "vision_tower.layers."),
    (".input_layernorm.", ".norm1."),
    (".post_attention_layernorm.", ".norm2."),
    (".self_attn.o_proj.", ".attn.proj."),
    (".self_attn.", ".attn."),
    (".up_proj.", ".fc1."),
    (".down_proj.", ".fc2."),
    ("projector.norm.", "mm_projector.pre_norm."),
    ("projector.linear_1.", "mm_projector.in_proj."),
    ("projector.linear_2.", "mm_projector.out_proj."),
)
"""The same in transformers' modules."""
TABLE = ("vision.encoder.table.weight", "side columns d -> (side columns) d")
# transformers' modules rotate dimensions i and i + head_dim / 2, the released files 2i and 2i + 1.
BY_HALVES = tuple(
    (f"vision.encoder.layers.*.{name}_proj.{kind}", f"(heads 2 half){rest} -> (heads half 2){rest}")
    for name in "qk"
    for kind, rest in (("weight", " h"), ("bias", ""))
)
TINY: dict[str, Any] = {
    "model_type": "kimi_k25_vision",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 3,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "pos_emb_time": 3,
}


def layouts(text: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Layouts of released checkpoints, of those that transformers saves, in which the language model's
    layers are named blocks, too, and of its modules; `text` are the language model's, with experts apart and
    in one tensor.
    """
    apart, stacked = text
    root, head = "language_model.model.", ("lm_head.", "language_model.lm_head.")
    whole = "vision.encoder.layers.*.qkv_proj.*"
    return (
        *(
            Layout(
                (*apart.rename, head, *blocks),
                (whole,),
                (TABLE,),
                root,
                (("vision.", Layout(names, root="")),),
            )
            for names, blocks in ((NAMES, ()), (NAMES_SAVED, ((f"{root}layers.", f"{root}blocks."),)))
        ),
        Layout(
            stacked.rename,
            stacked.whole,
            (TABLE, *BY_HALVES),
            "model.language_model.",
            (("vision.", Layout(NAMES_IN_MODULES, root="model.")),),
        ),
    )


def vision(c: HFConfig, v: HFConfig) -> VisionSpec:
    """Spec of the encoder, from the model's config and its own. Pairs are rotated by the column and by the
    row in turn.
    """
    for key in ("vision_start_token_id", "vision_end_token_id"):
        c.take(key, None)  # inserted by the processor
    v.fill({"num_hidden_layers": 27, "intermediate_size": 4304, "hidden_act": "gelu_pytorch_tanh"})
    v.take_only(merge_kernel_size=[2, 2])
    width, heads = v.take_count("hidden_size", 1152), v.take_count("num_attention_heads", 16)
    side = v.take_count("pos_emb_height", 64)
    v.take_only(pos_emb_width=side)
    c.take_only(projection_hidden_size=width)
    attention = axial_attention(v, width, heads, interleaved=True)
    assert attention.rope is not None
    pairs = range(attention.head_dim // 2)
    axes, frequencies = tuple(1 - i % 2 for i in pairs), tuple(i - i % 2 for i in pairs)
    attention = replace(attention, rope=replace(attention.rope, axes=axes, frequencies=frequencies))
    norm = LayerNormSpec(1e-5)
    block = BlockSpec(attention, mlp(v, bias=True, gated=False), norm)
    return VisionSpec(
        width,
        patches(v, 14, bias=True, frames=1),
        (block,) * v.take_count("num_hidden_layers"),
        PatchMergerSpec(2, LayerNormSpec(c.take_number("projection_layer_norm_eps", 1e-5))),
        c.take_count("image_token_id", 163605, least=0),
        c.take_count("video_token_id", 163840, least=0),
        position_table=ClipTable(side, v.take_count("pos_emb_time", 4)),
        pictures=GridPictures(raster=True),
        norm_after=norm,
        clips=True,
    )
