"""The language model of dots3.note (dots, 2026): DeepSeek-V3.2's indexers on some layers, and on the others
latent attention of other sizes with a window. Latents are scaled, attention has gates by head, and the
rotated part of keys a norm.
"""

from liger_models.architectures.common import FULL, SLIDING, decoder, mlp
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SKIP_EXPERTS,
    SKIP_INDEXER,
    SKIP_LATENT,
    TINY_EXPERTS,
    TINY_INDEXER,
    TINY_LATENT,
    corrected_experts,
    corrected_layouts,
    dense_or_sparse,
)
from liger_models.architectures.common.dots import INDEXED, mixers
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "dots3_note_text",
    reference="Dots3NoteForCausalLM",
    defaults={
        "num_key_value_heads": 128,
        "q_lora_rank": 1024,
        "head_dim": 256,
        "sliding_window": 512,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "shared_experts_intermediate_size": 1536,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "max_position_embeddings": 524288,
        "pad_token_id": 151659,
    },
    layouts=corrected_layouts(),
    unread={"mlp_bias": "the reference has no biases of MLPs"},
    carried=lambda c: (f"model.layers.{c.take_count('num_hidden_layers')}.*", "model.mtp.*"),
)
def dots3_note_text(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    width = c.take_count("shared_experts_intermediate_size") * c.take_count("n_shared_experts")
    experts = corrected_experts(c, shared_size=width)
    first = c.take_count("first_k_dense_replace", 1, least=0)
    mlps = dense_or_sparse(c, mlp(c), experts, first)
    blocks = [BlockSpec(mixer, inner, norm) for mixer, inner in zip(mixers(c, norm), mlps, strict=True)]
    return decoder(c, blocks, norm)


# -- tests

OF_QUERIES = "key:qk_head_dim", "key:q_head_dim"

NARROW = {
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 12, "qk_nope_head_dim": 8},
    **{"q_lora_rank": 18, "v_head_dim": 14, "head_dim": 16, "qk_rope_head_dim": 8},
}

for_tests(
    "dots3_note_text",
    tiny={
        **TINY_LATENT,
        **TINY_EXPERTS,
        **TINY_INDEXER,
        "head_dim": 16,
        "pad_token_id": 0,
        "first_k_dense_replace": ...,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "layer_types": [INDEXED, SLIDING, INDEXED],
        "per_layer_config": {"1": NARROW},
        "shared_experts_intermediate_size": 20,
        "sliding_window": 7,
        "rope_parameters": {
            INDEXED: {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 6 / 16},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 8 / 16},
        },
    },
    variants={
        "in groups": IN_GROUPS,
        "two dense layers": {"mlp_layer_types": ..., "first_k_dense_replace": 2},
        "biases": {"attention_bias": True},
        "no key is left out": {"index_topk": 2048},
        "without an indexer": {
            "layer_types": [FULL, SLIDING, FULL],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
                for kind, share in ((FULL, 6 / 16), (SLIDING, 8 / 16))
            },
        },
    },
    skip={
        **SKIP_EXPERTS,
        **{key: why for key, why in SKIP_LATENT.items() if key not in OF_QUERIES},
        **{key: why for key, why in SKIP_INDEXER.items() if key != "key:layer_types"},
        "rope:all": "settings are stated by layer type",
        **{f"key:{key}": "the same" for key in ("rope_theta", "rope_scaling", "rope_local_base_freq")},
        **{
            f"refusal:{name}": "the number of rotated dimensions is stated, and counts"
            for name in ("odd_head_dim", "partial_rotary_factor")
        },
    },
)
