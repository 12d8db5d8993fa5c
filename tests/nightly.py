"""Cases that `make test` leaves to the nightly run, `make test FAMILIES=all`.

They show again, with another family, setting or size, what a case that stays shows of the same code. Each
entry names a test and the cases of it that always run; none means that the whole test waits for the night. A
case that is asked for by its name (`pytest FILE::TEST[CASE]`) always runs.
"""

from __future__ import annotations

from typing import Any

import pytest

HF, LAYERS, VISION = "tests/hf", "tests/layers", "tests/vision"
FAMILIES = "tests/architectures"
BENCHMARKS = "tests/benchmarks"
TRAINING, MODELS = "tests/liger_models/training", "tests/liger_models"

ALWAYS: dict[str, tuple[str, ...]] = {
    # Adapters of fused projections, with a magnitude, of experts with and without biases, and with options.
    f"{TRAINING}/test_lora.py::test_a_run_matches_transformers_and_peft": (
        "llama-r=3,dora",
        "phi3-r=4",
        "gemma2-r=4,alpha=4,targets=q_proj+down_proj,rslora",
        "deepseek_v3-r=4,experts",
        "gpt_oss-r=3,targets=q_proj,experts",
    ),
    f"{TRAINING}/test_lora.py::test_a_run_resumed_after_a_signal_gives_the_same_bits": (
        "r=4,dropout=0.2-checkpoint",
    ),
    f"{TRAINING}/test_lora.py::test_a_run_with_weights_in_host_memory_has_the_same_bits": ("nf4",),
    f"{TRAINING}/test_commands_of_pages.py::test_every_command_runs": (
        "README.md",
        "first_steps.md",
        "training.md",
        "quantised.md",
    ),
    f"{TRAINING}/test_resume.py::test_a_run_resumes_after_a_signal_at_any_moment": ("0-2", "2-15"),
    f"{TRAINING}/test_objectives.py::test_a_resumed_run_gives_the_same_bits": ("kto",),
    f"{TRAINING}/test_objectives.py::test_trained_rewards_match_transformers": ("r=4",),
    f"{TRAINING}/test_added_tokens.py::test_a_run_learns_new_tokens_and_exports_them": ("True",),
    f"{TRAINING}/test_added_tokens.py::test_adapters_carry_new_tokens": ("False",),
    f"{TRAINING}/test_learned_ends.py::test_learned_tokens_with_frozen_rows_near_zero_raise_a_warning": (
        "True",
    ),
    f"{TRAINING}/test_run_folder.py::test_a_flipped_bit_is_detected_and_the_previous_checkpoint_used": (
        ".written.json",
        "training_state/tensors.safetensors",
    ),
    f"{TRAINING}/test_images_in_answers.py::"
    "test_a_step_has_the_gradient_of_the_definition_over_all_its_micro_batches": ("dpo", "kto"),
    f"{MODELS}/parallel/test_sequences.py::test_two_ranks_equal_one_process": (
        "GQA, documents",
        "one head of keys, padding",
        "three heads of keys for two ranks",
        "sinks, experts, windows",
        "learned positions, documents",
        "scores by distance, documents",
        "a router's loss",
        "latents, correction bias",
        "keys of other layers, own inputs",
        "chunks, queries that grow",
        "states, documents",
        "decays by channel",
        "gated convolutions, gates of heads",
        "selective scan, padding",
        "states passed, groups that do not divide",
        "level tiled",
        "experts, offload",
        "DDP",
        "adapters, documents",
        "parallelize",
        "parallelize, weights that layers share",
    ),
    f"{MODELS}/parallel/test_sequences.py::test_four_ranks_that_pass_states_equal_one_process": (
        "gated delta rule",
        "fewer tokens on a rank than a convolution needs",
        "decays by channel",
        "state space",
        "selective scan",
        "gated convolutions",
    ),
    f"{MODELS}/parallel/test_experts.py::test_two_ranks_with_half_of_the_experts_equal_one_process": (
        "biases, clamped, sinks",
        "shared expert, correction bias",
        "weighted inputs",
        "experts that no token chooses",
        "with sequences",
        "level checkpoint",
    ),
    f"{MODELS}/parallel/test_experts.py::"
    "test_four_ranks_that_shard_or_replicate_the_experts_further_equal_one_process": (
        "divided further",
        "with sequences",
    ),
    f"{MODELS}/quantised/test_shards.py::test_ranks_read_and_save_the_bytes_of_the_whole_model": ("3",),
    # A level keeps and plans the same whatever the adapters, which are counted at one level each.
    "tests/test_live_bytes.py::test_a_step_keeps_what_its_level_promises_and_needs_what_is_planned": (
        *(f"full, dense-{level}" for level in ("all", "mlp", "lean", "tiled", "checkpoint", "offload")),
        *(f"full, experts-{level}" for level in ("lean", "tiled")),
        "full, latent experts-lean",
        "full, latent attention-lean",
        "full, norms of heads-lean",
        "full, gated attention-all",
        *(f"full, gated delta rule-{level}" for level in ("lean", "tiled")),
        "full, gated convolution-lean",
        "full, selective scan-lean",
        "full, channel delta rule-all",
        "full, gates of heads-lean",
        "full, differential attention-lean",
        "LoRA, dense-lean",
        "LoRA of experts-lean",
        "DoRA-lean",
        "QLoRA-checkpoint",
        "LoRA on 8 bits-lean",
        "LoRA on torchao's 8 bits-lean",
        "IA3-lean",
    ),
    "tests/test_live_bytes.py::test_however_a_step_ends_it_gives_everything_back_at_once": (
        "full, experts-lean",
        "LoRA, dense-tiled",
        "LoRA, dense-offload",
    ),
    "tests/test_live_bytes_of_trainers.py::test_a_trainers_step_keeps_what_its_level_promises": (
        "sft-offload",
        "dpo-checkpoint",
        "trainer-lean",
    ),
    f"{LAYERS}/memory/test_adapter_costs.py::"
    "test_a_plan_with_adapters_is_what_a_step_of_real_widths_allocates": (
        *(f"LoRA-{level}-65536" for level in ("all", "lean", "mlp", "checkpoint")),
        "LoRA-tiled-65792",
        "DoRA-lean-65536",
        "DoRA-checkpoint-8192",
        "LoRA with a bias-all-65536",
        "IA3-lean-65536",
    ),
    f"{LAYERS}/memory/test_memory_plan.py::test_a_plan_counts_the_modules_for_multi_token_prediction": ("1",),
    f"{HF}/test_trl.py::test_training_of_other_families_matches_the_reference_too": (
        "qwen3_moe-grpo",
        "gemma2-dpo",
    ),
    f"{HF}/test_trl.py::test_training_with_shared_prompts_equals_trls_own": ("grpo-True", "dpo-False"),
    f"{VISION}/test_adapters_in_transformers.py::test_adapters_match_transformers_own_model": (
        "qwen2_5_vl-tower",
        "gemma3-all",
        "mllama-all",
        "muse_glimmer-all",
    ),
    f"{VISION}/test_trainers_in_transformers.py::test_trl_trains_with_images": (
        "DPO-gemma3",
        "SFT-qwen2_5_vl",
    ),
    # Every kind of given positions for two families, and counted ones for each.
    f"{VISION}/test_given_positions.py::test_given_positions_are_used_as_in_the_reference": (
        *(f"qwen2_5_vl-{kind}" for kind in ("counted", "of one row", "on axes", "counted and on axes")),
        *(f"glm4v-{kind}" for kind in ("counted", "of one row", "on axes", "counted and on axes")),
        *(f"{family}-counted" for family in ("glm46v", "glm4v_moe", "glm_ocr", "qwen2_vl", "qwen3_5")),
        *(f"{family}-counted" for family in ("qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")),
    ),
    f"{HF}/test_trainer.py::test_training_equals_training_of_transformers_own_model": (
        *(f"llama-{way}" for way in ("one_batch", "label_smoothing", "neftune", "own_loss")),
        "llama-adamw",
        "qwen3_moe-accumulation",
        "gemma4_text-checkpointing",
        "gpt_oss-checkpointing",
    ),
    f"{MODELS}/test_cards.py::test_families_are_measured_on_all_devices_by_the_benchmarks": (),
    # The first programs below run in the same way in the tests that stay, for other benchmarks.
    f"{BENCHMARKS}/test_devices.py::test_kernels_fit_four_gpus_at_real_sizes": ("norms",),
    f"{BENCHMARKS}/test_vision.py::test_every_vision_language_family_accepts_the_images": (
        *("aya_vision", "gemma4", "lfm2_vl", "mllama", "qwen2_5_vl"),
    ),
    f"{BENCHMARKS}/test_lengths.py::"
    "test_a_case_runs_in_its_own_command_and_a_peer_is_checked_without_ours": (),
    f"{BENCHMARKS}/test_parallel.py::test_two_processes_measure_a_model_and_report_what_is_missing": (),
    f"{BENCHMARKS}/test_compiling_ahead.py::test_jobs_run_in_processes_that_end_and_report_failures": (),
    f"{HF}/test_examples.py::test_the_example_for_several_gpus_trains_on_two_processes": (),
    f"{BENCHMARKS}/test_lengths.py::"
    "test_generation_runs_in_its_own_process_and_a_peer_is_checked_without_ours": (),
    f"{BENCHMARKS}/test_training.py::test_a_peer_is_measured_again_in_a_process_without_ours": (),
}


