"""HyperCLOVA X SEED Think with images (NAVER, 2026): HyperCLOVA X with Qwen2.5-VL's encoder for images and
videos of any size, and one more linear layer after it.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders.qwen import NAMES, TINY, windowed_vision
from liger_models.architectures.granite import MULTIPLIERS
from liger_models.architectures.hyperclovax import AROUND
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

ROOT = "model.language_model."
HEAD = (("lm_head.", f"{ROOT}lm_head."),)


def layout(root: str, head: tuple[tuple[str, str], ...], projector: str, norms: Any) -> Layout:
    """Names with these of the language model, its head, the last linear layer and the norms."""
    return Layout(
        (*norms, *head),
        ("vision.encoder.layers.*.qkv_proj.*",),
        root=root,
        parts=(
            ("vision.projector.linear.", Layout(root=f"model.{projector}.")),
            ("vision.", Layout(NAMES, root="model.vision_model.")),
        ),
    )


@register(
    "hyperclovax_vision_v2",
    reference="HyperCLOVAXVisionV2ForConditionalGeneration",
    vision=True,
    layouts=tuple(
        layout(root, head, projector, norms)
        for root, head, projector in (
            (f"{ROOT}model.", HEAD, "vision_projector"),  # as released
            (ROOT, HEAD, "vision_projector"),  # as transformers saves it
            (ROOT, (), "projector"),
        )
        for norms in (AROUND, ())
    ),
    defaults={"image_token_id": 128060, "video_token_id": 128061},
)
def hyperclovax_vision_v2(c: HFConfig) -> ModelSpec:
    v = c.part("vision_config")
    v.take("tokens_per_second", None)  # positions are counted as in text
    return replace(language_model(c), vision=replace(windowed_vision(c, v, None), kinds=None))


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
