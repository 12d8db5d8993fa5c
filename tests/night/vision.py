"""Cases with images that always run."""

VISION = "tests/vision"

ALWAYS: dict[str, tuple[str, ...]] = {
    "tests/vision/test_memory_plan.py::test_the_command_counts_images_and_frozen_parts_keep_nothing": (),
    f"{VISION}/test_adapters_in_transformers.py::test_adapters_match_transformers_own_model": (
        "qwen2_5_vl-tower",
        "gemma3-all",
        "muse_glimmer-all",
    ),
    **dict.fromkeys(
        (
            f"{VISION}/test_adapters_in_transformers.py::test_an_adapter_of_{name}"
            for name in (
                "patch_embeddings_is_refused",
                "a_head_that_transformers_does_not_know_as_one_loads",
            )
        ),
        (),
    ),
    f"{VISION}/test_trainers_in_transformers.py::test_trl_trains_with_images": (
        "DPO-gemma3",
        "SFT-qwen2_5_vl",
    ),
    # Every kind of given positions for two families, and counted ones for each way of counting.
    f"{VISION}/test_given_positions.py::test_given_positions_are_used_as_in_the_reference": (
        *(f"qwen2_5_vl-{kind}" for kind in ("counted", "of one row", "on axes", "counted and on axes")),
        *(f"glm4v-{kind}" for kind in ("counted", "on axes")),
        *(f"{family}-counted" for family in ("glm46v", "qwen2_vl", "qwen3_5", "qwen3_vl")),
    ),
    f"{VISION}/test_given_positions.py::test_given_positions_work_with_padding": (
        *("ernie4_5_vl_moe", "glm4v", "qwen2_5_vl", "qwen3_5", "qwen3_vl"),
    ),
    **{
        f"{VISION}/test_answers.py::test_{name}": (*("gemma4", "hunyuan_vl", "mllama", "step3p7"),)
        for name in (
            "scores_equal_those_of_separate_sequences",
            "labelled_answers_are_split_into_separate_calls",
        )
    },
    f"{VISION}/test_mistral_large4.py::test_another_value_of_any_field_of_its_text_part_is_noticed": (),
    f"{VISION}/test_parity.py::test_every_level_of_activation_memory_gives_the_same_gradients": (
        *("gemma4", "llama4", "mllama"),
    ),
    f"{VISION}/test_tools_in_transformers.py::test_drafts_change_no_token_with_images": (
        *("gemma4-assistant", "qwen2_5_vl-assistant", "gemma3-prompt_lookup"),
    ),
    # By day the same sharding trains a text model in transformers, and vision models natively.
    f"{VISION}/test_shards_in_transformers.py::test_two_ranks_train_like_one": (),
    f"{VISION}/test_mutations.py::test_another_value_of_any_field_is_detected": ("llava_next", "mllama"),
    f"{VISION}/test_checkpoints.py::test_a_head_in_the_files_is_used_whatever_the_config_says": (
        *("ernie4_5_vl_moe", "gemma4", "llava_next", "mllama", "step3p7"),
    ),
}
