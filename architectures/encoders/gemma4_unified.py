"""Image inputs of Gemma 4 12B: normalised pixels of large patches through one linear layer, without an
encoder.
"""

from __future__ import annotations

from typing import Any

from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import (
    AxesTable,
    LayerNormSpec,
    LinearProjectorSpec,
    NormSpec,
    PatchSpec,
    PlacedPictures,
    VisionSpec,
)

_PARTS = (
    ("encoder.norm_pixels.", "patch_ln1."),
    ("encoder.patch_embed.", "patch_dense."),
    ("encoder.norm_patches.", "patch_ln2."),
    ("encoder.table.weight", "pos_embedding"),
    ("encoder.norm_after.", "pos_norm."),
)
NAMES = (
    *((here, f"vision_embedder.{there}") for here, there in _PARTS),
    ("projector.linear.", "embed_vision.embedding_projection."),
)
"""Names of the parts in checkpoints."""
NAMES_IN_MODULES = (
    *((here, f"embed_vision.{there}") for here, there in _PARTS),
    ("projector.linear.", "embed_vision.multimodal_embedder.embedding_projection."),
)
"""The same in transformers' modules."""
PERMUTED = (
    ("vision.encoder.patch_embed.weight", "d (h w c) -> d c h w"),
    ("vision.encoder.norm_pixels.*", "(height width channels) -> (channels height width)"),
    ("vision.encoder.table.weight", "size axes d -> axes size d"),
)
"""Pixels have their channels last in checkpoints."""
TINY: dict[str, Any] = {
    "model_type": "gemma4_unified_vision",
    "patch_size": 2,
    "pooling_kernel_size": 2,
    "mm_embed_dim": 40,
    "mm_posemb_size": 18,
    "rms_norm_eps": 0.3,
    "output_proj_dims": 40,
}


def vision(v: HFConfig, image_id: int, **settings: Any) -> VisionSpec:
    """Spec of the parts, from their config; `settings` are other fields of the spec."""
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
