"""Molmo 2 (Ai2, 2026, arXiv:2601.10611): QK-norm, norms before or after the branches, and an encoder for
images, whole and in crops, and for videos, whose tokens all attend to one another.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.common.images import own_text
from liger_models.architectures.encoders import molmo2 as encoder
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec, RopeSpec, Topology

AFTER = (  # norms after the branches have the names of those before them
    (".post_attention_layernorm.", ".input_layernorm."),
    (".post_feedforward_layernorm.", ".post_attention_layernorm."),
)
RELEASED = Layout(
    (
        *((".input_layernorm.", ".attn_norm."), (".post_attention_layernorm.", ".ff_norm.")),
        *((".self_attn.o_proj.", ".self_attn.attn_out."), (".mlp.down_proj.", ".mlp.ff_out.")),
        *(("transformer.layers.", "transformer.blocks."), ("transformer.norm.", "transformer.ln_f.")),
    ),
    permuted=encoder.PERMUTED,
    root="model.transformer.",
    parts=(("vision.", Layout(encoder.RELEASED, root="model.")),),
    joined=(
        Joined("att_proj", ("q_proj", "k_proj", "v_proj"), within="layers."),
        Joined("ff_proj", ("up_proj", "gate_proj"), within="layers."),
    ),
    in_layers_with=(("post_feedforward_layernorm", AFTER),),
    in_two=(("embed_tokens.weight", ("wte.embedding", "wte.new_embedding"), "vocab"),),
)


@register(
    "molmo2",
    reference="Molmo2ForConditionalGeneration",
    vision=True,
    layouts=(
        RELEASED,
        # transformers saves the table of embeddings in halves.
        replace(RELEASED, in_two=((*RELEASED.in_two[0][:2], None),)),
        Layout(
            permuted=encoder.PERMUTED,
            root="model.language_model.",
            parts=(("vision.", Layout(encoder.NAMES, root="model.")),),
            in_layers_with=RELEASED.in_layers_with,
        ),
    ),
    carried=encoder.unread_layers,
    unread=dict.fromkeys(encoder.READ_BY_PROCESSORS, "read by the processor"),
)
def molmo2(c: HFConfig) -> ModelSpec:
    text = own_text(c)
    model = language_model(text)
    text.finish()
    return replace(model, vision=encoder.vision(c, model.hidden_size, model.vocab_size))


def language_model(c: HFConfig) -> ModelSpec:
    """The language model, from its config."""
    c.take_only(use_qk_norm=True)
    norm, layers = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6)), c.take_count("num_hidden_layers")
    of_heads = c.take_choice("qk_norm_type", "qwen3", "olmo") == "qwen3"
    attn = replace(
        attention(c, bias=c.take_flag("attention_bias", False)),
        o_bias=False,
        qk_norm=QKNormSpec(norm, scope="head" if of_heads else "all_heads"),
    )
    assert attn.rope is not None
    rope, longest = attn.rope, attn.rope.max_position_embeddings
    plain = replace(attn, rope=RopeSpec(rope.dim, rope.theta, max_position_embeddings=longest))
    topology: Topology = "post_norm" if c.take_flag("norm_after", False) else "pre_norm"
    scaled = c.take_layers("rope_scaling_layers", list(range(layers)))
    blocks = [BlockSpec(attn if i in scaled else plain, mlp(c), norm, topology) for i in range(layers)]
    extra_ids = c.take_count("additional_vocab_size", 128, least=0)
    return replace(decoder(c, blocks, norm, extra_ids=extra_ids), padding_idx=None)


# -- tests

for_tests(
    "molmo2",
    tiny={
        "text_config": {
            "model_type": "molmo2_text",
            "attention_bias": True,
            "additional_vocab_size": 11,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "rope_scaling_layers": [0, 2],
        },
        "vision_config": encoder.TINY,
        "adapter_config": encoder.TINY_ADAPTER,
        "image_patch_id": 132,
    },
    variants={
        "norms after": {"text_config": {"norm_after": True, "qk_norm_type": "olmo"}},
    },
)
