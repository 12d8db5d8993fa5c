"""PaliGemma (Beyer et al., 2024, arXiv:2407.07726) and PaliGemma 2 (Steiner et al., 2024, arXiv:2412.03555):
Gemma or Gemma 2 with a SigLIP encoder and one linear layer; the tokens of images and prompt attend to each
other in both directions.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import AttentionSpec, LinearProjectorSpec, ModelSpec


@register(
    "paligemma",
    reference="PaliGemmaForConditionalGeneration",
    vision=True,
    layouts=clip.layouts(),
    carried=lambda c: clip.HEAD,
)
def paligemma(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), clip.tower(c, [clip.SIGLIP])
    c.take_only(projection_dim=text.hidden_size)
    image_id = c.take_count("image_token_index", 256000, least=0)
    vision = clip.vision(v, LinearProjectorSpec(bias=True), image_id, kinds="token_type_ids", spans="prefix")
    blocks = []
    for block in text.blocks:
        assert isinstance(block.mixer, AttentionSpec)
        blocks.append(replace(block, mixer=replace(block.mixer, whole_spans=block.mixer.window is not None)))
    return replace(text, blocks=tuple(blocks), vision=vision)


# -- tests

for_tests(
    "paligemma",
    tiny={
        "text_config": {
            "model_type": "gemma2",
            "hidden_act": ...,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "sliding_window": 3,
        },
        "vision_config": clip.TINY_SIGLIP,
        "image_token_index": 3,
        "projection_dim": 48,
    },
    variants={
        "gemma": {
            "text_config": {
                "model_type": "gemma",
                "hidden_act": "gelu_pytorch_tanh",
                **dict.fromkeys(
                    (
                        "hidden_activation",
                        "query_pre_attn_scalar",
                        "attn_logit_softcapping",
                        "final_logit_softcapping",
                        "sliding_window",
                    ),
                    ...,
                ),
            },
            "tie_word_embeddings": False,
        }
    },
    skip={"field:LinearProjectorSpec.concatenated": "one patch makes a token"},
)