# Checkpoints with parts that read images or sound: one for each form of their names and of their text's
# layers. That they give the reference's logits is always tested for all.
WRAPPED = ("llava", "gemma4_small", "mllama", "qwen2_5_vl", "voxtral", "kimi_k25", "mistral3_mistral4")
ALWAYS |= {
    f"{FAMILIES}/test_multimodal.py::test_{name}": WRAPPED
    for name in (
        "the_text_part_is_saved_as_a_checkpoint_of_its_own",
        "newer_tensor_names_are_read_too",
        "a_head_in_the_files_overrides_the_config",
        "without_text_only_the_checkpoint_is_refused_with_a_hint",
        "an_unknown_tensor_is_named",
        "the_command_line_takes_the_text_part_too",
    )
}
ALWAYS[f"{FAMILIES}/test_multimodal.py::test_an_unknown_key_is_named"] = ("llava-outer", "llava-inner")

# In transformers: one case for each form of projections, of a cache, of an adapter or of a trainer's loss.
FORMS = ("llama-fused", "gemma2-split", "gpt_oss-fused", "phi3-split", "qwen3_moe-split")
ALWAYS |= {
    f"{HF}/test_trl.py::test_training_equals_training_of_transformers_own_model": (
        "sft-whole",
        "padding_free-whole",
        "assistant-peft",
        "dpo-peft",
        "kto-peft",
        "orpo-whole",
        "grpo-whole",
        "reward-peft",
        "gkd-whole",
    ),
    f"{HF}/test_trl.py::test_training_with_options_matches_the_reference_too": (
        "several_losses",
        "reference_in_advance",
        "several_iterations",
        "float32_head",
    ),
    f"{HF}/test_generation.py::test_tokens_equal_the_references": (
        "llama-beams",
        "llama-chunked_prompt",
        "gemma2-no_cache",
        "gpt_oss-static",
        "llama4_text-chunked_prompt",
        "mistral4-dynamic",
        "mistral4-prompt_lookup",
        "gemma4_text-beams_static",
        "qwen3_next-dynamic",
        "qwen3_next-beams",
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
}

# Kernels in the interpreter: a part of the combinations, in which each setting still has each of its values.
KERNELS = "tests/kernels"
ALWAYS |= {
    f"{KERNELS}/recurrent/test_selective_scan.py::test_all_forms_equal_the_recurrence_in_float64": (
        "plain-packed",
        "plain-slow",
        "triton-packed",
        "triton-fast",
    ),
    f"{KERNELS}/attention/test_tree_attention.py::test_a_tree_equals_its_documents_one_by_one": (
        "plain-all",
        "plain-both",
        "triton-window",
        "triton-spans",
    ),
    f"{KERNELS}/losses/test_cross_entropy.py::"
    "test_token_accuracy_counts_the_valid_tokens_predicted_correctly": (
        "plain-shape0--100",
        "plain-shape1-3",
        "triton-shape0--1",
        "triton-shape1--100",
    ),
    f"{KERNELS}/norms/test_gated_rms_norm.py::test_groups_of_any_width_follow_the_formula": (
        "plain-llama-silu-False-True",
        "plain-float32-sigmoid-True-False",
        "triton-llama-silu-True-True",
        "triton-llama-silu-False-False",
        "triton-llama-sigmoid-False-True",
        "triton-float32-silu-True-False",
        "triton-float32-sigmoid-False-False",
        "triton-float32-sigmoid-True-True",
    ),
    f"{KERNELS}/rotary/test_qk_norm_rotary.py::test_every_order_and_layout_is_correct": (
        *(f"3-True-{rest}" for rest in ("False-False-False", "False-True-True", "True-False-True")),
        *(f"5-False-{rest}" for rest in ("False-False-True", "True-True-True", "True-False-False")),
        "3-True-True-True-False",
        "5-False-False-True-False",
    ),
    f"{MODELS}/test_host_weights.py::test_a_step_has_the_same_bits_and_holds_two_layers_at_a_time": (
        *("all-True", "lean-False", "mlp-True", "checkpoint-False", "tiled-True", "offload-False"),
    ),
    f"{MODELS}/quantised/test_transformers.py::test_our_classes_are_loaded_dense_by_transformers": (
        "dtype0-mxfp4",
        "dtype1-float8 blocks",
    ),
    # Compiles each layer. By day whole models are compiled.
    "tests/architectures/test_compile.py::test_layers_compiled_one_by_one_give_the_same_results": (),
    # Runs compositions until the smallest that fails is found.
    f"{BENCHMARKS}/test_certify.py::test_a_wrong_loss_is_found_and_reduced_to_the_simplest_composition": (),
    # Trains with three kinds of rounding. Each step's rounding is compared with its definition.
    f"{TRAINING}/test_learning.py::test_the_default_learns_as_float32_does_and_plain_does_not": (),
    # Trains for some hundred steps; the objective's steps are compared with other definitions.
    f"{TRAINING}/test_examples.py::test_a_small_model_learns_a_preference": (),
}

# Families whose layers are tested one by one elsewhere: one for each kind of mixer and of feed-forward part.
KINDS = ("gpt2", "llama4_text", "deepseek_v32", "nemotron_h", "minimax", "gemma4_text", "falcon_mamba")
ALWAYS |= {
    f"{FAMILIES}/test_fresh_weights.py::test_fresh_weights_have_the_means_and_deviations_of_the_reference": (
        "mamba",
        "nemotron_h",
        "olmo_hybrid",
        "gpt2",
        "youtu",
    ),
    f"{FAMILIES}/test_checkpoints.py::test_verify_accepts_a_checkpoint_of_the_reference": KINDS,
    f"{FAMILIES}/test_checkpoints.py::test_a_model_of_mixed_dtypes_is_trained_and_saved": KINDS,
    f"{FAMILIES}/test_training.py::test_ten_steps_of_adamw_agree": (*KINDS, "bailing_hybrid", "bloom"),
    f"{HF}/test_adapters_of_families.py::test_adapters_on_packed_projections_match_the_reference": KINDS,
    # How a text ends depends on no layer.
    f"{FAMILIES}/test_generation.py::test_a_sequence_ends_with_one_of_the_end_tokens": (
        "apertus",
        "falcon_mamba",
        "lfm2",
        "llama4_text",
        "ministral3",
    ),
    f"{FAMILIES}/test_dropout.py::test_every_level_of_activation_memory_drops_the_same_elements": (
        *(f"{family}-True" for family in ("starcoder2", "phi", "gpt2", "opt")),
        *(f"{family}-False" for family in ("granite", "hunyuan_v1_dense", "seed_oss")),
    ),
    f"{FAMILIES}/test_compile.py::test_packed_and_padded_rows_compiled_have_the_same_bits": (
        "llama-packed_by_positions",
        "gemma3_text-packed_by_positions",
        "deepseek_v3-packed_by_positions",
        "gemma4_text-padded",
        "llama4_text-padded",
    ),
    f"{LAYERS}/attention/test_attention.py::test_it_compiles_without_a_graph_break_to_the_same_values": (
        "rows-None-3-extras0",
        "rows-4-None-extras0",
        "rows-None-None-extras1",
        "packed-None-None-extras0",
        "packed-None-3-extras1",
        "packed-4-None-extras1",
    ),
    f"{LAYERS}/memory/test_adapter_costs.py::test_a_layer_run_by_peft_needs_the_counted_memory": (
        "lora-mlp.down_proj",
        "dora-mlp.gate_proj",
        "lora, dropout-mlp.gate_proj",
        "dora, dropout-mlp.down_proj",
        "ia3 on outputs-self_attn.k_proj",
        "ia3 on inputs-mlp.down_proj",
    ),
    f"{VISION}/test_parity.py::test_every_level_of_activation_memory_gives_the_same_gradients": (
        *("aya_vision", "gemma4", "lighton_ocr", "llama4", "llava_next", "mllama", "muse_glimmer", "qwen3_5"),
    ),
    f"{VISION}/test_tools_in_transformers.py::test_drafts_change_no_token_with_images": (
        *("gemma4-assistant", "mllama-assistant", "qwen2_5_vl-assistant"),
        *("gemma3-prompt_lookup", "llava_onevision-prompt_lookup"),
    ),
    f"{TRAINING}/test_objectives.py::"
    "test_a_step_has_the_gradient_of_the_definition_over_all_its_micro_batches": (
        *("dpo-1.0", "simpo-0.0", "orpo-1.0", "kto-0.0"),
    ),
    f"{TRAINING}/test_trees.py::test_loss_and_every_gradient_equal_those_of_the_examples_one_by_one": (
        *("llama-checkpoint", "llama-tiled", "mixtral-all", "gemma3_text-tiled"),
    ),
    f"{TRAINING}/test_optimizers.py::test_bfloat16_weights_keep_what_rounding_would_lose": (
        *("muon", "adafactor"),
    ),
    f"{TRAINING}/test_optimizers.py::test_a_run_resumes_to_the_bit": ("adamw_8bit", "muon"),
    f"{TRAINING}/test_sharded_runs.py::test_two_ranks_train_like_one_process_however_the_model_is_sharded": (
        *("two", "hybrid", "begun_by_one", "sequence"),
    ),
    f"{TRAINING}/test_sharded_runs.py::test_objectives_are_means_over_all_ranks": (
        *("dpo", "reward", "frozen", "adapters"),
    ),
    f"{BENCHMARKS}/test_certify.py::test_compositions_in_one_process_hold": ("0", "2", "3"),
    # By day the same sharding trains a text model in transformers, and vision models natively.
    f"{VISION}/test_shards_in_transformers.py::test_two_ranks_train_like_one": (),
}

# Each starts Python and imports everything again, or compiles; by day others show a part of it in a process
# that has done so.
ALWAYS |= {
    # By day the sharded runs of tests/liger_models/parallel are compared, and compositions in one process.
    f"{BENCHMARKS}/test_certify.py::test_compositions_on_two_processes_hold": (),
    # By day test_compilation.py compiles for one GPU, and the limits are tested with made-up launches.
    f"{BENCHMARKS}/test_devices.py::test_kernels_fit_four_gpus_at_real_sizes": (),
    f"{BENCHMARKS}/test_commands.py::test_liger_models_bench_runs_from_another_folder": (),
    f"{BENCHMARKS}/test_training.py::test_the_cases_of_a_page_are_updated_with_ratios_and_plot": (),
    "tests/test_platforms.py::test_everything_imports_and_checkpoints_are_written_without_unix_modules": (),
    # By day the wheel is built and its files are compared.
    "tests/test_package.py::test_an_installed_wheel_is_found_and_runs_outside_the_repository": (),
}

# They show that comparisons would notice a fault, which depends on the kinds of a family's parts.
NOTICED = ("gpt2", "llama4_text", "deepseek_v32", "nemotron_h", "gemma4_text", "minimax")
ALWAYS |= {
    f"{FAMILIES}/test_mutations.py::test_{name}_noticed": NOTICED
    for name in (
        "swapped_tensors_are",
        "a_missing_residual_stream_or_branch_is",
        "another_value_of_any_field_of_the_spec_is",
    )
}
ALWAYS |= {
    f"{VISION}/test_mutations.py::test_another_value_of_any_field_is_detected": (
        *("gemma4", "llava_next", "mllama"),
    ),
    # Padding, ends and precision concern the common loop. Texts are compared for each kind of layer.
    f"{FAMILIES}/test_generation.py::test_prompts_may_be_padded_on_either_side": NOTICED,
    f"{FAMILIES}/test_generation.py::test_generation_stops_when_all_sequences_have_ended": (
        *("llama4_text", "gemma4_text", "minimax"),
    ),
    f"{FAMILIES}/test_generation.py::"
    "test_greedy_tokens_under_autocast_are_the_likeliest_up_to_rounding": NOTICED,
}

# One family for each kind of names, layers and encoder.
NAMED = ("llama", "gpt2", "gpt_oss", "mixtral", "jamba", "gemma4_text", "zamba2", "qwen2_vl", "mllama")
ALWAYS |= {
    f"{LAYERS}/model/test_freezing.py::test_names_are_those_of_the_family_s_checkpoints": NAMED,
    f"{MODELS}/test_vocabulary.py::test_configs_of_all_families_say_the_new_size": NAMED,
}


# Operations of kernel_operations.py that run the code of others with another option. Their results, and how
# they read their operands, are always tested.
OPTIONS = (
    "moe_experts",
    "moe_experts_biased",
    "moe_experts_of_weighted",
    "attention_narrow_values",
    "cross_entropy_capped",
    "gated_rms_norm_gate_first",
    "gated_rms_norm_sigmoid",
    "linear_cross_entropy_summed",
    "linear_kl",
    "linear_log_probs_weighted",
    "short_conv_linear",
    "split_norm_rotary_qkv",
    "split_norm_rotary_qkv_norm_last",
    "split_rotary_qkv_inplace",
    "split_rotary_qkv_interleaved",
)
WITH_ONE_OPTION = {
    *(
        f"tests/kernels/test_contract.py::test_{name}"
        for name in (
            "a_row_may_be_one_element",
            "autocast_changes_no_bit",
            "autocast_sets_the_dtype_of_products_and_gradients_keep_their_operands_dtypes",
            "it_may_run_again_under_checkpointing",
            "it_traces_without_a_graph_break",
            "second_derivatives_are_refused_at_once",
            "zero_rows_give_empty_results_and_zero_weight_gradients",
            "second_runs_and_backward_passes_give_the_same_bits_add_up_and_modify_nothing",
            "the_plain_twin_passes_gradcheck_in_float64",
        )
    ),
    "tests/kernels/test_unwritten_memory.py::test_no_operation_reads_unwritten_memory",
}

UNKNOWN = pytest.StashKey[dict[str, set[str]]]()


def leave_to_the_night(config: pytest.Config, items: list[Any]) -> None:
    """Deselect the cases that are not among those that always run, unless `--all-families`. Names of cases
    that their test does not have are kept in the config for test_nightly.py.
    """
    if config.getoption("--all-families") or any("[" in argument for argument in config.args):
        return
    found: dict[str, set[str]] = {}
    left_out = []
    for item in items:
        test, _, case = item.nodeid.partition("[")
        if test in ALWAYS:
            found.setdefault(test, set()).add(case[:-1])
            if case[:-1] not in ALWAYS[test]:
                left_out.append(item)
        elif test in WITH_ONE_OPTION and set(OPTIONS) & set(case[:-1].split("-")):
            left_out.append(item)
    config.stash[UNKNOWN] = {test: set(ALWAYS[test]) - cases for test, cases in found.items()}
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        ids = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in ids]
