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
    "tests/liger_models/quantised/test_formats.py::"
    "test_a_weight_is_the_float32_product_rounded_once": "dtype",
    f"{PARITY}a_fresh_padding_row_is_zero_if_it_is_in_the_reference": "tied",
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
    "tests/architectures/test_published.py::test_a_published_config_has_the_published_parameters": 3,
    "tests/liger_models/training/test_published_templates.py::"
    "test_renderings_match_transformers_and_can_be_trained_on": 2,
    f"{PARITY}every_variant_agrees": 2,
    f"{PARITY}every_rope_type_agrees_in_both_spellings": 3,
    f"{PARITY}a_missing_or_null_key_has_the_meaning_it_has_in_the_reference": 2,
    f"{VISION}parity.py::test_a_batch_may_mix_images_of_several_sizes_videos_and_text": 2,
    f"{VISION}checkpoints.py::test_every_layout_is_saved_byte_for_byte": 2,
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
        if test in SAMPLED:
            if sampled[test] % SAMPLED[test]:
                left_out.append(item)
            sampled[test] += 1
        if values_in_turn(item) is not None:
            others = item.callspec.params.keys() - set(IN_TURN[test].split())
            others = tuple((name, id(item.callspec.params[name])) for name in sorted(others))
            combinations.setdefault(test, {}).setdefault(others, []).append(item)
    for groups in combinations.values():
        for turn, cases in enumerate(groups.values()):
            chosen = cases[turn % len(cases)]
            left_out += [case for case in cases if case is not chosen]
    return left_out
