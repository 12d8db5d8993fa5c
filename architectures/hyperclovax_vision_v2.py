"""HyperCLOVA X SEED Think with images (NAVER, 2026): HyperCLOVA X with Qwen2.5-VL's encoder for images and
videos of any size, and one more linear layer after it.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders.qwen import NAMES, TINY, windowed_vision
from liger_models.architectures.granite import MULTIPLIERS
from liger_models.architectures.hyperclovax import AROUND
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


def layout(norms: tuple[tuple[str, str], ...], released: bool) -> Layout:
    """Names of the hub, or of transformers' modules, of a model with norms of these names."""
    text, name = ("model.language_model.model.", "vision_") if released else ("model.language_model.", "")
    return Layout(
        (*norms, *((("lm_head.", "model.language_model.lm_head."),) if released else ())),
        ("vision.encoder.layers.*.qkv_proj.*",),
        root=text,
        parts=(
            ("vision.projector.linear.", Layout(root=f"model.{name}projector.")),
            ("vision.", Layout(NAMES, root="model.vision_model.")),
        ),
    )


@register(
    "hyperclovax_vision_v2",
    reference="HyperCLOVAXVisionV2ForConditionalGeneration",
    vision=True,
    layouts=tuple(layout(norms, released) for released in (True, False) for norms in (AROUND, ())),
    defaults={"image_token_id": 128060, "video_token_id": 128061},
)
def hyperclovax_vision_v2(c: HFConfig) -> ModelSpec:
    vision = windowed_vision(c, c.part("vision_config"), None)
    return replace(language_model(c), vision=replace(vision, kinds=None))  # positions are counted as in text


# -- tests

for_tests(
    "hyperclovax_vision_v2",
    tiny={
        "text_config": {
            "model_type": "hyperclovax",
            **MULTIPLIERS,
            "attention_bias": True,
            "mlp_bias": True,
            "use_post_norm": True,
        },
        "vision_config": {
            **TINY,
            "model_type": "qwen2_5_vl_vision",
            "hidden_act": "silu",
            "intermediate_size": 40,
            "window_size": 12,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 28,
        },
        "image_token_id": 3,
        "video_token_id": 4,
        "tie_word_embeddings": False,
    },
    variants={"pre-norms alone": {"text_config": {"use_post_norm": False}}},
    skip={"published:config": "no copy was at hand"},
)
