"""Whisper's encoder of sound (arXiv:2212.04356, section 2.2), for clips of one length."""

from __future__ import annotations

from typing import Any

from liger_models.architectures.common import activation
from liger_models.architectures.common.images import Names
from liger_models.architectures.encoders.parts import whole_attention
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import (
    AudioSpec,
    BlockSpec,
    LayerNormSpec,
    MLPSpec,
    PaddedSounds,
    ProjectorSpec,
)

LAYER_NAMES = (
    (".self_attn.o_proj.", ".self_attn.out_proj."),
    (".input_layernorm.", ".self_attn_layer_norm."),
    (".post_attention_layernorm.", ".final_layer_norm."),
    (".mlp.up_proj.", ".fc1."),
    (".mlp.down_proj.", ".fc2."),
)
"""Names of an encoder's layers."""
NAMES = (
    ("table.", "embed_positions."),
    ("norm_after.", "layer_norm."),
    *LAYER_NAMES,
)
"""Names of the encoder, after `audio_tower.`."""
TINY: dict[str, Any] = {
    "d_model": 32,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "encoder_layers": 2,
    "num_mel_bins": 7,
    "max_source_positions": 12,
}
_WIDTH, _INNER = ("d_model", "hidden_size"), ("encoder_ffn_dim", "intermediate_size")


def sizes(a: HFConfig) -> tuple[int, int]:
    """Widths of an encoder and of its MLPs, from its config `a`, under Whisper's names or the usual ones."""
    return a.take_count(_WIDTH, 1280), a.take_count(_INNER, 5120)


def blocks(a: HFConfig, *, k_bias: bool = False) -> tuple[BlockSpec, ...]:
    """Layers of an encoder, from its config `a`. `k_bias`: the projection of keys has a bias, too.

    Raises:
        ConfigError: a width that is not a multiple of the heads.
    """
    width, inner = sizes(a)
    heads = a.take_count(("encoder_attention_heads", "num_attention_heads"), 20)
    for key in (
        "scale_embedding",
        "init_std",
        "vocab_size",
        "pad_token_id",
        "head_dim",
        "num_key_value_heads",
    ):
        a.take(key, None)  # not used by the references, or of Whisper's decoder
    a.fill({"activation_function": "gelu"})
    mlp = MLPSpec(inner, activation(a, "activation_function", gated=False), bias=True, gated=False)
    block = BlockSpec(whole_attention(a, width, heads, k_bias=k_bias), mlp, LayerNormSpec(1e-5))
    return (block,) * a.take_count(("encoder_layers", "num_hidden_layers"), 32)


def audio(
    a: HFConfig, projector: ProjectorSpec, audio_id: int, *, mask: str | None = None, paired: bool = False
) -> AudioSpec:
    """Whisper's encoder, from its config `a`; the other arguments are fields of the spec."""
    frames = a.take_count("max_source_positions", 1500)
    sounds = PaddedSounds(frames) if mask is None else PaddedSounds(frames, True, mask)
    bins, norm = a.take_count("num_mel_bins", 128), LayerNormSpec(1e-5)
    return AudioSpec(sizes(a)[0], bins, blocks(a), projector, audio_id, sounds, norm, paired=paired)


def layouts(projector: Names = (), encoder: Names = NAMES) -> tuple[Layout, ...]:
    """Layouts of the hub, and of transformers' modules."""
    return tuple(
        Layout(
            head,
            root=text,
            parts=(
                ("audio.encoder.", Layout(encoder, root=f"{root}audio_tower.")),
                ("audio.projector.", Layout(projector, root=f"{root}multi_modal_projector.")),
            ),
        )
        for text, root, head in (
            ("language_model.model.", "", (("lm_head.", "language_model.lm_head."),)),
            ("model.language_model.", "model.", ()),
        )
    )
