"""Multimodal families with a supported language model: the location of the text part in their checkpoints. A
family is listed only if pure text goes through exactly the computation of the text family. Families with
supported encoders are registered, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liger_models.architectures.registry.multimodal_family import Multimodal

_OWN_ROOT = (("model.language_model.", "model."), ("language_model.", "model."))

_QWEN2: dict[str, Any] = {
    "prefixes": (("model.language_model.", "model."),),
    **{"tied_by_text": True, "axes": True},
    "defaults": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80},
}

_THINKERS: dict[str, Multimodal] = {
    "qwen2_5_omni_thinker": Multimodal(
        {"qwen2_5_omni_text": "qwen2"},
        _OWN_ROOT,
        axes=True,
        defaults={
            **{"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944},
            **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
            **{"rope_theta": 1e6, "max_window_layers": 28},
        },
    ),
    "qwen3_omni_moe_thinker": Multimodal(
        {"qwen3_omni_moe_text": "qwen3_moe"},
        _OWN_ROOT,
        without=("use_sliding_window", "layer_types"),
        axes=True,
        defaults={
            **{"vocab_size": 3584, "hidden_size": 2048, "intermediate_size": 18944},
            **{"num_hidden_layers": 28, "num_attention_heads": 28, "rope_theta": 1e6, "norm_topk_prob": True},
        },
    ),
}

MULTIMODAL: dict[str, Multimodal] = {
    **_THINKERS,
    **{  # the whole models, which also speak
        kind.removesuffix("_thinker"): replace(family, within=("thinker_config", "thinker."))
        for kind, family in _THINKERS.items()
    },
    "aria": Multimodal({"aria_text": "aria_text"}),
    "cohere_compass": Multimodal({"cohere_compass_text": "cohere_compass_text"}, _OWN_ROOT),
    "granite4_vision": Multimodal(dict.fromkeys(("granite4_vision_text", "granite"), "granite")),
    "minicpmv4_6": Multimodal({"qwen3_5_text": "qwen3_5_text"}, _OWN_ROOT, axes=True),
    "minicpmv4_7": Multimodal({"qwen3_5_text": "qwen3_5_text"}, _OWN_ROOT, axes=True),
    "minicpm_ocr": Multimodal({"qwen3_5_text": "qwen3_5_text"}, _OWN_ROOT, tied=True, axes=True),
    "minimax_m3_vl": Multimodal({"minimax_m3_vl_text": "minimax_m3_vl_text"}, tied_by_text=True),
    "lfm3_vl": Multimodal({"lfm3": "lfm3"}, tied=True),
    "qianfan_ocr": Multimodal(
        {"qwen3": "qwen3"},
        (
            ("language_model.model.encoder.layers.", "model.layers."),  # as transformers saves it
            *(("model.language_model.", "model."), ("language_model.", "")),
        ),
    ),
    "hyperclovax_vision_v2": Multimodal(
        {"hyperclovax": "hyperclovax"},
        (
            *(("model.language_model.model.", "model."), ("model.language_model.lm_head.", "lm_head.")),
            ("model.language_model.", "model."),
        ),
        tied=True,
    ),
    "got_ocr2": Multimodal({"qwen2": "qwen2"}, tied=True),
    "qwen2_audio": Multimodal({"qwen2": "qwen2"}, settings={"tie_word_embeddings": False}),
    "audioflamingo3": Multimodal({"qwen2": "qwen2"}, settings={"tie_word_embeddings": False}),
    "musicflamingo": Multimodal(
        {"qwen2": "qwen2"},
        settings={"tie_word_embeddings": False},
        aside=(
            "rope_parameters",
            "rope_theta",
            "partial_rotary_factor",
            "head_dim",
            "max_position_embeddings",
        ),
    ),
    "qwen3_asr": Multimodal({"qwen3": "qwen3"}, tied=True),
    "glmasr": Multimodal(
        {"llama": "llama"},
        tied=True,
        defaults={
            **{"vocab_size": 59264, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
            **{"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192},
            **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0},
        },
    ),
    # Their heads do not divide by logits_scaling, as Granite's does.
    **dict.fromkeys(
        ("granite_speech", "granite_speech_plus"),
        Multimodal({"granite": "granite"}, tied=True, settings={"logits_scaling": 1.0}),
    ),
    "voxtral": Multimodal(
        {"llama": "llama"},
        settings={"tie_word_embeddings": False},
        defaults={
            **{"vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "head_dim": 128},
            **{"num_hidden_layers": 30, "num_key_value_heads": 8, "max_position_embeddings": 131072},
            **{"rms_norm_eps": 1e-5, "rope_theta": 1e8},
        },
    ),
    # The whole model does not scale its logits, though Command R's own does.
    **{
        kind: Multimodal({"cohere2": "cohere2"}, tied=True, settings={"logit_scale": 1.0})
        for kind in ("aya_vision", "cohere2_vision")
    },
    "deepseek_ocr2": Multimodal({"deepseek_ocr2_text": "deepseek_ocr2_text"}),
    "deepseek_vl": Multimodal({"llama": "llama"}, _OWN_ROOT, tied=True),
    "lighton_ocr": Multimodal({"qwen3": "qwen3"}, _OWN_ROOT, tied=True),
    "exaone4_5": Multimodal({"exaone4": "exaone4", "exaone4_5_text": "exaone4"}, _OWN_ROOT),
    **{
        kind: Multimodal(
            {"llama": "llama"},
            (("model.text_model.", "model."),),
            without=("perceiver_config", "pixel_shuffle_factor"),
        )
        for kind in ("idefics3", "smolvlm")
    },
    "idefics2": Multimodal(
        {"mistral": "mistral"}, (("model.text_model.", "model."),), without=("perceiver_config",)
    ),
    **{
        kind: Multimodal({"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"}, tied_by_text=True)
        for kind in ("llava_next", "llava_next_video")
    },
    "kimi_k25": Multimodal(
        {"deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"},
        (
            ("language_model.model.blocks.", "model.layers."),  # as transformers saves it
            ("model.language_model.", "model."),
            ("language_model.", ""),
        ),
        tied=True,
        defaults={"max_position_embeddings": 4096},
    ),
    "ernie4_5_vl_moe": Multimodal(
        {"ernie4_5_vl_moe_text": "ernie4_5_vl_moe_text"},
        _OWN_ROOT,
        tied=True,
        axes=True,
        defaults={
            **{
                "vocab_size": 103424,
                "hidden_size": 2560,
                "intermediate_size": 12288,
                "num_hidden_layers": 28,
            },
            **{"num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 131072},
            **{"moe_num_experts": 64, "moe_k": 6, "router_aux_loss_coef": 0.001, "rope_theta": 5e5},
        },
    ),
    "hunyuan_vl": Multimodal(
        {"hunyuan_vl_text": "hunyuan_v1_dense"}, _OWN_ROOT, tied=True, tied_by_text=True, axes=True
    ),
    "ovis2": Multimodal({"qwen2": "qwen2"}, _OWN_ROOT, tied=True),
    "step3p7": Multimodal({"step3p5": "step3p5"}, (("model.language_model.", "model."),)),
    "video_llama_3": Multimodal({"qwen2": "qwen2"}, _OWN_ROOT, tied_by_text=True),
    **{
        kind: Multimodal(
            {"glm4v_text": "glm4"},
            _OWN_ROOT,
            tied_by_text=True,
            axes=True,
            settings={"attention_bias": True},
            defaults={
                **{"head_dim": None, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
                **{"max_position_embeddings": 32768, "pad_token_id": None},
            },
        )
        for kind in ("glm4v", "glm46v")
    },
    "glm4v_moe": Multimodal(
        {"glm4v_moe_text": "glm4_moe"},
        _OWN_ROOT,
        tied_by_text=True,
        axes=True,
        without=("router_aux_loss_coef",),  # of a loss that is refused where it is asked for
        defaults={
            **{"head_dim": None, "attention_bias": True, "max_position_embeddings": 65536},
            **{"num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "pad_token_id": None},
        },
    ),
    "glm_ocr": Multimodal(
        {"glm_ocr_text": "glm4"},
        _OWN_ROOT,
        tied_by_text=True,
        axes=True,
        settings={"attention_bias": False},
        defaults={
            **{"vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5},
            **{"partial_rotary_factor": 1.0, "pad_token_id": None},
        },
    ),
    "gemma3": Multimodal({"gemma3_text": "gemma3_text"}, tied=True, without=("final_logit_softcapping",)),
    "gemma4": Multimodal({"gemma4_text": "gemma4_text"}, _OWN_ROOT, tied=True),
    "gemma3n": Multimodal({"gemma3n_text": "gemma3n_text"}, _OWN_ROOT, tied=True),
    "gemma4_unified": Multimodal(
        {"gemma4_unified_text": "gemma4_text"},
        _OWN_ROOT,
        tied=True,
        defaults={
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
        },
    ),
    "internvl": Multimodal({kind: kind for kind in ("qwen2", "qwen3", "qwen3_moe", "llama")}, tied=True),
    "lfm2_vl": Multimodal({"lfm2": "lfm2"}, tied=True, without=("tie_embedding",)),
    "llama4": Multimodal({"llama4_text": "llama4_text"}, tied_by_text=True),
    "llava": Multimodal({"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"}, tied_by_text=True),
    "llava_onevision": Multimodal({"qwen2": "qwen2"}, tied_by_text=True),
    "vipllava": Multimodal({"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"}),
    "mllama": Multimodal(
        {"mllama_text_model": "llama"},
        settings={"tie_word_embeddings": False},
        defaults={
            "vocab_size": 128256,
            "intermediate_size": 14336,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 128004,
            "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        },
        cross_attention="cross_attention_layers",
        extra_ids=8,
    ),
    "mistral3": Multimodal({kind: kind for kind in ("mistral", "ministral3", "mistral4")}, tied=True),
    "glm5_next": Multimodal({"glm5_next_text": "glm5_next_text"}, _OWN_ROOT),
    "mistral_large4": Multimodal(
        {"mistral_large4_text": "mistral_large4_text"},
        _OWN_ROOT,
        renamed=dict.fromkeys(("num_local_experts", "num_experts"), ("n_routed_experts",)),
        defaults={
            **{"vocab_size": 204800, "hidden_size": 6144, "intermediate_size": 24576},
            **{"num_hidden_layers": 72, "num_attention_heads": 64, "max_position_embeddings": 1048576},
            **{"moe_intermediate_size": 6144, "n_routed_experts": 128, "n_shared_experts": 1},
            **{"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 512},
            **{"qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64},
            **{"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32},
        },
    ),
    "molmo2": Multimodal(
        {"molmo2_text": "molmo2_text"},
        _OWN_ROOT,
        renamed={"qkv_bias": ("attention_bias",), "layer_norm_eps": ("rms_norm_eps",)},
        settings={"tie_word_embeddings": False},
        defaults={
            **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128},
            **{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
            **{"max_position_embeddings": 36864},
        },
    ),
    "muse_glimmer": Multimodal({"muse_glimmer_text": "muse_glimmer_text"}, _OWN_ROOT),
    "nemotron_h_omni": Multimodal({"nemotron_h": "nemotron_h"}, missing="videos"),
    "paddleocr_vl": Multimodal(
        {"paddleocr_vl_text": "llama"},
        (("model.language_model.", "model."),),
        tied=True,
        tied_by_text=True,
        without=(
            *("compression_ratio", "ignored_index", "max_sequence_length", "use_flash_attention"),
            *("attention_probs_dropout_prob", "hidden_dropout_prob", "use_3d_rope", "rope_is_neox_style"),
        ),
        renamed={"use_bias": ("attention_bias", "mlp_bias")},
        axes=True,
        defaults={
            **{"vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128},
            **{"num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2},
            **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "pad_token_id": 0},
        },
    ),
    "phi4_multimodal": Multimodal({"phi3": "phi3"}),
    "paligemma": Multimodal(
        {"gemma": "gemma", "gemma2": "gemma2"},
        tied=True,
        without=("num_image_tokens", "use_bidirectional_attention"),
    ),
    "qwen2_vl": Multimodal({"qwen2_vl_text": "qwen2"}, **_QWEN2),
    "qwen2_5_vl": Multimodal({"qwen2_5_vl_text": "qwen2"}, **_QWEN2),
    "qwen3_5": Multimodal({"qwen3_5_text": "qwen3_5_text"}, _OWN_ROOT, axes=True),
    "qwen3_5_moe": Multimodal({"qwen3_5_moe_text": "qwen3_5_moe_text"}, _OWN_ROOT, axes=True),
    "qwen4_exp": Multimodal({"qwen4_exp_text": "qwen4_exp_text"}, _OWN_ROOT, axes=True),
    "qwen3_vl": Multimodal(
        {"qwen3_vl_text": "qwen3"},
        _OWN_ROOT,
        without=("use_sliding_window", "layer_types"),
        axes=True,
        defaults={"rope_theta": 5e5, "max_position_embeddings": 128000},
    ),
    "qwen3_vl_moe": Multimodal(
        {"qwen3_vl_moe_text": "qwen3_moe"},
        _OWN_ROOT,
        without=("use_sliding_window", "layer_types", "norm_topk_prob"),
        axes=True,
        defaults={
            **{"rope_theta": 5e5, "max_position_embeddings": 128000, "num_key_value_heads": 16},
            **{"moe_intermediate_size": 1408, "num_experts_per_tok": 4},
        },
        settings={"norm_topk_prob": True},
    ),
}
"""By `model_type`."""
