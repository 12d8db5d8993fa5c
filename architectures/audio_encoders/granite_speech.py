"""The encoder of Granite Speech (Saon et al., 2025, arXiv:2505.08699): a conformer that attends within blocks
of frames, and a Q-Former over windows of its output. A frame is 20 ms of sound.
"""

from __future__ import annotations

from typing import Any

from liger_models.architectures.common.images import Names
from liger_models.architectures.encoders.parts import QUERY_LAYER_NAMES, query_former
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AudioSpec,
    BlockSpec,
    ContextAttentionSpec,
    FrameQueriesSpec,
    LayerNormSpec,
    LightConvSpec,
    MLPSpec,
    StackedSounds,
)

NAMES: Names = (
    *((".first_mlp.", ".ff1."), (".mlp.", ".ff2."), (".first_layernorm.", ".ff1.pre_norm.")),
    *((".pre_feedforward_layernorm.", ".ff2.pre_norm."), (".input_layernorm.", ".attn.pre_norm.")),
    *((".self_attn.distances.", ".attn.rel_pos_emb."), (".self_attn.q_proj.", ".attn.to_q.")),
    *((".self_attn.kv_proj.", ".attn.to_kv."), (".self_attn.o_proj.", ".attn.to_out.")),
    (".conv_layernorm.", ".conv.norm."),
    *((".conv.in_proj.", ".conv.up_conv."), (".conv.conv1d.", ".conv.depth_conv.conv.")),
    *((".conv.out_proj.", ".conv.down_conv."), (".final_layernorm.", ".post_norm.")),
    ("subsampling.in_proj.", "input_linear."),
)
"""Names in the encoder."""


def layouts() -> tuple[Layout, ...]:
    """Layouts of the hub, and of transformers' modules."""
    return tuple(
        Layout(
            head,
            root=text,
            whole=("audio.encoder.*.kv_proj.*",),
            parts=(
                ("audio.encoder.", Layout(NAMES, root=f"{root}encoder.")),
                ("audio.projector.", Layout(QUERY_LAYER_NAMES, root=f"{root}projector.")),
            ),
        )
        for text, root, head in (
            ("language_model.model.", "", (("lm_head.", "language_model.lm_head."),)),
            ("model.language_model.", "model.", ()),
        )
    )


def audio(c: HFConfig, *, joins: bool = False) -> AudioSpec:
    """Spec of the encoder and the projector, from the whole model's config. If it `joins` states, the
    projector reads those of the layers that `cat_hidden_layers` names, too.

    Raises:
        ConfigError: sizes that the reference cannot run, or dropout.
    """
    a, audio_id = (
        c.part("encoder_config"),
        c.take_count(("audio_token_index", "audio_token_id"), 49155, least=0),
    )
    a.fill({"dropout": 0.1})
    width, heads = a.take_count("hidden_dim", 1024), a.take_count("num_heads", 8)
    head_dim = a.take_count("dim_head", None) or width // heads
    context, most = a.take_count("context_size", 200), a.take_count("max_pos_emb", 512)
    if context > most:
        raise ConfigError(
            f"{a.name}: context_size is {context}; expected at most max_pos_emb, {most}, the largest distance"
        )
    taps = a.take_count("conv_kernel_size", 15)
    if taps % 2 == 0:
        raise ConfigError(f"{a.name}: conv_kernel_size is {taps}; expected an odd number")
    norm = LayerNormSpec(1e-5)
    block = BlockSpec(
        ContextAttentionSpec(heads, head_dim, head_dim**-0.5, context, most),
        MLPSpec(width * a.take_count("feedforward_mult", 4), "silu", bias=True, gated=False),
        norm,
        "conformer",
        residual_scale=0.5,
        second_mixer=LightConvSpec(
            taps,
            norm,
            centred=True,
            bias=True,
            depthwise_bias=False,
            expansion=a.take_count("conv_expansion_factor", 2),
        ),
    )
    depth = a.take_count("num_layers", 10)
    states = tuple(sorted({*(a.take_layers("cat_hidden_layers", [], among=depth) if joins else [])}))
    return AudioSpec(
        width,
        a.take_count("input_dim", 160),
        (block,) * depth,
        _queries(c, width * (len(states) + 1)),
        audio_id,
        StackedSounds(),
        characters=a.take_count("output_dim", 42),
        states=states,
        adapts_language=True,
    )


def _queries(c: HFConfig, inputs: int) -> FrameQueriesSpec:
    window, rate = c.take_count("window_size", 15), c.take_count("downsample_rate", 5)
    if window % rate:
        raise ConfigError(
            f"{c.name}: window_size is {window} and downsample_rate {rate}; expected a multiple of the "
            "latter, since a window makes a whole number of tokens"
        )
    return query_former(c.part("projector_config"), window, window // rate, inputs)


TINY: dict[str, Any] = {
    "encoder_config": {
        "model_type": "granite_speech_encoder",
        "hidden_dim": 24,
        "feedforward_mult": 2,
        "num_layers": 3,
        "num_heads": 2,
        "dim_head": 8,
        "input_dim": 7,
        "output_dim": 9,
        "context_size": 5,
        "max_pos_emb": 6,
        "conv_kernel_size": 5,
        "conv_expansion_factor": 2,
        "dropout": 0.0,
    },
    "projector_config": {
        "model_type": "blip_2_qformer",
        "hidden_size": 16,
        "num_attention_heads": 2,
        "encoder_hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "cross_attention_frequency": 1,
        "layer_norm_eps": 2e-3,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    },
    "audio_token_index": 3,
    "window_size": 6,
    "downsample_rate": 2,
}
