"""Gemma 4's encoder, for images and videos of any size; the image inputs of Gemma 4 12B, normalised pixels of
large patches through one linear layer, without an encoder; and Gemma 3n's encoder, MobileNetV5.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from liger_models.architectures.common import check_groups, mlp
from liger_models.architectures.encoders.parts import axial_attention
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    AxesTable,
    BlockSpec,
    EdgeBlockSpec,
    InvertedBlockSpec,
    LayerNormSpec,
    LinearProjectorSpec,
    NormSpec,
    PatchSpec,
    PlacedPictures,
    PoolProjectorSpec,
    ProjectorSpec,
    PyramidBlockSpec,
    PyramidSpec,
    QKNormSpec,
    QueryBlockSpec,
    SquarePictures,
    VisionSpec,
)

NAMES = (
    *((".qkv_proj.", "."), (".gate_up_proj.", "."), ("_proj.linear.", "_proj.")),  # of clipped ones
    ("_proj.", "_proj.linear."),
    *(("_proj.linear.input_", "_proj.input_"), ("_proj.linear.output_", "_proj.output_")),
    ("encoder.patch_embed.", "vision_tower.patch_embedder.input_proj."),
    ("encoder.table.weight", "vision_tower.patch_embedder.position_embedding_table"),
    ("encoder.layers.", "vision_tower.encoder.layers."),
    ("projector.std_", "vision_tower.std_"),
    ("projector.linear.", "embed_vision.embedding_projection."),
)
"""Names of the encoder and the projector."""
TINY: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pooling_kernel_size": 2,
    "patch_size": 3,
    "position_embedding_size": 18,
    "rms_norm_eps": 0.3,
    "standardize": True,
}


def vision(v: HFConfig, image_id: int, **settings: Any) -> VisionSpec:
    """Spec of the encoder, from its config; `settings` are other fields of the spec."""
    for key in ("max_position_embeddings", "attention_bias", "global_head_dim", "default_output_length"):
        v.take(key, None)  # unused by the reference, or read by the processor
    v.fill({"hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 3072})
    width, heads = v.take_count("hidden_size", 768), v.take_count("num_attention_heads", 12)
    kv_heads, head_dim = v.take_count("num_key_value_heads", 12), v.take_count("head_dim", 64)
    check_groups(v, heads, kv_heads)
    clipped = v.take_flag("use_clipped_linears", False)
    norm = NormSpec(eps=v.take_number("rms_norm_eps", 1e-6), cast="gemma")
    attention = replace(
        axial_attention(v, heads * head_dim, heads, bias=False, theta=100.0, axes=(1, 0), halves=True),
        num_key_value_heads=kv_heads,
        scale=1.0,
        qk_norm=QKNormSpec(norm, values=True),
        clipped=clipped,
    )
    inner = replace(mlp(v, key="hidden_activation"), clipped=clipped)
    merge = v.take_count("pooling_kernel_size", 3)
    return VisionSpec(
        width,
        PatchSpec(v.take_count("patch_size", 16)),
        (BlockSpec(attention, inner, norm, "sandwich"),) * v.take_count("num_hidden_layers", 16),
        PoolProjectorSpec(merge, norm.eps, v.take_flag("standardize", False)),
        image_id,
        position_table=AxesTable(v.take_count("position_embedding_size", 10240)),
        pictures=PlacedPictures(),
        kinds="mm_token_type_ids",
        **settings,
    )


_PARTS = (
    ("encoder.norm_pixels.", "patch_ln1."),
    ("encoder.patch_embed.", "patch_dense."),
    ("encoder.norm_patches.", "patch_ln2."),
    ("encoder.table.weight", "pos_embedding"),
    ("encoder.norm_after.", "pos_norm."),
)
UNIFIED = (
    *((here, f"vision_embedder.{there}") for here, there in _PARTS),
    ("projector.linear.", "embed_vision.embedding_projection."),
)
"""Names of the parts in checkpoints, without an encoder."""
UNIFIED_IN_MODULES = (
    *((here, f"embed_vision.{there}") for here, there in _PARTS),
    ("projector.linear.", "embed_vision.multimodal_embedder.embedding_projection."),
)
"""The same in transformers' modules."""
UNIFIED_PERMUTED = (
    ("vision.encoder.patch_embed.weight", "d (h w c) -> d c h w"),
    ("vision.encoder.norm_pixels.*", "(height width channels) -> (channels height width)"),
    ("vision.encoder.table.weight", "size axes d -> axes size d"),
)
"""Pixels have their channels last in checkpoints."""
UNIFIED_TINY: dict[str, Any] = {
    "model_type": "gemma4_unified_vision",
    "patch_size": 2,
    "pooling_kernel_size": 2,
    "mm_embed_dim": 40,
    "mm_posemb_size": 18,
    "rms_norm_eps": 0.3,
    "output_proj_dims": 40,
}


