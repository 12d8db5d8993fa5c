"""Cases with sounds that always run."""

PARITY, OF_VIDEOS, CHECKPOINTS, HF, RANKS = (
    f"tests/audio/test_{name}.py::test_"
    for name in ("parity", "sounds_of_videos", "checkpoints", "in_transformers", "ranks")
)

ALWAYS: dict[str, tuple[str, ...]] = {
    f"{PARITY}clips_of_several_lengths_match_the_reference": (
        *("gemma4-right", "gemma4_unified-right", "voxtral-left", "qwen3_omni_moe_thinker-left"),
        *("phi4_multimodal-right", "nemotron_h_omni-left", "qwen3_asr-left", "gemma3n-left"),
        *("granite_speech-left", "glmasr-right"),
    ),
    f"{PARITY}short_clips_are_encoded_as_if_they_were_alone": ("qwen3_omni_moe_thinker",),
    f"{PARITY}text_alone_trains_the_language_model_only": ("voxtral", "gemma3n"),
    f"{PARITY}packed_documents_equal_separate_documents": ("gemma4", "gemma3n", "granite_speech"),
    f"{PARITY}every_level_of_activation_memory_gives_the_same_gradients": ("gemma4",),
    f"{PARITY}generated_tokens_equal_the_references": ("voxtral",),
    f"{PARITY}a_frozen_encoder_gets_no_gradients_and_the_projector_those_of_before": ("voxtral",),
    f"{PARITY}sounds_that_do_not_fit_are_errors_that_say_what_was_found": (
        "qwen2_5_omni_thinker",
        "qwen3_asr",
    ),
    f"{PARITY}a_plan_counts_the_encoder": ("gemma4",),
    f"{OF_VIDEOS}logits_loss_and_gradients_match_the_reference": ("qwen2_5_omni_thinker",),
    f"{OF_VIDEOS}positions_equal_the_references": ("qwen3_omni_moe_thinker-left",),
    f"{OF_VIDEOS}packed_documents_equal_separate_documents": (),
    f"{OF_VIDEOS}generated_tokens_equal_the_references": (),
    f"{OF_VIDEOS}a_sound_between_a_videos_tokens_needs_both_tokens_before_them": ("qwen2_5_omni_thinker",),
    f"{CHECKPOINTS}files_of_every_layout_come_back_byte_for_byte_and_the_reference_reads_them": ("voxtral",),
    f"{CHECKPOINTS}fresh_positions_are_whispers_sines_and_cosines": ("voxtral",),
    f"{CHECKPOINTS}whole_models_come_back_with_the_parts_that_speak": ("qwen2_5_omni_thinker",),
    f"{CHECKPOINTS}the_text_part_loads_alone": ("qwen2_audio",),
    f"{RANKS}two_ranks_train_like_one": (),
    f"{HF}the_class_is_registered_and_matches_transformers_own": ("qwen2_audio", "granite_speech"),
    f"{HF}saved_files_equal_transformers_own": ("voxtral",),
    f"{HF}generate_gives_transformers_own_tokens": ("qwen2_audio-2", "voxtral-1"),
    f"{HF}lora_trains_the_layers_of_the_encoder_as_in_transformers": ("gemma4",),
}
