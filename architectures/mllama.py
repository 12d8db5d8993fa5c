"""Llama 3.2 Vision (Meta, 2024): Llama 3.1 with further layers that attend to features of images, which are
cut into tiles (arXiv:2407.21783, section 7).
"""

from dataclasses import replace

from liger_models.architectures.common import activation, attention, decoder, mlp, take_only
from liger_models.architectures.common.images import patches
from liger_models.architectures.registry import register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.spec import (
    AttentionSpec,
    BlockSpec,
    CrossAttentionSpec,
    LayerNormSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    TiledVisionSpec,
)

NAMES = (
    ("encoder.patch_embed.", "vision_model.patch_embedding."),
    ("encoder.class_token", "vision_model.class_embedding"),
    ("encoder.before.weight", "vision_model.pre_tile_positional_embedding.embedding.weight"),
    ("encoder.before.", "vision_model.pre_tile_positional_embedding."),
    ("encoder.behind.weight", "vision_model.post_tile_positional_embedding.embedding.weight"),
    ("encoder.behind.", "vision_model.post_tile_positional_embedding."),
    ("encoder.place.weight", "vision_model.gated_positional_embedding.tile_embedding.weight"),
    ("encoder.place.", "vision_model.gated_positional_embedding."),
    ("encoder.norm_before.", "vision_model.layernorm_pre."),
    ("encoder.norm_behind.", "vision_model.layernorm_post."),
    ("encoder.local.", "vision_model.transformer.layers."),
    ("encoder.overall.", "vision_model.global_transformer.layers."),
    (".mlp.up_proj.", ".mlp.fc1."),
    (".mlp.down_proj.", ".mlp.fc2."),
    ("projector.", "multi_modal_projector."),
)
RATIOS = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]


@register(
    "mllama",
    reference="MllamaForConditionalGeneration",
    tiny={
        "text_config": {
            "model_type": "mllama_text_model",
            "num_hidden_layers": 4,
            "cross_attention_layers": [1, 3],
            "hidden_size": 64,
            "pad_token_id": 5,
            "rms_norm_eps": 1e-3,
        },
        "vision_config": {
            "model_type": "mllama_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_global_layers": 1,
            "attention_heads": 2,
            "hidden_act": "quick_gelu",
            "image_size": 14,
            "patch_size": 6,
            "max_num_tiles": 3,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1], [1, 3], [3, 1]],
            "intermediate_layers_indices": [2, 0],
            "vision_output_dim": 48,
            "norm_eps": 1e-3,
        },
        "image_token_index": 131,
    },
    layouts=(
        Layout(root="model.language_model.", parts=(("vision.", Layout(NAMES)),)),
        Layout(
            (("lm_head.", "language_model.lm_head."),),
            root="language_model.model.",
            parts=(("vision.", Layout(NAMES, root="")),),
        ),
    ),
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
    take_only(text, tie_word_embeddings=False)
    c.take("tie_word_embeddings", None)  # the reference ties nothing
    norm, inner = NormSpec(eps=text.take_number("rms_norm_eps")), mlp(text)
    own = attention(text, theta=500000.0)
    take_only(text, head_dim=text.take_count("hidden_size") // own.num_attention_heads)
    cross = CrossAttentionSpec(
        own.num_attention_heads, own.num_key_value_heads, own.head_dim, own.scale, norm
    )
    seeing = text.take("cross_attention_layers", [3, 8, 13, 18, 23, 28, 33, 38])
    blocks = [
        BlockSpec(cross, inner, norm, "gated_cross") if i in seeing else BlockSpec(own, inner, norm)
        for i in range(text.take_count("num_hidden_layers"))
    ]
    vision = tiled(c, c.part("vision_config"))
    return decoder(text, blocks, norm, extra_ids=8, vision=vision)


def tiled(c: HFConfig, v: HFConfig) -> TiledVisionSpec:
    """The encoder of tiles, from its config.

    Raises:
        ConfigError: layers or widths that do not fit.
    """
    v.fill({"hidden_act": "gelu", "intermediate_size": 5120, "attention_heads": 16})
    width, heads = v.take_count("hidden_size", 1280), v.take_one_of("attention_heads", "num_attention_heads")
    taken = tuple(v.take("intermediate_layers_indices", [3, 7, 15, 23, 30]))
    count = v.take_count("num_hidden_layers", 32)
    if width % heads or not set(taken) <= set(range(count)):
        raise ConfigError(
            f"{v.name}: {heads} heads in {width} dimensions, and intermediate_layers_indices {list(taken)} "
            f"of {count} layers; expected a multiple, and layers that are there"
        )
    take_only(v, vision_output_dim=width * (1 + len(taken)))
    head_dim = width // heads
    inner = MLPSpec(v.take_count("intermediate_size"), activation(v, gated=False), bias=True, gated=False)
    block = BlockSpec(
        AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=False),
        inner,
        LayerNormSpec(eps=v.take_number("norm_eps", 1e-5)),
    )
    return TiledVisionSpec(
        width,
        patches(v, 14, bias=False, frames=1),
        (block,) * count,
        (replace(block, topology="gated_pre_norm"),) * v.take_count("num_global_layers", 8),
        image_size=v.take_count("image_size", 448),
        tiles=v.take_count("max_num_tiles", 4),
        ratios=len(v.take("supported_aspect_ratios", RATIOS)),
        taken=taken,
        norm=LayerNormSpec(eps=1e-5),
        image_id=c.take_one_of("image_token_index", "image_token_id", default=128256),
    )
