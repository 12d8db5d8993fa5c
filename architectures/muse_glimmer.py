"""Muse Glimmer (Meta, 2026): norms before and after the branches, unweighted QK-norm, a gate on attention's
output, normalised embeddings and scaled, soft-capped logits; three of every four layers have a sliding
window, and only those have positions. An encoder for images and videos of any size.
"""

from dataclasses import replace

from liger_models.architectures.common import FULL, SLIDING, attention, by_layer, decoder, mlp, windows
from liger_models.architectures.common.images import own_text
from liger_models.architectures.encoders import muse_glimmer as encoder
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec


@register(
    "muse_glimmer",
    reference="MuseGlimmerForConditionalGeneration",
    vision=True,
    layouts=(
        Layout(
            ((".g_proj.", ".gate_proj."),),
            permuted=encoder.PERMUTED,
            root="model.language_model.",
            parts=(("vision.", Layout(encoder.NAMES, root="model.")),),
        ),
    ),
)
def muse_glimmer(c: HFConfig) -> ModelSpec:
    text = own_text(c)
    model = language_model(text)
    text.finish()
    assert model.id_norm is not None
    return replace(model, vision=encoder.vision(c, c.part("vision_config"), model.id_norm))


def language_model(c: HFConfig) -> ModelSpec:
    """The language model, from its config."""
    eps, layers = c.take_number("rms_norm_eps", 1e-5), c.take_count("num_hidden_layers")
    norm = NormSpec(eps=eps, offset=1.0, cast="gemma")
    plain = NormSpec(eps=eps, cast="float32")
    attn = attention(c, bias=c.take_flag("attention_bias", False))
    attn = replace(
        attn,
        scale=attn.scale * c.take_number("qk_scale_factor", 3.87),
        qk_norm=QKNormSpec(plain, scope="unweighted"),
        gates="channels",
    )

    def is_full(layer: int) -> bool:
        return (layers - 1 - layer) % 4 == 0

    # Of the thetas only whether they are 0 counts, as in the reference.
    turned = by_layer(c, "layer_rope_theta", [float(not is_full(i)) for i in range(layers)])
    blocks = [
        BlockSpec(
            replace(attn, window=window, rope=attn.rope if theta else None),
            mlp(c, key="hidden_activation"),
            norm,
            topology="sandwich",
            branch_norm=replace(norm, eps=c.take_number("post_norm_eps", 1e-8)),
        )
        for window, theta in zip(windows(c, lambda i: FULL if is_full(i) else SLIDING), turned, strict=True)
    ]
    return decoder(
        c,
        blocks,
        plain,
        id_norm=replace(plain, weighted=False),
        logit_scale=c.take_number("output_multiplier", 0.19611613513818404),
        logit_softcap=c.take_number("final_logit_softcapping", 20.0),
    )


# -- tests

for_tests(
    "muse_glimmer",
    tiny={
        "text_config": {
            "model_type": "muse_glimmer_text",
            "hidden_act": ...,
            "hidden_activation": "silu",
            "rms_norm_eps": 1e-3,
            "post_norm_eps": 3e-2,
            "attention_bias": True,
            "sliding_window": 7,
            "layer_types": [SLIDING, FULL, SLIDING],
            "layer_rope_theta": [1.0, 0, 1.0],
            "qk_scale_factor": 1.7,
            "output_multiplier": 0.4,
            "final_logit_softcapping": 2.0,
        },
        "vision_config": encoder.TINY,
        "image_token_id": 3,
        "video_token_id": 4,
        "out_hidden_size": 128,
        "projector_hidden_size": 28,
    },
    skip={"published:config": "no copy was at hand"},
)
