"""SAM's encoder (arXiv:2304.02643): windows, relative positions, and convolutions after its blocks, for
square images (GOT-OCR 2.0), or for images and crops of them, with a decoder whose learned queries read its
features (DeepSeek-OCR 2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import FULL, activation, attention, layer_types, mlp
from liger_models.architectures.common.images import Names
from liger_models.architectures.encoders.parts import patches
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    AntialiasedTable,
    BlockSpec,
    ConvolutionProjectorSpec,
    CroppedPictures,
    EndedProjectorSpec,
    FixedTable,
    GridAttentionSpec,
    LayerNormSpec,
    MLPSpec,
    NormSpec,
    PatchSpec,
    QueryEncoderSpec,
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


QUERIES = (144, 256)
"""Numbers of learned queries of DeepSeek-OCR 2, for crops of 768 pixels and for images of 1024."""


def _parts(names: Names, neck: Names, **roots: str) -> tuple[tuple[str, Layout], ...]:
    """Layouts of the parts of DeepSeek-OCR 2's encoder and its projector, with these prefixes."""
    return (
        ("vision.encoder.of_patches.", Layout(names, root=roots["sam"])),
        ("vision.encoder.compression.neck.", Layout(neck, root=f"{roots['sam']}neck.")),
        ("vision.encoder.compression.conv1.", Layout(root=roots["conv1"])),
        ("vision.encoder.compression.conv2.", Layout(root=roots["conv2"])),
        ("vision.encoder.of_queries.", Layout(root=f"{roots['decoder']}layers.")),
        ("vision.encoder.norm.", Layout(root=f"{roots['decoder']}norm.")),
        ("vision.encoder.few_queries.", Layout(root=roots["crops"])),
        ("vision.encoder.many_queries.", Layout(root=roots["wholes"])),
        ("vision.projector.linear.", Layout(root=roots["linear"])),
        ("vision.projector.end", Layout(root=roots["end"])),
    )


RELEASED = _parts(
    (
        ("patch_embed.", "patch_embed.proj."),
        *(("table.weight", "pos_embed"), ("layers.", "blocks.")),
        *((".input_layernorm.", ".norm1."), (".post_attention_layernorm.", ".norm2.")),
        *NAMES[4:],
    ),
    (("conv1.", "0."), ("layer_norm1.", "1."), ("conv2.", "2."), ("layer_norm2.", "3.")),
    sam="model.sam_model.",
    conv1="model.sam_model.net_2.",
    conv2="model.sam_model.net_3.",
    decoder="model.qwen2_model.model.model.",
    crops="model.qwen2_model.query_768.",
    wholes="model.qwen2_model.query_1024.",
    linear="model.projector.layers.",
    end="model.view_seperator",
)
"""Layouts of the parts of DeepSeek-OCR 2 in released checkpoints."""
IN_MODULES = _parts(
    NAMES,
    (),
    sam="model.vision_tower.sam_encoder.",
    conv1="model.vision_tower.sam_encoder.proj.conv1.",
    conv2="model.vision_tower.sam_encoder.proj.conv2.",
    decoder="model.vision_tower.vision_encoder.",
    crops="model.vision_tower.query_768_resolution.",
    wholes="model.vision_tower.query_1024_resolution.",
    linear="model.multi_modal_projector.",
    end="model.view_separator",
)
"""The same in transformers' modules."""
WHOLE_WITH_QUERIES = ("vision.encoder.of_patches.layers.*.qkv_proj.*",)
PERMUTED_WITH_QUERIES = (("vision.encoder.of_patches.table.weight", PERMUTED[0][1]),)
TINY_WITH_QUERIES: dict[str, Any] = {
    "model_type": "deepseek_ocr2_vision",
    "sam_config": {
        **TINY,
        "model_type": "deepseek_ocr2_sam_vision_model",
        "image_size": 24,
        "downsample_channels": [20, 28],
    },
    "encoder_config": {
        "model_type": "deepseek_ocr2_encoder",
        "hidden_size": 28,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 3e-3,
    },
}


