"""ViP-LLaVA (Cai et al., 2024, arXiv:2312.00784): LLaVA 1.5 with the normalised outputs of several of CLIP's
layers side by side.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.encoders.parts import projector_activation, states_read
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import LayerNormSpec, MLPProjectorSpec, ModelSpec

LAYERS = [-2, -5, -8, -11, 6]
OLDER = ("vision_feature_layers",)  # of the released configs


def encoder(c: HFConfig) -> HFConfig:
    """Config of the encoder."""
    return clip.tower(c, [clip.CLIP])


@register(
    "vipllava",
    reference="VipLlavaForConditionalGeneration",
    vision=True,
    layouts=clip.layouts((("norm.", "projector_layernorm."),)),
    defaults={"vision_feature_layer": LAYERS},
    carried=lambda c: clip.unread_tensors(c, encoder(c), LAYERS, OLDER),
)
def vipllava(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), encoder(c)
    c.take("image_seq_length", None)  # read by the processor
    norm = LayerNormSpec(c.take_number("projector_layernorm_eps", 1e-5))
    projector = MLPProjectorSpec(projector_activation(c), norm=norm)
    image_id = c.take_count(("image_token_index", "image_token_id"), 32000, least=0)
    states = states_read(c, v, LAYERS, OLDER)
    return replace(text, vision=clip.vision(v, projector, image_id, states))


# -- tests

for_tests(
    "vipllava",
    tiny={
        "text_config": {"model_type": "llama"},
        "vision_config": clip.TINY_CLIP,
        "image_token_index": 3,
        "projector_layernorm_eps": 2e-3,
        "vision_feature_layers": [-2, 1],
        "tie_word_embeddings": False,
    },
    variants={"one layer": {"vision_feature_layers": -1}},
    skip={"published:config": "no copy was at hand"},
)
