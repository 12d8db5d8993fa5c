"""Cases of training, parallel and other runs that always run."""

from night.families import NAMED

TRAINING = "tests/liger_models/training"
MODELS = "tests/liger_models"

ALWAYS: dict[str, tuple[str, ...]] = {
    # A run that loses a rank, and resumes, is in test_faults.py.
    "tests/liger_models/training/test_sharded_runs.py::"
    "test_a_run_stopped_on_one_rank_resumes_with_the_same_bits": (),
    # Adapters of fused projections, with a magnitude, and of experts with biases. By day other options, and
    # experts without, are compared in tests/hf.
    f"{TRAINING}/adapters/test_lora_runs.py::test_a_run_matches_transformers_and_peft": (
        "llama-r=3,dora",
        "phi3-r=4",
        "gpt_oss-r=3,targets=q_proj,experts",
    ),
    # By day test_platforms.py takes AdamW's steps and attends on MPS.
    f"{TRAINING}/test_mps.py::test_a_run_on_mps_has_a_cpus_losses_and_resumes_with_the_same_bits": (),
    # By day a whole model is resumed after signals, and adapters after a run that was too short.
    f"{TRAINING}/adapters/test_lora_runs.py::test_a_run_resumed_after_a_signal_gives_the_same_bits": (),
    # By day test_host_weights.py takes steps with weights in host memory.
    f"{TRAINING}/adapters/test_lora_runs.py::test_a_run_with_weights_in_host_memory_has_the_same_bits": (),
    f"{TRAINING}/test_commands_of_pages.py::test_every_command_runs": ("README.md", "training.md"),
    f"{TRAINING}/checkpoints/test_resume.py::test_a_run_resumes_after_a_signal_at_any_moment": ("2-15",),
    # By day grpo_runs are trained until their rewards rise, too.
    f"{TRAINING}/test_examples.py::test_the_reward_of_grpo_in_a_loop_rises": (),
    f"{TRAINING}/objectives/test_objectives.py::test_a_resumed_run_gives_the_same_bits": ("kto",),
    f"{TRAINING}/objectives/test_objectives.py::test_trained_rewards_match_transformers": ("r=4",),
    f"{TRAINING}/text/test_added_tokens.py::test_a_run_learns_new_tokens_and_exports_them": ("True",),
    f"{TRAINING}/text/test_added_tokens.py::test_adapters_carry_new_tokens": ("False",),
    f"{TRAINING}/text/test_learned_ends.py::test_learned_tokens_with_frozen_rows_near_zero_raise_a_warning": (
        "True",
    ),
    f"{TRAINING}/checkpoints/test_run_folder.py::"
    "test_a_flipped_bit_is_detected_and_the_previous_checkpoint_used": (
        ".written.json",
        "training_state/tensors.safetensors",
    ),
    f"{TRAINING}/objectives/test_images_in_answers.py::"
    "test_a_step_has_the_gradient_of_the_definition_over_all_its_micro_batches": ("dpo",),
    f"{MODELS}/parallel/test_sequences.py::test_two_ranks_equal_one_process": (
        "GQA, documents",
        "three heads of keys for two ranks",
        "sinks, experts, windows",
        "scores by distance, documents",
        "a router's loss",
        "latents, correction bias",
        "keys of other layers, own inputs",
        "chunks, queries that grow",
        "states, documents",
        "selective scan, padding",
        "states passed, groups that do not divide",
        "experts, offload",
        "DDP",
        "adapters, documents",
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
        "experts that no token chooses",
        "with sequences",
    ),
    f"{MODELS}/parallel/test_experts.py::"
    "test_four_ranks_that_shard_or_replicate_the_experts_further_equal_one_process": (
        "divided further",
        "with sequences",
    ),
    f"{MODELS}/quantised/test_shards.py::test_ranks_read_and_save_the_bytes_of_the_whole_model": ("3",),
    f"{MODELS}/test_batch_invariant.py::test_log_probs_of_a_document_have_the_same_bits_in_every_batch": (
        *("deepseek_v3", "gemma2", "gpt_oss", "mamba2"),
    ),
    f"{MODELS}/test_cards.py::test_families_are_measured_on_all_devices_by_the_benchmarks": (),
    f"{MODELS}/test_host_weights.py::test_a_step_has_the_same_bits_and_holds_two_layers_at_a_time": (
        *("lean-False", "checkpoint-False", "tiled-True"),
    ),
    f"{MODELS}/quantised/test_transformers.py::test_our_classes_are_loaded_dense_by_transformers": (
        "dtype0-mxfp4",
        "dtype1-float8 blocks",
    ),
    # Trains with three kinds of rounding. Each step's rounding is compared with its definition.
    f"{TRAINING}/test_learning.py::test_the_default_learns_as_float32_does_and_plain_does_not": (),
    # Trains for some hundred steps; the objective's steps are compared with other definitions.
    f"{TRAINING}/test_examples.py::test_a_small_model_learns_a_preference": (),
    f"{TRAINING}/objectives/test_objectives.py::"
    "test_a_step_has_the_gradient_of_the_definition_over_all_its_micro_batches": (
        *("dpo-1.0", "simpo-0.0", "orpo-1.0", "kto-0.0"),
    ),
    f"{TRAINING}/data/test_trees.py::test_loss_and_every_gradient_equal_those_of_the_examples_one_by_one": (
        *("llama-checkpoint", "llama-tiled", "mixtral-all", "gemma3_text-tiled"),
    ),
    f"{TRAINING}/test_optimizers.py::test_bfloat16_weights_keep_what_rounding_would_lose": ("adafactor",),
    f"{TRAINING}/test_images.py::test_adapters_are_added_to_the_trained_part_only": (
        *("vision,projector-nf4", "language-None"),
    ),
    f"{TRAINING}/test_optimizers.py::test_a_run_resumes_to_the_bit": ("muon",),
    f"{TRAINING}/test_sharded_runs.py::test_two_ranks_train_like_one_process_however_the_model_is_sharded": (
        *("two", "hybrid", "begun_by_one", "sequence"),
    ),
    f"{TRAINING}/test_sharded_runs.py::test_objectives_are_means_over_all_ranks": (*("dpo", "frozen"),),
    f"{MODELS}/test_presets.py::test_a_preset_can_be_resized_for_a_small_tokenizer": ("llama-demo",),
    f"{MODELS}/test_vocabulary.py::test_configs_of_all_families_say_the_new_size": NAMED,
}
