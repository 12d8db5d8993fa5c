"""ERNIE 4.5 VL's encoder: Qwen2-VL's blocks, for images and videos of any size, and a resampler that makes a
token of four patches, in videos of eight.
"""

from __future__ import annotations

from typing import Any

from liger_models.architectures.common import mlp
from liger_models.architectures.encoders.parts import LINEAR_NAMES, axial_attention, patches
from liger_models.architectures.encoders.qwen import NAMES as QWEN
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import (
    BlockSpec,
    LayerNormSpec,
    NormSpec,
    ResamplerSpec,
    TimeSpec,
    VisionSpec,
)

_ENCODER = (
    *(name for name in QWEN if name[0].startswith(".")),
    *(*LINEAR_NAMES, ("patch_embed.", "patch_embed.proj."), ("norm_after.", "ln."), ("layers.", "blocks.")),
)
_RESAMPLER = (
    *(("resampler_model.linear.", "resampler_model.mlp."), ("spatial.", "spatial_linear.")),
    *(("resampler_model.norm.", "resampler_model.after_norm."), ("temporal.", "temporal_linear.")),
)


def _parts(tower: str, *inner: str) -> tuple[tuple[str, Layout], ...]:
    layers = zip((".linear_1.", ".linear_2.", ".norm."), inner, strict=True)
    names = (*_RESAMPLER, *((here, f".{there}.") for here, there in layers))
    return (
        ("vision.encoder.", Layout(_ENCODER, root=f"model.{tower}.")),
        ("vision.projector.", Layout(names, root="model.resampler_model.")),
    )


RELEASED = _parts("vision_model", "0", "2", "3")
"""Layouts of the encoder and the projector in checkpoints."""
IN_MEMORY = _parts("vision_tower", "fc1", "fc2", "ln")
"""The same in transformers' modules."""
PATCHES = (("vision.encoder.patch_embed.weight", "d (c h w) -> d c h w"),)
"""`permuted` of a `Layout`: the patch embedding is a linear layer."""
TINY: dict[str, Any] = {
    "model_type": "ernie4_5_vl_moe_vision",
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 3,
    "intermediate_size": 40,
    "hidden_act": "quick_gelu",
    "rms_norm_eps": 2e-3,
}


def vision(c: HFConfig, v: HFConfig, norm: NormSpec) -> VisionSpec:
    """Spec of the encoder, from the model's config and its own; `norm` is the language model's."""
    v.fill({"hidden_act": "quick_gelu", "intermediate_size": 5120})
    v.take_only(temporal_merge_size=2)
    width, inner = v.take_count("hidden_size", 1280), LayerNormSpec(v.take_number("rms_norm_eps", 1e-6))
    attention = axial_attention(v, width, v.take_count("num_heads", 16))
    framing = {
        **{"image_start_token_id": 101304, "image_end_token_id": 101305},
        **{"video_start_token_id": 101306, "video_end_token_id": 101307},
    }
    first, last, first_of_video, last_of_video = (c.take_count(*key, least=0) for key in framing.items())
    return VisionSpec(
        width,
        patches(v, 14, bias=False, frames=1),
        (BlockSpec(attention, mlp(v, bias=True, gated=False), inner),) * v.take_count("depth", 32),
        ResamplerSpec(v.take_count("spatial_merge_size", 2), inner, norm),
        c.take_count("image_token_id", 100295, least=0),
        c.take_count("video_token_id", 103367, least=0),
        positions=TimeSpec(),
        norm_after=inner,
        kinds="mm_token_type_ids",
        framing_ids=(first, last, first_of_video, last_of_video),
    )
