"""Cases of kernels and layers that always run: of kernels in the interpreter a part of the combinations, in
which each setting still has each of its values.
"""

from night.families import NAMED

LAYERS = "tests/layers"
KERNELS = "tests/kernels"

ALWAYS: dict[str, tuple[str, ...]] = {
    f"{LAYERS}/memory/test_adapter_costs.py::"
    "test_a_plan_with_adapters_is_what_a_step_of_real_widths_allocates": (
        *(f"LoRA-{level}-65536" for level in ("all", "lean", "checkpoint")),
        "LoRA-tiled-65792",
        "DoRA-lean-65536",
        "DoRA-checkpoint-8192",
        "LoRA with a bias-all-65536",
        "IA3-lean-65536",
    ),
    f"{LAYERS}/memory/test_memory_plan.py::test_a_plan_counts_the_modules_for_multi_token_prediction": ("1",),
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
    f"{LAYERS}/attention/test_attention.py::test_it_compiles_without_a_graph_break_to_the_same_values": (
        *("rows-None-3-extras0", "rows-4-None-extras0", "packed-None-None-extras0", "packed-4-None-extras1"),
    ),
    f"{LAYERS}/memory/test_adapter_costs.py::test_a_layer_run_by_peft_needs_the_counted_memory": (
        "lora, dropout-mlp.gate_proj",
        "dora, dropout-mlp.down_proj",
        "ia3 on outputs-self_attn.k_proj",
        "ia3 on inputs-mlp.down_proj",
    ),
    f"{LAYERS}/memory/test_kept_bits.py::test_a_plan_is_what_a_step_over_quantised_bits_allocates": (
        *("gpt-oss", "linear layers"),
    ),
    f"{KERNELS}/recurrent/test_selective_scan.py::test_slabs_of_channels_change_nothing": ("plain",),
    f"{KERNELS}/recurrent/test_ssd.py::test_heads_are_divided_into_slices_and_parts": ("1",),
    f"{KERNELS}/experts/test_expert_paths.py::"
    "test_recomputed_passes_over_frozen_matrices_give_the_bits_of_kept_ones_over_trained": ("plain",),
    f"{KERNELS}/losses/test_linear_cross_entropy.py::test_it_compiles_without_a_graph_break": ("mean",),
    f"{KERNELS}/attention/test_chosen_blocks.py::test_attention_to_chosen_blocks": ("several in a tile",),
    f"{LAYERS}/model/test_recorded_layers.py::test_recorded_steps_have_the_bits_of_unrecorded_ones": (
        *("gemma4_text-lean", "qwen3_moe-checkpoint"),
    ),
    # By day kernels are compared with their twins alone, and layers at every level through the twins.
    f"{LAYERS}/recurrent/test_gated_delta.py::test_kernels_match_the_plain_twins": ("qkv-checkpoint",),
    f"{LAYERS}/recurrent/test_selective.py::test_kernels_match_the_plain_twins": ("weighted-lean",),
    f"{KERNELS}/experts/test_exchange.py::"
    "test_rows_that_arrive_and_leave_while_products_run_have_the_same_bits": (
        *("paths-29-128", "biases-29-32"),
    ),
    f"{LAYERS}/model/test_freezing.py::test_names_are_those_of_the_family_s_checkpoints": NAMED,
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
