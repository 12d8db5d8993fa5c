"""DeepSeek-VL 1.3B (DeepSeek, 2024, arXiv:2403.05525): LLaMA with SigLIP and two linear layers, over images
of one size.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import MLPProjectorSpec, ModelSpec

ALIGNER = (("linear_1.", "linear1."), ("linear_2.", "linear2."))


@register(
    "deepseek_vl",
    reference="DeepseekVLForConditionalGeneration",
    vision=True,
    layouts=tuple(
        Layout(
            root="model.language_model.",
            parts=(
                ("vision.encoder.", Layout(clip.NAMES, root=f"model.vision_model.{inner}")),
                ("vision.projector.", Layout(ALIGNER, root="model.aligner.")),
            ),
        )
        for inner in ("vision_model.", "")
    ),
    carried=lambda c: ("*vision_model.head.*", "*embeddings.position_ids"),
)
def deepseek_vl(c: HFConfig) -> ModelSpec:
    v = clip.tower(c, [clip.SIGLIP])
    image_id = c.take_count("image_token_id", 100015, least=0)
    return replace(language_model(c), vision=clip.vision(v, MLPProjectorSpec("gelu"), image_id))


# -- tests

for_tests(
    "deepseek_vl",
    tiny={
        "text_config": {"model_type": "llama"},
        "vision_config": clip.TINY_SIGLIP,
        "image_token_id": 3,
        "tie_word_embeddings": False,
    },
)
