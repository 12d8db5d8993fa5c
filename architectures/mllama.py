"""Llama 3.2 Vision (Meta, 2024): Llama 3.1 with additional cross-attention layers over features of image
tiles (arXiv:2407.21783, section 7).
"""

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.common.images import vision_layouts
from liger_models.architectures.encoders import mllama as encoder
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, CrossAttentionSpec, ModelSpec, NormSpec


@register(
    "mllama",
    reference="MllamaForConditionalGeneration",
    vision=True,
    layouts=vision_layouts({"vision.": ("", encoder.NAMES)})[::-1],  # transformers' own comes first
)
def mllama(c: HFConfig) -> ModelSpec:
    text = c.part("text_config")
    text.fill(
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 128004,
        }
    )
    text.take_only(tie_word_embeddings=False)
    c.take("tie_word_embeddings", None)  # the reference ties nothing
    norm, inner = NormSpec(eps=text.take_number("rms_norm_eps")), mlp(text)
    own = attention(text, theta=500000.0)
    text.take_only(head_dim=text.take_count("hidden_size") // own.num_attention_heads)
    cross = CrossAttentionSpec(
        own.num_attention_heads, own.num_key_value_heads, own.head_dim, own.scale, norm
    )
    cross_attention = text.take_layers("cross_attention_layers", [3, 8, 13, 18, 23, 28, 33, 38])
    blocks = [
        BlockSpec(cross, inner, norm, "gated_cross") if i in cross_attention else BlockSpec(own, inner, norm)
        for i in range(text.take_count("num_hidden_layers"))
    ]
    image_id = c.take_count(("image_token_index", "image_token_id"), 128256, least=0)
    vision = encoder.vision(c.part("vision_config"), image_id)
    return decoder(text, blocks, norm, extra_ids=8, vision=vision)


# -- tests

for_tests(
    "mllama",
    tiny={
        "text_config": {
            "model_type": "mllama_text_model",
            "num_hidden_layers": 4,
            "cross_attention_layers": [1, 3],
            "hidden_size": 64,
            "pad_token_id": 5,
            "rms_norm_eps": 1e-3,
        },
        "vision_config": encoder.TINY,
        "image_token_index": 131,
    },
)
