"""Cases of the families' own tests that always run."""

FAMILIES = "tests/architectures"

# Families whose layers are tested one by one elsewhere: one for each kind of mixer and of feed-forward part.
KINDS = ("gpt2", "llama4_text", "deepseek_v32", "nemotron_h", "minimax", "gemma4_text", "falcon_mamba")

# For tests that show that comparisons would notice a fault, which depends on the kinds of a family's parts.
NOTICED = ("llama4_text", "deepseek_v32", "nemotron_h")

# One family for each kind of names, layers and encoder.
NAMED = ("llama", "gpt2", "gpt_oss", "mixtral", "jamba", "gemma4_text", "zamba2", "qwen2_vl", "mllama")

# Checkpoints with parts that read images or sound: one for each form of their names and of their text's
# layers. That they give the reference's logits is always tested for all.
WRAPPED = ("llava", "gemma4_small", "mllama", "qwen2_5_vl", "voxtral", "kimi_k25", "mistral3_mistral4")

ALWAYS: dict[str, tuple[str, ...]] = {
    # Compiles each layer. By day whole models are compiled.
    "tests/architectures/test_compile.py::test_layers_compiled_one_by_one_give_the_same_results": (),
    f"{FAMILIES}/test_fresh_weights.py::test_fresh_weights_have_the_means_and_deviations_of_the_reference": (
        "mamba",
        "nemotron_h",
        "olmo_hybrid",
        "gpt2",
        "youtu",
    ),
    f"{FAMILIES}/test_checkpoints.py::test_verify_accepts_a_checkpoint_of_the_reference": KINDS,
    f"{FAMILIES}/test_checkpoints.py::test_a_model_of_mixed_dtypes_is_trained_and_saved": KINDS,
    f"{FAMILIES}/test_training.py::test_ten_steps_of_adamw_agree": ("llama4_text", "nemotron_h"),
    f"{FAMILIES}/test_compile.py::test_a_compiled_model_has_the_same_bits": (
        *("deepseek_v32", "gemma4_text", "minimax", "nemotron_h"),
    ),
    # How a text ends depends on no layer.
    f"{FAMILIES}/test_generation.py::test_a_sequence_ends_with_one_of_the_end_tokens": (
        "apertus",
        "falcon_mamba",
        "lfm2",
        "llama4_text",
        "ministral3",
    ),
    # By day shorter documents of all kinds of recurrent layers are compared with the reference's.
    f"{FAMILIES}/test_states.py::test_packed_documents_equal_separate_ones_of_the_reference": (
        *("falcon_mamba", "lfm3", "nemotron_h", "olmo_hybrid"),
    ),
    f"{FAMILIES}/test_generation.py::test_sampling_draws_from_the_right_distribution": (
        "{'temperature': 1.0}",
        "{'temperature': 1.0, 'top_k': 1}",
        "{'temperature': 0.4, 'top_p': 1e-06}",
        "{'temperature': 0.4, 'top_k': 9, 'top_p': 0.7}",
    ),
    f"{FAMILIES}/test_dropout.py::test_every_level_of_activation_memory_drops_the_same_elements": (
        *(f"{family}-True" for family in ("starcoder2", "phi", "gpt2", "opt")),
        *(f"{family}-False" for family in ("granite", "hunyuan_v1_dense", "seed_oss")),
    ),
    f"{FAMILIES}/test_compile.py::test_packed_and_padded_rows_compiled_have_the_same_bits": (
        *("gemma3_text-packed_by_positions", "deepseek_v3-packed_by_positions", "llama4_text-padded"),
    ),
    # Each keeps other states: compressed keys, shared keys, chunks, sums.
    f"{FAMILIES}/test_generation.py::test_steps_in_their_recorded_form_generate_the_same_text": (
        *("deepseek_v4", "gemma3n_text", "llama4_text", "minimax"),
    ),
    # Padding, ends and precision concern the common loop. Texts are compared for each kind of layer.
    **{
        f"{FAMILIES}/test_generation.py::test_{name}": ("gpt2", "gemma3n_text", "llama4_text", "minimax")
        for name in (
            "greedy_decoding_of_padded_prompts_gives_the_text_of_the_reference",
            "generation_keeps_no_graph_and_training_can_continue",
            "the_callback_receives_tokens_as_they_are_generated",
        )
    },
    f"{FAMILIES}/test_generation.py::test_prompts_may_be_padded_on_either_side": NOTICED,
    f"{FAMILIES}/test_generation.py::test_generation_stops_when_all_sequences_have_ended": (
        *("llama4_text", "gemma3n_text", "minimax"),
    ),
    f"{FAMILIES}/test_generation.py::"
    "test_greedy_tokens_under_autocast_are_the_likeliest_up_to_rounding": NOTICED,
    **{
        f"{FAMILIES}/test_multimodal.py::test_{name}": WRAPPED
        for name in (
            "the_text_part_is_saved_as_a_checkpoint_of_its_own",
            "newer_tensor_names_are_read_too",
            "a_head_in_the_files_overrides_the_config",
            "without_text_only_the_checkpoint_is_refused_with_a_hint",
            "an_unknown_tensor_is_named",
            "the_command_line_takes_the_text_part_too",
        )
    },
    **{
        f"{FAMILIES}/test_mutations.py::test_{name}_noticed": NOTICED
        for name in (
            "swapped_tensors_are",
            "a_missing_residual_stream_or_branch_is",
            "a_missing_norm_is",
            "another_value_of_any_field_of_the_spec_is",
        )
    },
    f"{FAMILIES}/test_multimodal.py::test_an_unknown_key_is_named": ("llava-outer", "llava-inner"),
}
