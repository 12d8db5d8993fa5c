"""Idefics 3 (Laurençon et al., 2024, arXiv:2408.12637): Llama over square tiles of images, with SigLIP's
encoder and one linear layer; four patches make a token. `smolvlm` is SmolVLM, where sixteen do.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import FractionTable, LinearProjectorSpec, ModelSpec, SquarePictures

PARTS = (
    ("vision.encoder.", Layout(clip.NAMES, root="model.vision_model.")),
    ("vision.projector.", Layout((("linear.", "modality_projection.proj."),), root="model.connector.")),
)
DEFAULTS = {
    **{"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16},
    **{"image_size": 224, "patch_size": 32, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
LAYOUT = Layout(root="model.text_model.", parts=PARTS)


@register("idefics3", reference="Idefics3ForConditionalGeneration", vision=True, layouts=(LAYOUT,))
def idefics3(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    v.model_type = clip.SIGLIP  # with other defaults
    v.fill(DEFAULTS)
    for key in ("max_image_size", "size", "use_base_siglip"):
        v.take(key, None)  # not read, or only by the processor
    merge, side = c.take_count("scale_factor", 2), v.take_count("image_size") // v.take_count("patch_size")
    if side % merge:
        raise ConfigError(
            f"{c.name}: scale_factor is {merge}, and an image has {side} times {side} patches; expected a "
            "divisor"
        )
    vision = clip.vision(
        v,
        LinearProjectorSpec(merge, concatenated=True),
        c.take_count("image_token_id", 128257, least=0),
        pictures=SquarePictures(v.take_count("image_size"), by_row=True),
    )
    return replace(text, vision=replace(vision, position_table=FractionTable(side)))


@register("smolvlm", reference="SmolVLMForConditionalGeneration", vision=True, layouts=(LAYOUT,))
def smolvlm(c: HFConfig) -> ModelSpec:
    """SmolVLM and SmolVLM 2 (Marafioti et al., 2025, arXiv:2504.05299): Idefics 3 in small sizes; frames of
    videos are images.
    """
    return idefics3(c)


# -- tests

for family in ("idefics3", "smolvlm"):
    for_tests(
        family,
        tiny={
            "text_config": {"model_type": "llama"},
            "vision_config": {**clip.TINY_SIGLIP, "model_type": f"{family}_vision", "image_size": 13},
            "image_token_id": 3,
            "scale_factor": 2,
        },
        skip={"field:SquarePictures.size": "squares of any size are taken"},
    )
