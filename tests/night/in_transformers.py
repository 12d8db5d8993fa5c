"""Cases in transformers and its trainers that always run: one for each form of projections, of a cache, of an
adapter or of a trainer's loss.
"""

HF = "tests/hf"

FORMS = ("llama-fused", "gemma2-split", "gpt_oss-fused", "phi3-split", "qwen3_moe-split")

ALWAYS: dict[str, tuple[str, ...]] = {
    f"{HF}/test_trl.py::test_training_of_other_families_matches_the_reference_too": (
        "qwen3_moe-grpo",
        "gemma2-dpo",
    ),
    f"{HF}/test_trl.py::test_training_with_shared_prompts_equals_trls_own": ("grpo-True", "dpo-False"),
    f"{HF}/test_trainer.py::test_training_equals_training_of_transformers_own_model": (
        *(f"llama-{way}" for way in ("one_batch", "label_smoothing", "neftune", "own_loss")),
        "qwen3_moe-accumulation",
        "gpt_oss-checkpointing",
    ),
    f"{HF}/test_quantization.py::test_dense_families_in_four_bits_match_the_reference": (
        *("gpt2", "olmo_hybrid"),
    ),
    f"{HF}/test_adapters_of_families.py::test_adapters_of_every_family_match_the_reference": (
        *("dbrx", "falcon_mamba", "gemma4_text", "minimax", "zamba2"),
    ),
    f"{HF}/test_lightning.py::test_its_precisions_mean_autocast_and_bfloat16_parameters": (
        *("native-bf16-true", "hf-bf16-mixed"),
    ),
    f"{HF}/test_lora.py::test_a_bfloat16_model_is_as_accurate_as_with_pefts_layers": ("torch.bfloat16",),
    f"{HF}/test_examples.py::test_the_example_for_several_gpus_trains_on_two_processes": (),
    f"{HF}/test_trl.py::test_training_equals_training_of_transformers_own_model": (
        "sft-whole",
        "assistant-peft",
        "dpo-peft",
        "kto-peft",
        "grpo-whole",
        "reward-peft",
        "gkd-whole",
    ),
    f"{HF}/test_trl.py::test_training_with_options_matches_the_reference_too": (
        "reference_in_advance",
        "float32_head",
    ),
    f"{HF}/test_generation.py::test_tokens_equal_the_references": (
        "llama-beams",
        "gemma2-no_cache",
        "gpt_oss-static",
        "llama4_text-chunked_prompt",
        "mistral4-prompt_lookup",
        "qwen3_next-dynamic",
        "lfm2-static",
    ),
    f"{HF}/test_generation.py::test_tokens_of_models_with_state_spaces_are_those_of_the_reference": (
        "mamba2-beams",
        "falcon_h1-dynamic",
        "falcon_mamba-dynamic",
        "jamba-dynamic",
    ),
    f"{HF}/test_lightning.py::test_a_resumed_run_equals_an_uninterrupted_one": ("deepseek_v3-hf",),
    f"{HF}/test_lightning.py::test_training_equals_training_of_transformers_own_model": (
        "llama-native-accumulated",
        "qwen3_moe-hf-plain",
    ),
    f"{HF}/test_trainer.py::test_a_resumed_run_equals_an_uninterrupted_one": ("gpt_oss-split",),
    f"{HF}/test_quantization.py::test_quantised_routers_are_read_natively_and_refused_in_transformers": (
        "gemma4_text",
    ),
    f"{HF}/test_quantization.py::test_experts_are_not_quantised": ("gpt_oss", "deepseek_v2"),
    f"{HF}/test_quantization.py::test_gradients_of_adapters_on_quantised_layers_match_the_reference": (
        "llama-4-lean",
        "llama-8-checkpoint",
        "gemma2-4-mlp",
    ),
    f"{HF}/test_quantization.py::test_families_in_eight_bits_match_the_reference": ("gemma2", "phi3"),
    f"{HF}/test_models.py::test_logits_loss_and_gradients_equal_the_reference": (
        "llama-fused",
        "gemma2-split",
        "qwen3_moe-split",
        "gemma4_text-fused",
        "gpt_neox-split",
        "stablelm-fused",
        "gpt_oss-fused",
    ),
    f"{HF}/test_models.py::test_the_router_loss_matches_the_reference_and_follows_the_config": (
        "gpt_oss",
        "minimax_m2",
        "qwen2_moe",
    ),
    f"{HF}/test_checkpoint_tensors.py::test_they_equal_the_saved_tensors": (*FORMS, "gpt_neox-split"),
    f"{HF}/test_checkpoints.py::test_fresh_weights_are_saved_as_the_native_model_saves_them": (
        *("gpt_oss", "phi3", "stablelm"),
    ),
    f"{HF}/test_generation.py::test_queries_scaled_by_position_continue_with_the_cache": (
        *("chunked_prompt", "no_cache", "static"),
    ),
    f"{HF}/test_peft.py::test_adapters_with_the_usual_names_are_read_onto_fused_projections": (
        *("dora", "lora", "rslora"),
    ),
    f"{HF}/test_device_map.py::test_layers_that_do_not_fit_in_memory_are_read_from_disk": (
        *("gemma2", "qwen3_moe"),
    ),
    f"{HF}/test_checkpoints.py::test_a_checkpoint_is_written_back_unchanged": (*FORMS, "gpt_neox-split"),
    f"{HF}/test_lora.py::test_losses_and_gradients_match_pefts_own_layers": (
        "default-split",
        "rslora-fused",
        "ranks-split",
        "some-split",
        "bias-fused",
        "lora_bias-split",
        "dora-fused",
        "head-split",
    ),
    f"{HF}/test_adapters_of_families.py::test_output_projections_of_state_space_layers_have_adapters": (
        "falcon_mamba",
        "nemotron_h",
    ),
    f"{HF}/test_adapters_of_families.py::test_adapters_on_packed_projections_match_the_reference": (
        *("gpt2", "deepseek_v32", "gemma4_text", "falcon_mamba"),
    ),
}
