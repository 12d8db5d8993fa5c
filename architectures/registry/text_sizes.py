"""Sizes of multimodal families' text parts in the references' config classes, by text family: published
configs state only differences from them.
"""

from __future__ import annotations


def _sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, **others: int
) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


SIZES: dict[str, dict[str, int]] = {
    "aria_text": _sizes(32000, 4096, 4096, 32, 32),
    "cohere_compass_text": _sizes(256000, 8192, 22528, 40, 64),
    "granite": _sizes(32000, 4096, 11008, 32, 32, max_position_embeddings=2048),
    "hunyuan_v1_dense": _sizes(290943, 4096, 11008, 32, 32),
    "lfm3": _sizes(128000, 2048, 7680, 24, 16),
    "qwen2": _sizes(151936, 4096, 22016, 32, 32),
    "qwen3": _sizes(151936, 4096, 22016, 32, 32),
    "qwen3_5_text": _sizes(248320, 4096, 12288, 32, 16, linear_num_key_heads=16, linear_num_value_heads=32),
    "qwen3_5_moe_text": {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "qwen4_exp_text": {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
    },
    "minimax_m3_vl_text": _sizes(200064, 6144, 3072, 60, 64),
    "cohere2": _sizes(256000, 8192, 22528, 40, 64),
    "deepseek_v3": _sizes(
        *(129280, 7168, 18432, 61, 128),
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    "deepseek_ocr2_text": _sizes(
        *(102400, 4096, 11008, 32, 32),
        max_position_embeddings=2048,
        n_routed_experts=64,
        n_shared_experts=2,
        moe_intermediate_size=1407,
    ),
    "muse_glimmer_text": _sizes(
        *(202048, 6656, 19968, 52, 32),
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        sliding_window=2048,
    ),
    "step3p5": _sizes(
        *(128815, 4096, 11264, 45, 64),
        head_dim=128,
        moe_intermediate_size=1280,
        max_position_embeddings=128000,
        pad_token_id=1,
    ),
    "exaone4": _sizes(102400, 4096, 16384, 32, 32),
    "gemma": _sizes(256000, 3072, 24576, 28, 16),
    "gemma2": _sizes(256000, 2304, 9216, 26, 8),
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8),
    "gemma3n_text": _sizes(262400, 2048, 16384, 35, 8),
    "gemma4_text": _sizes(262144, 2304, 9216, 30, 8),
    "glm4_moe": _sizes(
        *(151424, 4096, 10944, 46, 96),
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=1,
    ),
    "glm4": _sizes(151552, 4096, 13696, 40, 32),
    "llama": _sizes(32000, 4096, 11008, 32, 32),
    "llama4_text": _sizes(202048, 5120, 8192, 48, 40, intermediate_size_mlp=16384),
    "mistral": _sizes(32000, 4096, 14336, 32, 32),
    "phi3": _sizes(
        *(200064, 3072, 8192, 32, 32),
        num_key_value_heads=8,
        max_position_embeddings=131072,
        pad_token_id=199999,
    ),
    "nemotron_h": {"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504},
    "mistral4": _sizes(
        *(131072, 4096, 12288, 36, 32),
        moe_intermediate_size=2048,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
}
