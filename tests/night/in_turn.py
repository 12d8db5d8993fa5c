"""Parameters whose values are taken in turn: by day each combination of a test's other parameters runs with
one of them, and so each value with a part of the combinations; at night with all. Two parameters are ones
that change together. Of some tests one case in two or three runs by day.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

CONTRACT = "tests/kernels/test_contract.py::test_"
LOSSES = "tests/kernels/losses/test_"
LAYERS = "tests/layers/"
PARITY = "tests/architectures/test_parity.py::test_"
VISION = "tests/vision/test_"
FAMILIES = "tests/architectures/test_"
UNWRITTEN = "tests/kernels/test_unwritten_memory.py::test_"
EXPERTS = "tests/kernels/experts/test_"
QUANTISED = "tests/liger_models/quantised/test_"
TRAINING = "tests/liger_models/training"
TEMPLATES = f"{TRAINING}/text/test_published_templates.py::test_"

IN_TURN: dict[str, str] = {
    # What is kept and when it is used is the code of both implementations.
    f"{CONTRACT}autocast_changes_no_bit": "implementation",
    f"{CONTRACT}it_may_run_again_under_checkpointing": "implementation",
    f"{CONTRACT}second_derivatives_are_refused_at_once": "implementation",
    f"{CONTRACT}operands_of_two_dtypes_lose_no_more_precision_than_the_narrower": "dtypes",
    f"{CONTRACT}the_layout_in_memory_changes_nothing": "first",
    f"{LOSSES}cross_entropy.py::test_float32_is_as_close_as_rounding_allows": "reduction",
    f"{LOSSES}linear_cross_entropy.py::test_float32_is_as_close_as_rounding_allows": "reduction",
    f"{LAYERS}blocks/test_blocks.py::test_a_layer_reports_the_bytes_it_keeps": "level",
    f"{LAYERS}recompute/test_kept_activations.py::"
    "test_an_output_edited_in_place_before_its_use_has_the_same_gradients": "levels",
    f"{LAYERS}recompute/test_activation_memory.py::test_frozen_weights_keep_the_other_gradients": "levels",
    f"{LAYERS}recompute/test_activation_memory.py::"
    "test_packing_and_padding_give_the_same_bits_at_every_level": "form",
    f"{LAYERS}recompute/test_activation_memory.py::"
    "test_low_rank_adapters_train_the_same_at_every_level": "dropout",
    f"{LAYERS}attention/test_attention.py::test_a_query_attends_to_all_of_its_span_or_document": "form",
    f"{LAYERS}attention/test_attention.py::test_a_query_attends_to_its_own_chunk_only": "form",
    f"{LOSSES}linear_divergence.py::test_chunked_gradients_are_the_true_ones": "reduction",
    f"{EXPERTS}expert_paths.py::test_result_and_gradients_match_folded_matrices": "implementation",
    f"{EXPERTS}moe_experts.py::test_result_and_gradients_match_the_formula": "implementation",
    "tests/kernels/recurrent/test_short_conv.py::"
    "test_documents_are_convolved_separately_after_their_states": "continues",
    f"{UNWRITTEN}no_operation_reads_unwritten_memory": "dtype",
    f"{TRAINING}/data/test_hostile_images.py::"
    "test_rows_of_a_data_set_of_the_hub_cannot_name_local_files": "form",
    f"{QUANTISED}formats.py::test_a_weight_is_the_float32_product_rounded_once": "dtype",
    f"{PARITY}a_fresh_padding_row_is_zero_if_it_is_in_the_reference": "tied",
    f"{PARITY}every_level_of_activation_memory_gives_the_same_bits": "packing levels",
    f"{PARITY}logits_to_keep_selects_the_same_positions": "keep",
    f"{PARITY}num_items_in_batch_divides_the_loss": "count",
    f"{PARITY}packed_documents_agree_with_documents_run_alone": "form",
    f"{PARITY}padding_changes_nothing_for_the_tokens": "side",
    f"{PARITY}the_padding_row_has_the_gradient_of_the_reference": "pad tied",
    f"{VISION}parity.py::test_a_prompt_with_images_is_computed_once_for_its_answers": "more",
    f"{VISION}parts.py::test_frozen_parts_do_not_train_and_the_rest_trains_as_before": "part",
}

# Tests with many cases of one kind, of which one in this number runs by day.
SAMPLED: dict[str, int] = {
    "tests/architectures/test_published.py::test_a_published_config_has_the_published_parameters": 12,
    "tests/architectures/test_published.py::"
    "test_a_published_config_cut_to_a_layer_of_every_kind_has_the_first_layers": 2,
    "tests/architectures/test_published.py::test_the_dropout_of_a_published_config_acts_or_is_refused": 2,
    f"{TEMPLATES}renderings_match_transformers_and_can_be_trained_on": 4,
    f"{TEMPLATES}answers_match_prefixes_of_the_conversation": 4,
    f"{TEMPLATES}labels_match_trls_marks_apart_from_the_generation_prompt": 4,
    f"{TEMPLATES}all_assistant_text_and_nothing_else_is_learned": 2,
    f"{PARITY}every_variant_agrees": 6,
    f"{PARITY}every_rope_type_agrees_in_both_spellings": 8,
    f"{PARITY}a_missing_or_null_key_has_the_meaning_it_has_in_the_reference": 3,
    f"{FAMILIES}checkpoints.py::"
    "test_a_checkpoint_of_the_reference_gives_its_logits_and_is_saved_again_byte_for_byte": 2,
    f"{FAMILIES}checkpoints.py::test_every_layout_is_saved_again_byte_for_byte": 2,
    f"{FAMILIES}configs.py::test_a_case_that_a_registration_skips_would_be_tested_otherwise": 2,
    f"{FAMILIES}configs.py::test_a_value_of_another_type_causes_no_internal_error": 2,
    f"{FAMILIES}mtp.py::test_modules_are_loaded_or_carried_and_saved_byte_for_byte": 2,
    f"{FAMILIES}multimodal.py::test_the_text_part_gives_the_references_logits": 2,
    f"{FAMILIES}generation.py::test_greedy_decoding_gives_the_text_of_the_reference": 2,
    f"{FAMILIES}mtp.py::test_losses_and_all_gradients_follow_the_formula_at_every_level": 2,
    f"{FAMILIES}states.py::test_packed_documents_agree_at_every_level_of_activation_memory": 2,
    f"{FAMILIES}rounding.py::test_norms_round_where_the_reference_rounds": 2,
    f"{FAMILIES}trees.py::test_answers_with_a_shared_prompt_equal_separate_sequences": 2,
    f"{VISION}parity.py::test_a_batch_may_mix_images_of_several_sizes_videos_and_text": 4,
    f"{VISION}parity.py::test_a_prompt_with_images_is_computed_once_for_its_answers": 2,
    f"{VISION}parity.py::test_rows_without_padding_match_the_reference": 2,
    f"{VISION}parity.py::test_packed_documents_equal_separate_documents": 2,
    f"{VISION}checkpoints.py::"
    "test_a_checkpoint_of_the_reference_is_saved_byte_for_byte_and_gives_its_logits": 2,
    f"{VISION}checkpoints.py::test_every_layout_is_saved_byte_for_byte": 4,
    f"{VISION}checkpoints.py::test_the_reference_reads_what_we_write": 2,
    f"{VISION}in_transformers.py::test_files_equal_the_references_and_the_native_models": 2,
    f"{VISION}in_transformers.py::test_generated_tokens_equal_the_references": 2,
    f"{VISION}in_transformers.py::test_modules_have_the_names_of_transformers_own": 4,
    f"{VISION}in_transformers.py::test_trainable_parts_match_the_native_model": 2,
    f"{VISION}memory_plan.py::test_the_plan_equals_the_bytes_that_a_wide_encoder_keeps": 2,
    f"{VISION}parts.py::test_frozen_parts_do_not_train_and_the_rest_trains_as_before": 2,
    f"{VISION}processors.py::test_packed_conversations_equal_separate_ones": 3,
    f"{VISION}variants.py::test_a_variant_matches_its_reference": 2,
    f"{CONTRACT}a_row_may_be_one_element": 2,
    f"{CONTRACT}autocast_changes_no_bit": 2,
    f"{CONTRACT}it_may_run_again_under_checkpointing": 2,
    f"{CONTRACT}second_runs_and_backward_passes_give_the_same_bits_add_up_and_modify_nothing": 2,
    f"{CONTRACT}broadcast_operands_and_gradients_are_read_correctly": 2,
    f"{CONTRACT}it_traces_without_a_graph_break": 3,
    f"{CONTRACT}the_layout_in_memory_changes_nothing": 2,
    f"{UNWRITTEN}no_operation_reads_unwritten_memory": 2,
    f"{UNWRITTEN}no_loss_of_a_linear_layer_reads_unwritten_memory": 2,
    f"{UNWRITTEN}no_loss_reads_unwritten_memory_at_a_vocabulary_that_fills_no_tile": 2,
    f"{EXPERTS}moe_experts.py::test_frozen_operands_cost_no_product": 2,
    "tests/kernels/attention/test_flash_attention.py::test_key_ranges_may_replace_the_causal_mask": 2,
    "tests/kernels/optimizer/test_adamw.py::test_shards_are_rounded_like_the_whole_parameter": 2,
    f"{LAYERS}blocks/test_blocks.py::test_a_layer_reports_the_bytes_it_keeps": 2,
    f"{LAYERS}model/test_distilling.py::test_the_loss_and_its_gradients_match_all_logits": 2,
    f"{LAYERS}recompute/test_input_reuse.py::"
    "test_a_subclass_that_needs_its_output_has_the_same_gradients_at_every_level": 2,
    f"{QUANTISED}formats.py::test_an_export_is_that_of_the_dense_checkpoint": 2,
    f"{QUANTISED}kept.py::test_logits_loss_and_gradients_are_those_of_the_dense_model": 2,
    f"{QUANTISED}writing.py::test_a_model_that_did_not_change_is_written_with_the_bits_that_were_read": 2,
    f"{TRAINING}/text/test_origins.py::test_answers_are_learned_however_the_template_writes_them": 3,
    f"{TRAINING}/text/test_template_limits.py::test_a_template_that_would_fill_memory_is_stopped_in_time": 3,
}


def values_in_turn(item: Any) -> tuple[int, ...] | None:
    """What tells the values that a case has of such parameters from others, which may be unhashable."""
    names = IN_TURN.get(item.nodeid.partition("[")[0])
    return None if names is None else tuple(id(item.callspec.params[name]) for name in names.split())


def out_of_turn(items: Iterable[Any]) -> list[Any]:
    """The cases of these tests that wait for the night."""
    combinations: dict[str, dict[Any, list[Any]]] = {}
    sampled: Counter[str] = Counter()
    left_out = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if values_in_turn(item) is not None:
            others = item.callspec.params.keys() - set(IN_TURN[test].split())
            others = tuple((name, id(item.callspec.params[name])) for name in sorted(others))
            combinations.setdefault(test, {}).setdefault(others, []).append(item)
        elif test in SAMPLED:
            number, sampled[test] = sampled[test], sampled[test] + 1
            # Of as many in succession one, at another place than of those before and in other tests, so that
            # each value of a parameter, and each family in some tests, is among them.
            turn, place = divmod(number, SAMPLED[test])
            if place != (turn + len(test)) % SAMPLED[test]:
                left_out.append(item)
    for test, groups in combinations.items():
        for number, cases in enumerate(groups.values()):
            turn, waits = divmod(number, SAMPLED.get(test, 1))
            chosen = None if waits else cases[turn % len(cases)]
            left_out += [case for case in cases if case is not chosen]
    return left_out