def vision(v: HFConfig, image_id: int) -> VisionSpec:
    """Spec of GOT-OCR 2.0's encoder, from its config.

    Raises:
        ConfigError: incompatible numbers.
    """
    width, patch, size, blocks = _blocks(v, v.take_count("mlp_dim", 3072))
    side = size // patch.size
    return VisionSpec(
        width,
        patch,
        blocks,
        ConvolutionProjectorSpec(side, v.take_count("output_channels", 256)),
        image_id,
        position_table=FixedTable(side),
        pictures=SquarePictures(size),
    )


def vision_with_queries(v: HFConfig, image_id: int) -> VisionSpec:
    """Spec of DeepSeek-OCR 2's encoder, from its config.

    Raises:
        ConfigError: incompatible numbers.
    """
    sam, decoder = v.part("sam_config"), v.part("encoder_config")
    sam.take("scale", None)  # not read
    ratio = sam.take_number("mlp_ratio", 4.0)
    inner = sam.take_count("mlp_dim", int(sam.take_count("hidden_size", 768) * ratio))
    width, patch, size, blocks = _blocks(sam, inner)
    channels = sam.take("downsample_channels", [512, 896])
    wide = decoder.take_count("hidden_size", 4096)
    good = (
        isinstance(channels, list) and len(channels) == 2 and all(type(n) is int and n > 0 for n in channels)
    )
    if not good or channels[1] != wide:
        raise ConfigError(
            f"{sam.name}: downsample_channels must be two numbers of channels, the second the hidden_size of "
            f"encoder_config, {wide}; found {abbreviate(channels)}"
        )
    return VisionSpec(
        width,
        patch,
        blocks,
        EndedProjectorSpec(),
        image_id,
        position_table=AntialiasedTable(size // patch.size, cubic=True),
        pictures=CroppedPictures(size, most=6),
        query_encoder=QueryEncoderSpec(
            sam.take_count("output_channels", 256), channels[0], wide, QUERIES, *_decoder(decoder)
        ),
    )


def _decoder(e: HFConfig) -> tuple[tuple[BlockSpec, ...], NormSpec]:
    """The layers of Qwen2's form that read features, and the norm after them."""
    e.fill({"intermediate_size": 22016, "num_attention_heads": 32, "max_position_embeddings": 32768})
    e.take_only(use_sliding_window=False)
    for key in ("vocab_size", "sliding_window", "max_window_layers"):
        e.take(key, None)  # without a table of embeddings and windows
    e.fill({"num_hidden_layers": 32})
    layer_types(e, lambda i: FULL, (FULL,))
    norm = NormSpec(eps=e.take_number("rms_norm_eps", 1e-6))
    block = BlockSpec(replace(attention(e), qkv_bias=True), mlp(e), norm)
    return (block,) * e.take_count("num_hidden_layers"), norm


def _blocks(v: HFConfig, inner: int) -> tuple[int, PatchSpec, int, tuple[BlockSpec, ...]]:
    """The width, the patches, the size of a whole image in pixels and the blocks, with MLPs of width `inner`.

    Raises:
        ConfigError: incompatible numbers.
    """
    v.fill({"hidden_act": "gelu"})
    v.take_only(use_abs_pos=True, use_rel_pos=True)
    width, heads = v.take_count("hidden_size", 768), v.take_count("num_attention_heads", 12)
    spec, size = patches(v, 16, bias=True, frames=1), v.take_count("image_size", 1024)
    side, depth, merge = size // spec.size, v.take_count("num_hidden_layers", 12), QueryEncoderSpec.merge
    if width % heads or size % spec.size or side % merge:
        raise ConfigError(
            f"{v.name}: {heads} heads of {width} dimensions together, and images of {size} pixels with "
            f"patches of {spec.size}; expected multiples, and a multiple of {merge} patches"
        )
    norm = LayerNormSpec(v.take_number("layer_norm_eps", 1e-6))
    window = v.take_count("window_size", 14, least=0) or None
    whole = v.take_layers("global_attn_indexes", [2, 5, 8, 11])
    bias, dim = v.take_flag("qkv_bias", True), width // heads
    inside = MLPSpec(inner, activation(v, gated=False), bias=True, gated=False)
    blocks = []
    for layer in range(depth):
        own = None if layer in whole else window
        blocks.append(
            BlockSpec(GridAttentionSpec(heads, dim, dim**-0.5, side, merge, own, bias), inside, norm)
        )
    return width, spec, size, tuple(blocks)
