"""Idefics 2 (Laurençon et al., 2024, arXiv:2405.02246): Mistral with SigLIP's encoder for images of any size;
learned latents attend to the patches, and each gives a token.
"""

from dataclasses import replace

from liger_models.architectures.common import activation, check_groups
from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.registry import for_tests, register
from liger_models.architectures.registry.multimodal import text_part
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import FractionTable, MaskedPictures, ModelSpec, NormSpec, PerceiverSpec

PROJECTOR = (
    *((f".{name}_proj.", f".self_attn.{name}_proj.") for name in "qkvo"),
    *((".norm_latents.", ".input_latents_norm."), (".norm_patches.", ".input_context_norm.")),
    *((".norm_mlp.", ".post_attention_layernorm."), ("connector.mlp.", "connector.modality_projection.")),
    *(
        (f"connector.{name}", f"connector.perceiver_resampler.{name}")
        for name in ("latents", "layers", "norm")
    ),
)
PARTS = (
    ("vision.encoder.", Layout(clip.NAMES, root="model.vision_model.")),
    ("vision.projector.", Layout(PROJECTOR, root="model.connector.")),
)
DEFAULTS = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"image_size": 224, "patch_size": 32, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}


@register(
    "idefics2",
    reference="Idefics2ForConditionalGeneration",
    vision=True,
    layouts=(Layout(root="model.text_model.", parts=PARTS),),
)
def idefics2(c: HFConfig) -> ModelSpec:
    text, v, t = language_model(c), c.part("vision_config"), text_part(c)
    v.model_type = clip.SIGLIP  # with other defaults
    v.fill(DEFAULTS)
    projector = perceiver(c.part("perceiver_config"), t, text.hidden_size)
    side = v.take_count("image_size") // v.take_count("patch_size")
    pictures = MaskedPictures(((side**2, projector.latents),), by_row=True)
    image_id = c.take_count("image_token_id", 32001, least=0)
    vision = clip.vision(v, projector, image_id, pictures=pictures)
    return replace(text, vision=replace(vision, position_table=FractionTable(side)))


def perceiver(p: HFConfig, text: HFConfig, hidden_size: int) -> PerceiverSpec:
    """The projector, from its own config and the language model's."""
    heads, kv_heads = p.take_count("resampler_n_heads", 16), p.take_count("num_key_value_heads", 4)
    check_groups(p, heads, kv_heads)
    # With the defaults of another width, the reference takes the language model's epsilon.
    eps = p.take_number("rms_norm_eps", 1e-6)
    eps = eps if p.take_count("hidden_size", 4096) == hidden_size else text.take_number("rms_norm_eps", 1e-6)
    return PerceiverSpec(
        size=text.take_count("intermediate_size"),
        latents=p.take_count("resampler_n_latents", 64),
        depth=p.take_count("resampler_depth", 3),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=p.take_count("resampler_head_dim", 96),
        inner_size=4 * hidden_size,
        norm=NormSpec(eps=eps),
        activation=activation(p),
        patch_activation=activation(text),
    )


# -- tests

for_tests(
    "idefics2",
    tiny={
        "text_config": {"model_type": "mistral"},
        "vision_config": {**clip.TINY_SIGLIP, "model_type": "idefics2", "image_size": 12},
        "perceiver_config": {
            **{"hidden_act": "gelu", "hidden_size": 48, "rms_norm_eps": 2e-4, "num_key_value_heads": 2},
            **{"resampler_depth": 2, "resampler_head_dim": 12, "resampler_n_heads": 4},
            **{"resampler_n_latents": 5, "model_type": "idefics2"},
        },
        "image_token_id": 3,
    },
)