def patches_alone(v: HFConfig, image_id: int, **settings: Any) -> VisionSpec:
    """Spec of the parts without an encoder, from their config; `settings` are other fields of the spec."""
    width, norm = v.take_count("mm_embed_dim", 3840), LayerNormSpec(1e-5)
    size = v.take_count("patch_size", 16) * v.take_count("pooling_kernel_size", 3)
    v.take_only(output_proj_dims=width, model_patch_size=size)
    v.take("num_soft_tokens", None)  # read by the processor
    return VisionSpec(
        width,
        PatchSpec(size, bias=True),
        (),
        LinearProjectorSpec(norm=NormSpec(v.take_number("rms_norm_eps", 1e-6), cast="gemma", weighted=False)),
        image_id,
        position_table=AxesTable(v.take_count("mm_posemb_size", 1120)),
        pictures=PlacedPictures(centred=False),
        norm_pixels=norm,
        norm_patches=norm,
        norm_after=norm,
        kinds="mm_token_type_ids",
        **settings,
    )


# -- MobileNetV5, of Gemma 3n

_MOBILENET, _WIDTH = "mobilenetv5_300m_enc", 2048  # in timm
_PATCH = 48  # pixels on a side, a token: three at the resolution of the fusion
TINY_MOBILENET: dict[str, Any] = {
    "model_type": "gemma3n_vision",
    "architecture": _MOBILENET,
    "hidden_size": _WIDTH,
    "vocab_size": 10,
    "vocab_offset": 111,
    "rms_norm_eps": 0.3,
    "model_args": {"channel_multiplier": 0.02, "msfa_output_resolution": 2},
    "label_names": ["LABEL_0", "LABEL_1"],
}


def mobilenet(v: HFConfig, projector: ProjectorSpec, image_id: int, tokens: int) -> VisionSpec:
    """Spec of MobileNetV5 (after MobileNetV4, arXiv:2404.10518), whose sizes the package timm fixes, from its
    config `v`.

    Args:
        projector: to the language model.
        image_id: of image tokens.
        tokens: of an image.

    Raises:
        ConfigError: another encoder, or sizes that the reference cannot run.
    """
    v.take_only(architecture=_MOBILENET, hidden_size=_WIDTH, do_pooling=False)
    for key in ("label_names", "num_classes", "num_labels", "global_pool", "pretrained_cfg"):
        v.take(key, None)  # of a classifier
    given = v.take("model_args", None) or {}
    known, multiplier, side = isinstance(given, dict), 1.0, 16
    if known:
        multiplier, side = given.get("channel_multiplier", 1.0), given.get("msfa_output_resolution", 16)
        known = given.keys() <= {"channel_multiplier", "msfa_output_resolution"}
        known = known and type(multiplier) in (int, float) and type(side) is int
    if not known or side < 1 or not multiplier > 0:
        raise ConfigError(
            f"{v.name}: model_args may have channel_multiplier, a positive number, and "
            f"msfa_output_resolution, a count; found {abbreviate(given)}"
        )
    if tokens != side**2:
        raise ConfigError(
            f"{v.name}: an image has {tokens} tokens (vision_soft_tokens_per_image), and its features are "
            f"{side} times {side}"
        )
    return VisionSpec(
        *(_WIDTH, PatchSpec(_PATCH), (), projector, image_id),
        pictures=SquarePictures(_PATCH * side),
        pyramid=PyramidSpec(
            64 if multiplier < 1 else _channels(64, multiplier), _stages(multiplier), math.sqrt(_WIDTH)
        ),
    )


def _channels(count: int, multiplier: float) -> int:
    """A number of channels times the multiplier, as a multiple of 8 that is less by a tenth at most."""
    exact = count * multiplier
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * exact else rounded


def _stages(multiplier: float) -> tuple[tuple[PyramidBlockSpec, ...], ...]:
    first, second, third, fourth = (_channels(n, multiplier) for n in (128, 256, 640, 1280))
    near, far = QueryBlockSpec(12, 64, stride=2), QueryBlockSpec(16, 96)
    return (
        (EdgeBlockSpec(first, 4, stride=2), *(EdgeBlockSpec(first, 4),) * 2),
        (
            InvertedBlockSpec(second, 6, start=3, middle=5, stride=2),
            *(InvertedBlockSpec(second, 4, start=size) for size in (5, 3, 5, 3)),
        ),
        (
            InvertedBlockSpec(third, 6, start=5, middle=5, stride=2),
            *(InvertedBlockSpec(third, 4, start=5),) * 7,
            InvertedBlockSpec(third, 1),
            *(near, InvertedBlockSpec(third, 2)) * 14,
        ),
        (
            InvertedBlockSpec(fourth, 6, start=5, middle=5, stride=2),
            *(far, InvertedBlockSpec(fourth, 2)) * 19,
        ),
    )
