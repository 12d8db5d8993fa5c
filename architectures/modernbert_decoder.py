"""ModernBERT decoders, Ettin (Weller et al., 2025, arXiv:2507.11412): LayerNorm without biases, none before
the first layer's attention, a sliding window on two layers of three, and a head of two layers.
"""

from dataclasses import replace

from liger_models.architectures import common
from liger_models.architectures.common import FULL, SLIDING
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, HeadLayersSpec, LayerNormSpec, ModelSpec, Truncated

NAMES = (
    *(("lm_head.", "decoder."), ("model.head_layers.", "lm_head."), ("model.norm.", "model.final_norm.")),
    *((".embed_tokens.", ".embeddings.tok_embeddings."), (".embed_norm.", ".embeddings.norm.")),
    *((".input_layernorm.", ".attn_norm."), (".post_attention_layernorm.", ".mlp_norm.")),
    *((".self_attn.o_proj.", ".attn.Wo."), (".self_attn.", ".attn.")),
    *((".mlp.gate_up_proj.", ".mlp.Wi."), (".mlp.down_proj.", ".mlp.Wo.")),
)
WIDE, NARROW = ("embed_tokens", "qkv_proj", "gate_up_proj"), ("lm_head", "o_proj", "down_proj", "dense")
OF_CLASSIFIERS = ("classifier_pooling", "classifier_dropout")
OF_ENCODERS = ("position_embedding_type", "sparse_prediction", "sparse_pred_ignore_index")


@register(
    "modernbert-decoder",
    reference="ModernBertDecoderForCausalLM",
    layouts=(Layout(NAMES, ("*.gate_up_proj.*",)),),
    defaults={
        **{"max_position_embeddings": 8192, "pad_token_id": 50283, "local_attention": 128},
        **{"tie_word_embeddings": True, "hidden_activation": "gelu", "classifier_activation": "gelu"},
        "initializer_cutoff_factor": 2.0,
    },
    rope_keys=("global_rope_theta", "partial_rotary_factor"),
    other_names={"local_rope_theta": "rope_local_base_freq"},
    unread={
        **dict.fromkeys(OF_CLASSIFIERS, "of classifiers alone"),
        **dict.fromkeys(OF_ENCODERS, "of encoders alone"),
        "sliding_window": "follows from local_attention",
        "layer_norm_eps": "the reference reads norm_eps",
    },
)
def modernbert_decoder(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=c.take_number("norm_eps", 1e-5), bias=c.take_flag("norm_bias", False))
    heads, bias = c.take_count("num_attention_heads"), c.take_flag("attention_bias", False)
    plain = common.attention_as_wide_as_the_model(c, kv_heads=heads, bias=bias, positions=False)
    every, local = c.take_count("global_attn_every_n_layers", 3), c.take_count("local_attention", None)
    kinds = common.layer_types(c, lambda i: SLIDING if i % every else FULL, (FULL, SLIDING))
    if c.take("rope_scaling", None) is not None:
        raise ConfigError(f"{c.name}: state rope_scaling in rope_parameters, by the type of layers")
    if SLIDING in kinds and (local is None or local < 2):
        raise ConfigError(f"{c.name}: windows are half of local_attention; expected 2 or more, found {local}")
    mixers = {}
    for kind in dict.fromkeys(kinds):
        turned = common.rope(c, plain.head_dim, layer_type=kind, theta=160000.0, local_theta=10000.0)
        mixers[kind] = replace(plain, rope=turned, window=local // 2 if kind == SLIDING else None)
    mlp = common.mlp(c, key="hidden_activation", bias=c.take_flag("mlp_bias", False))
    blocks = [BlockSpec(mixers[kind], mlp, norm) for kind in kinds]
    blocks[:1] = [replace(block, topology="mlp_norm") for block in blocks[:1]]
    act = common.activation(c, "classifier_activation", gated=False)
    std, cutoff = c.take_number("initializer_range", 0.02), c.take_number("initializer_cutoff_factor", 3.0)
    out = std / (2 * len(blocks)) ** 0.5
    stds = {**dict.fromkeys(NARROW, out), **dict.fromkeys(WIDE, std)}  # of a tied head its embedding's
    return common.decoder(
        c,
        blocks,
        norm,
        embed_norm=norm,
        embed_dropout=c.take_dropout("embedding_dropout"),
        head_layers=HeadLayersSpec(norm, act, c.take_flag("classifier_bias", False)),
        head_bias=c.take_flag("decoder_bias", True),
        fresh=tuple((f"*{name}.weight", Truncated(own, cutoff * own)) for name, own in stds.items()),
    )


# -- tests

for_tests(
    "modernbert-decoder",
    tiny={
        **{"rms_norm_eps": ..., "norm_eps": 1e-3, "norm_bias": True, "num_key_value_heads": ...},
        **{"hidden_size": 64, "head_dim": ..., "hidden_act": ..., "hidden_activation": "silu"},
        **{"attention_bias": True, "mlp_bias": True, "decoder_bias": True, "classifier_bias": True},
        **{"classifier_activation": "silu", "local_attention": 14, "tie_word_embeddings": True},
        **{"pad_token_id": 3, "initializer_cutoff_factor": 1.5},
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in ((FULL, 1e3), (SLIDING, 1e2))
        },
    },
    variants={
        "other layers": {"layer_types": [SLIDING, FULL, SLIDING]},
        "every second": {"global_attn_every_n_layers": 2},
        "published spelling": {
            **{"rope_parameters": ..., "global_rope_theta": 2e3, "local_rope_theta": 3e2},
        },
    },
    skip={
        "rope:all": "settings are stated by layer type",
        "key:rope_scaling": "refused, since the reference applies it to both types",
        "key:rope_theta": "may repeat global_rope_theta",
        "key:rope_local_base_freq": "written for readers of older spellings",
        "key:head_dim": "heads are as wide together as the hidden state, which is checked",
    },
)
