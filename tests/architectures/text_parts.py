"""Tiny configs of multimodal models whose text part loads by itself: see test_multimodal.py."""

from liger_models.architectures import find_architecture

TEXT = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 3e-5,
    "max_position_embeddings": 128,
}
TOWER = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER, "image_size": 28, "patch_size": 14}
CLIP = {"model_type": "clip_vision_model", **TOWER, "image_size": 28, "patch_size": 14}
PIXTRAL = {"model_type": "pixtral", **TOWER, "image_size": 28, "patch_size": 14, "head_dim": 16}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 48}
COHERE = {name: value for name, value in TEXT.items() if name != "rms_norm_eps"}
COHERE |= {"model_type": "cohere2", "sliding_window": 7, "logit_scale": 0.3}
AXES = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}


WHISPER = {
    **{"d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "encoder_layers": 1},
    **{"num_mel_bins": 8, "max_source_positions": 20},
}
VOXTRAL = {
    **{"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_mel_bins": 8, "max_source_positions": 20},
}
CONFORMER = {
    **{"input_dim": 8, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "output_dim": 5, "dropout": 0.0},
    **{"context_size": 4, "max_pos_emb": 4, "conv_kernel_size": 3},
}
QUERIES = {
    **{"model_type": "blip_2_qformer", "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2},
    **{"encoder_hidden_size": 16, "num_hidden_layers": 1, "cross_attention_frequency": 1},
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}
THINKER_TOWERS = {
    "audio_config": {**WHISPER, "output_dim": 48, "n_window": 4},
    "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
}


# By name: the class in transformers, and its config.
CASES = {
    "aria": (
        "AriaForConditionalGeneration",
        {
            "model_type": "aria",
            "text_config": find_architecture("aria_text").tiny,
            "vision_config": {**TOWER, "image_size": 28, "patch_size": 14},
            "projector_patch_to_query_dict": {4: 2},
        },
    ),
    "cohere_compass": (
        "CohereCompassForConditionalGeneration",
        {
            "model_type": "cohere_compass",
            "text_config": find_architecture("cohere_compass_text").tiny,
            "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        },
    ),
    "minicpmv4_7": (
        "MiniCPMV4_7ForConditionalGeneration",
        {
            "model_type": "minicpmv4_7",
            "text_config": find_architecture("qwen3_5_text").tiny,
            "vision_config": {**TOWER, "image_size": 28, "patch_size": 14},
            "insert_layer_id": 0,
        },
    ),
    "qwen4_exp": (
        "Qwen4ExpForConditionalGeneration",
        {
            "model_type": "qwen4_exp",
            "text_config": find_architecture("qwen4_exp_text").tiny,
            "vision_config": QWEN_TOWER,
        },
    ),
    "minimax_m3_vl": (
        "MiniMaxM3SparseForConditionalGeneration",
        {
            "model_type": "minimax_m3_vl",
            "text_config": find_architecture("minimax_m3_vl_text").tiny,
            "vision_config": {**TOWER, "image_size": 28, "patch_size": 14},
            "projector_hidden_size": 24,
        },
    ),
    "lfm3_vl": (
        "Lfm3VlForConditionalGeneration",
        {
            "model_type": "lfm3_vl",
            "text_config": find_architecture("lfm3").tiny,
            "vision_config": TOWER,
            "projector_hidden_size": 24,
        },
    ),
    "llava_next_video": (
        "LlavaNextVideoForConditionalGeneration",
        {
            "model_type": "llava_next_video",
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": CLIP,
        },
    ),
    "got_ocr2": (
        "GotOcr2ForConditionalGeneration",
        {
            "model_type": "got_ocr2",
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "image_size": 64, "window_size": 2, "global_attn_indexes": [0]},
        },
    ),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        {
            "model_type": "qwen2_audio",
            "text_config": {**TEXT, "model_type": "qwen2"},
            "audio_config": {"model_type": "qwen2_audio_encoder", **WHISPER},
        },
    ),
    **{
        model_type: (
            name,
            {
                "model_type": model_type,
                "text_config": {**TEXT, "model_type": "granite", "logits_scaling": 3.0},
                "encoder_config": CONFORMER,
                "projector_config": QUERIES,
                "audio_token_index": 5,
                "has_lora_adapter": False,
                "tie_word_embeddings": False,
            },
        )
        for model_type, name in (
            ("granite_speech", "GraniteSpeechForConditionalGeneration"),
            ("granite_speech_plus", "GraniteSpeechPlusForConditionalGeneration"),
        )
    },
    "audioflamingo3": (
        "AudioFlamingo3ForConditionalGeneration",
        {
            "model_type": "audioflamingo3",
            "text_config": {**TEXT, "model_type": "qwen2"},
            "audio_config": {"model_type": "audioflamingo3_encoder", **VOXTRAL},
        },
    ),
    "musicflamingo": (
        "MusicFlamingoForConditionalGeneration",
        {
            "model_type": "musicflamingo",
            "text_config": {**TEXT, "model_type": "qwen2", "rope_theta": 500.0},
            "audio_config": {"model_type": "audioflamingo3_encoder", **VOXTRAL},
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
        },
    ),
    "glmasr": (
        "GlmAsrForConditionalGeneration",
        {
            "model_type": "glmasr",
            "text_config": {**TEXT, "model_type": "llama"},
            "audio_config": {
                **{"model_type": "glmasr_encoder", "hidden_size": 16, "intermediate_size": 64},
                **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 8},
                "max_position_embeddings": 20,
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_asr": (
        "Qwen3ASRForConditionalGeneration",
        {
            "model_type": "qwen3_asr",
            "text_config": {**TEXT, "model_type": "qwen3"},
            "audio_config": {"model_type": "qwen3_asr_encoder", **WHISPER, "output_dim": 48},
            "tie_word_embeddings": True,
        },
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {
            "model_type": "voxtral",
            "text_config": {**TEXT, "model_type": "llama"},
            "audio_config": {"model_type": "voxtral_encoder", **VOXTRAL},
        },
    ),
    "qwen2_5_omni_thinker": (
        "Qwen2_5OmniThinkerForConditionalGeneration",
        {
            "model_type": "qwen2_5_omni_thinker",
            "text_config": {**TEXT, "model_type": "qwen2_5_omni_text", "rope_parameters": AXES},
            **THINKER_TOWERS,
        },
    ),
    "qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        {
            "model_type": "qwen3_omni_moe_thinker",
            "text_config": {
                **find_architecture("qwen3_moe").tiny,
                "model_type": "qwen3_omni_moe_text",
                "rope_parameters": AXES,
            },
            **THINKER_TOWERS,
        },
    ),
    "aya_vision": (
        "AyaVisionForConditionalGeneration",
        {
            "model_type": "aya_vision",
            "text_config": COHERE,
            "vision_config": SIGLIP,
            "alignment_intermediate_size": 40,
        },
    ),
    "cohere2_vision": (
        "Cohere2VisionForConditionalGeneration",
        {
            "model_type": "cohere2_vision",
            "text_config": COHERE,
            "vision_config": SIGLIP,
            "alignment_intermediate_size": 40,
        },
    ),
    "exaone4_5": (
        "Exaone4_5_ForConditionalGeneration",
        {
            "model_type": "exaone4_5",
            "text_config": {
                **TEXT,
                "model_type": "exaone4",
                "sliding_window": 7,
                "sliding_window_pattern": 2,
            },
            "vision_config": {**QWEN_TOWER, "num_key_value_heads": 1, "fullatt_block_indexes": [0]},
        },
    ),
    "idefics2": (
        "Idefics2ForConditionalGeneration",
        {
            "model_type": "idefics2",
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**TOWER, "image_size": 28, "patch_size": 14},
            "perceiver_config": {"hidden_size": 48, "resampler_n_latents": 3, "resampler_depth": 1},
            "image_token_id": 130,
        },
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        {
            "model_type": "idefics3",
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "image_size": 28, "patch_size": 14},
            "image_token_id": 130,
        },
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {
            "model_type": "smolvlm",
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "image_size": 28, "patch_size": 14},
            "image_token_id": 130,
        },
    ),
    "llava_next": (
        "LlavaNextForConditionalGeneration",
        {"model_type": "llava_next", "text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP},
    ),
    "kimi_k25": (
        "Kimi_K25ForConditionalGeneration",
        {
            "model_type": "kimi_k25",
            "text_config": {**find_architecture("deepseek_v3").tiny},
            "vision_config": {
                **TOWER,
                **{"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2, "patch_size": 14},
            },
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        },
    ),
    "ovis2": (
        "Ovis2ForConditionalGeneration",
        {
            "model_type": "ovis2",
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "image_size": 28, "patch_size": 14, "vocab_size": 24},
            "visual_indicator_token_ids": [1, 2, 3, 4, 5],
            # The reference makes a head of these sizes and throws it away: by default 233 million elements.
            "hidden_size": 48,
            "vocab_size": 131,
        },
    ),
    "video_llama_3": (
        "VideoLlama3ForConditionalGeneration",
        {
            "model_type": "video_llama_3",
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "patch_size": 14},
        },
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "model_type": "gemma3",
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "sliding_window": 7,
                "final_logit_softcapping": 2.0,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma3n": (
        "Gemma3nForConditionalGeneration",
        {
            "model_type": "gemma3n",
            "text_config": {
                **find_architecture("gemma3n_text").tiny,
                "model_type": "gemma3n_text",
                "altup_coef_clip": 120.0,  # acts in training alone
            },
            "vision_config": {"hidden_size": 32},
            "audio_config": {
                **{"hidden_size": 32, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1},
                "sscp_conv_channel_size": [4, 4],
            },
        },
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "model_type": "gemma4",
            "text_config": {
                **TEXT,
                "model_type": "gemma4_text",
                "sliding_window": 7,
                "final_logit_softcapping": 2.0,
                "hidden_size_per_layer_input": 0,
                "global_head_dim": 24,
                "attention_k_eq_v": True,
            },
            "vision_config": {**TOWER, "num_key_value_heads": 2, "head_dim": 16},
        },
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "model_type": "llama4",
            "text_config": find_architecture("llama4_text").tiny,
            "vision_config": {
                **TOWER,
                "image_size": 28,
                "patch_size": 14,
                "intermediate_size": 128,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
                "vision_output_dim": 64,
            },
        },
    ),
    "gemma4_small": (
        "Gemma4ForConditionalGeneration",
        {
            "model_type": "gemma4",
            "text_config": {
                **TEXT,
                "model_type": "gemma4_text",
                "num_hidden_layers": 4,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "hidden_size_per_layer_input": 12,
                "vocab_size_per_layer_input": 131,
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
                "enable_moe_block": True,
                "num_experts": 5,
                "top_k_experts": 3,
                "moe_intermediate_size": 24,
                "global_head_dim": 24,
            },
            "vision_config": {**TOWER, "num_key_value_heads": 2, "head_dim": 16},
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedForConditionalGeneration",
        {
            "model_type": "gemma4_unified",
            "text_config": {
                **TEXT,
                "model_type": "gemma4_unified_text",
                "sliding_window": 7,
                "final_logit_softcapping": 2.0,
                "global_head_dim": 24,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
            },
            "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 12},
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {"model_type": "llava", "text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP},
    ),
    "llava_mistral": (
        "LlavaForConditionalGeneration",
        {
            "model_type": "llava",
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": 7},
            "vision_config": CLIP,
        },
    ),
    "mllama": (
        "MllamaForConditionalGeneration",
        {
            "model_type": "mllama",
            "text_config": {
                **TEXT,
                "model_type": "mllama_text_model",
                "num_hidden_layers": 5,
                "head_dim": 12,
                "cross_attention_layers": [3, 0],
                "pad_token_id": 5,
            },
            "vision_config": {
                "model_type": "mllama_vision_model",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 14,
                "patch_size": 7,
                "max_num_tiles": 2,
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
                "intermediate_layers_indices": [0],
                "vision_output_dim": 32,
            },
            "image_token_index": 131,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "model_type": "mistral3",
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": PIXTRAL,
            "tie_word_embeddings": False,
        },
    ),
    "mistral3_mistral4": (
        "Mistral3ForConditionalGeneration",
        {
            "model_type": "mistral3",
            "text_config": find_architecture("mistral4").tiny,
            "vision_config": PIXTRAL,
            "tie_word_embeddings": False,
        },
    ),
    "nemotron_h_omni": (
        "NemotronH_Omni_Reasoning_V3",
        {
            "model_type": "nemotron_h_omni",
            "text_config": find_architecture("nemotron_h").tiny,
            "vision_config": {
                **TOWER,
                "image_size": 28,
                "patch_size": 14,
                "max_img_size": 56,
                "video_temporal_patch_size": 2,
            },
            "vision_hidden_size": 32,
            "projector_hidden_size": 24,
            "image_token_id": 3,
            "audio_config": None,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "model_type": "qwen2_5_vl",
            "text_config": {**TEXT, "hidden_size": 64, "rope_parameters": AXES},
            "vision_config": {**QWEN_TOWER, "out_hidden_size": 64},
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "model_type": "qwen3_vl",
            "text_config": {**TEXT, "rope_parameters": {**AXES, "mrope_interleaved": True}},
            "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        },
    ),
}
