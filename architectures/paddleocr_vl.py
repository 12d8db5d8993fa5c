"""PaddleOCR-VL (Baidu, 2025, arXiv:2510.14528): a small ERNIE 4.5 for reading documents, with SigLIP's layers
for images of any size, whose positions are both rotary and learned.
"""

from dataclasses import replace

from liger_models.architectures.common import mlp
from liger_models.architectures.common.images import language_model, with_axis_sections
from liger_models.architectures.encoders import clip
from liger_models.architectures.encoders.parts import axial_attention, patches
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    BilinearTable,
    BlockSpec,
    GridPictures,
    LayerNormSpec,
    ModelSpec,
    PatchMergerSpec,
    TimeSpec,
    VisionSpec,
)


def layout(root: str, visual: str, projector: str) -> Layout:
    """Layout of checkpoints with these prefixes."""
    vision = (
        ("vision.encoder.", Layout(clip.NAMES, root=f"{visual}vision_model.")),
        ("vision.projector.", Layout((("norm.", "pre_norm."),), root=projector)),
    )
    return Layout(root=root, parts=vision)


@register(
    "paddleocr_vl",
    reference="PaddleOCRVLForConditionalGeneration",
    vision=True,
    layouts=(
        layout("model.", "visual.", "mlp_AR."),
        layout("model.language_model.", "model.visual.", "model.projector."),
    ),
    carried=lambda c: ("*visual.vision_model.head.*", "*.packing_position_embedding.*"),
)
def paddleocr_vl(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    for key in ("vision_end_token_id", "vision_start_token_id", "video_token_id"):
        c.take(key, None)  # the model takes only images
    for key in ("temporal_patch_size", "tokens_per_second", "pad_token_id"):
        v.take(key, None)  # the same
    v.fill({"hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304})
    width, spec = v.take_count("hidden_size", 1152), patches(v, 14, bias=True, frames=1)
    side, norm = v.take_count("image_size", 384), LayerNormSpec(v.take_number("layer_norm_eps", 1e-6))
    if side < spec.size:
        raise ConfigError(f"{v.name}: image_size is {side}, less than one patch of {spec.size} pixels")
    block = BlockSpec(
        axial_attention(v, width, v.take_count("num_attention_heads", 16)),
        mlp(v, bias=True, gated=False),
        norm,
    )
    vision = VisionSpec(
        width,
        spec,
        (block,) * v.take_count("num_hidden_layers", 27),
        PatchMergerSpec(v.take_count("spatial_merge_size", 2), LayerNormSpec(1e-5)),
        c.take_count("image_token_id", 100295, least=0),
        positions=TimeSpec(),
        position_table=BilinearTable(side // spec.size),
        pictures=GridPictures(raster=True),
        norm_after=norm,
        kinds="mm_token_type_ids",
    )
    return replace(with_axis_sections(c, text, (16, 24, 24)), vision=vision)


# -- tests

NO_VIDEOS = "the model takes only images"
for_tests(
    "paddleocr_vl",
    tiny={
        "text_config": {
            "model_type": "paddleocr_vl_text",
            "hidden_size": 48,
            "use_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            **{"model_type": "paddleocr_vl_vision", "hidden_size": 32, "intermediate_size": 40},
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 3, "image_size": 16},
            **{"layer_norm_eps": 2e-3, "spatial_merge_size": 2},
        },
        "image_token_id": 3,
        "tie_word_embeddings": False,
    },
    skip={
        "field:TimeSpec.tokens_per_second": NO_VIDEOS,
        "field:TimeSpec.steps_apart": NO_VIDEOS,
    },
)
