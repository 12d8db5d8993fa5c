"""Hunyuan, dense (Tencent, 2025): LLaMA with QK-norm per head after the rotary embedding, whose base is
enlarged by a fixed `alpha` (NTK-aware scaling, bloc97 2023).
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, BlockSpec, ModelSpec, NormSpec, QKNormSpec, RopeSpec

# Keys next to those of their type; all but alpha belong to other types and are not read.
ROPE_EXTRA = ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_UNREAD = (
    *("attention_head_dim", "class_num", "cla_share_factor", "dense_list", "mask_init_id", "norm_type"),
    *("num_media_embeds", "org_vocab_size", "pool_type", "use_rotary_pos_emb", "eod_token_id", "pad_id"),
    *("im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id", "image_token_id"),
    *("video_start_id", "video_end_id", "anyres_pooling_size", "vit_input_resolution", "vit_mapping_type"),
    *("vit_norm_type", "vit_patch", "vit_token"),
)
UNREAD = dict.fromkeys(_UNREAD, "the reference does not read it")

NORMS = ((".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm."))


@register(
    "hunyuan_v1_dense",
    reference="HunYuanDenseV1ForCausalLM",
    layouts=(Layout(NORMS),),
    defaults={"max_position_embeddings": 2048, "pad_token_id": 0},
    unread=UNREAD,
)
def hunyuan(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    block = BlockSpec(normed_attention(c, norm), mlp(c), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


def normed_attention(c: HFConfig, norm: NormSpec) -> AttentionSpec:
    """Attention of both families."""
    if not c.take_flag("use_qk_norm", True):
        raise ConfigError(
            f"{c.name}: use_qk_norm is false, but hunyuan models norm queries and keys; remove it"
        )
    attn = attention(c, bias=c.take_flag("attention_bias", False), extra=ROPE_EXTRA)
    return replace(
        attn,
        rope=stretched(c, attn.rope),
        qk_norm=QKNormSpec(norm, before_rope=False),
        dropout=c.take_dropout("attention_dropout"),
    )


def stretched(c: HFConfig, rope: RopeSpec | None) -> RopeSpec | None:
    """With an alpha, the "dynamic" rotary type does not depend on the length."""
    alpha = c.take_rope(extra=ROPE_EXTRA)["extra"].get("alpha")
    if rope is None or rope.type != "dynamic" or not alpha:
        return rope
    theta = rope.theta * alpha ** (rope.dim / (rope.dim - 2))
    return RopeSpec(rope.dim, theta, max_position_embeddings=rope.max_position_embeddings)


# -- tests

TINY = {
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 1.0,
        "alpha": 50.0,
        "beta_fast": 32,
    },
    "pad_token_id": 0,
}

SKIP = {
    "key:use_qk_norm": "models without are refused",
    **{
        f"field:RopeSpec.{name}": "the norms after the rotation cancel a factor"
        for name in ("attention_factor", "mscale", "mscale_all_dim")
    },
    **{f"swap:model.layers.{i}.self_attn.q_norm.weight": "only the product of both counts" for i in range(3)},
}

for_tests("hunyuan_v1_dense", tiny=TINY, skip=SKIP)
