"""Logits, loss and every gradient are those of transformers, for every registered family and its variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_models.architectures import find_architecture, list_architectures

# A key that is None is left out of the config. A variant concerns the families whose tiny config has its
# keys.
COMMON: dict[str, dict[str, Any]] = {
    "as_is": {},
    "one_kv_head": {"num_key_value_heads": 1},
    "kv_heads_as_many_as_heads": {"num_key_value_heads": 4},
    "head_dim_apart": {"head_dim": 24},
    "head_dim_by_division": {"head_dim": None},
    "even_vocabulary": {"vocab_size": 128},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
}

OF_FAMILY: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "attention_bias_only": {"mlp_bias": False},
        "mlp_bias_only": {"attention_bias": False},
        "no_bias": {"attention_bias": False, "mlp_bias": False},
    },
    "mistral": {
        "window_of_one": {"sliding_window": 1},
        "window_as_long_as_the_sequence": {"sliding_window": 19},
        "no_window": {"sliding_window": None},
    },
}

LENGTH = 19
FACTORS = {
    "short_factor": [1.0 + 0.03 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, **FACTORS}

# rope settings, and max_position_embeddings
ROPES: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({"rope_type": "default"}, 64),
    "linear": ({"rope_type": "linear", "factor": 3.0}, 64),
    "dynamic_within": ({"rope_type": "dynamic", "factor": 3.0}, 64),
    "dynamic_beyond": ({"rope_type": "dynamic", "factor": 3.0}, 8),
    "yarn": (YARN, 64),
    "yarn_attention_factor": ({**YARN, "attention_factor": 1.7}, 64),
    "yarn_mscale": ({**YARN, "mscale": 0.9, "mscale_all_dim": 0.5}, 64),
    "yarn_fractional": ({**YARN, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5}, 64),
    "longrope_short": ({**LONGROPE, "original_max_position_embeddings": 32}, 128),
    "longrope_long": ({**LONGROPE, "original_max_position_embeddings": 16}, 64),
    "longrope_attention_factor": (
        {**LONGROPE, "original_max_position_embeddings": 16, "attention_factor": 1.3},
        64,
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        128,
    ),
}


def variants() -> list[Any]:
    chosen = []
    for family in list_architectures():
        tiny = find_architecture(family).tiny
        table = {**COMMON, **OF_FAMILY.get(family, {})}
        chosen += [
            pytest.param(family, changes, id=f"{family}-{name}")
            for name, changes in table.items()
            if changes.keys() <= tiny.keys()
        ]
    return chosen


def rotating_families() -> list[str]:
    return [family for family in list_architectures() if "rope_parameters" in find_architecture(family).tiny]


@pytest.mark.parametrize(("family", "changes"), variants())
def test_every_variant_agrees(family, changes, make_pair, failures):
    pair = make_pair(family, changes)
    assert not failures(pair.distances(**pair.batch(length=LENGTH)))


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", rotating_families())
def test_every_rope_type_agrees_in_both_spellings(family, rope, spelling, make_pair, failures):
    settings, longest = ROPES[rope]
    changes: dict[str, Any] = {"max_position_embeddings": longest}
    if spelling == "rope_parameters":
        changes["rope_parameters"] = {"rope_theta": 500.0, **settings}
    else:
        changes |= {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": settings}
    pair = make_pair(family, changes)
    assert not failures(pair.distances(**pair.batch(length=LENGTH)))


@pytest.fixture(params=list_architectures())
def pair(request, make_pair):
    return make_pair(request.param)


def test_logits_without_labels_agree_and_carry_gradients(pair, failures):
    ids = pair.batch()["input_ids"]
    cotangent = torch.randn(*ids.shape, pair.vocab_size)
    assert not failures(pair.distances(input_ids=ids, cotangent=cotangent))


def test_one_token_alone_agrees(pair, failures):
    ids = pair.batch(rows=3, length=1)["input_ids"]
    call = {"input_ids": ids, "cotangent": torch.randn(3, 1, pair.vocab_size)}
    ours, reference = pair.run_ours(**call), pair.run_reference(**call)
    for name, gradient in reference.gradients.items():
        if not gradient.count_nonzero():  # queries and keys: the softmax of one score is 1 whatever they are
            assert ours.gradients.pop(name).norm() < 1e-5 * call["cotangent"].norm()
    reference.gradients = {name: reference.gradients[name] for name in ours.gradients}
    assert not failures(ours.distances(reference))


@pytest.mark.parametrize("keep", [3, torch.tensor([0, 5, 17])], ids=["last_three", "by_index"])
def test_logits_to_keep_selects_the_same_positions(keep, pair, failures):
    ids = pair.batch()["input_ids"]
    cotangent = torch.randn(2, 3, pair.vocab_size)
    assert not failures(pair.distances(input_ids=ids, logits_to_keep=keep, cotangent=cotangent))


@pytest.mark.parametrize("count", [53, torch.tensor(53)], ids=["int", "tensor"])
def test_num_items_in_batch_divides_the_loss(count, pair, failures):
    assert not failures(pair.distances(**pair.batch(), num_items_in_batch=count))


def test_shifted_labels_agree(pair, failures):
    batch = pair.batch()
    shifted = torch.randint(0, pair.vocab_size, batch["labels"].shape)
    shifted[:, 4] = -100
    ours = pair.run_ours(input_ids=batch["input_ids"], shift_labels=shifted)
    reference = pair.run_reference(**batch, shift_labels=shifted)  # which wants labels too, and ignores them
    assert not failures(ours.distances(reference))


def test_embeddings_in_place_of_ids_agree(pair, failures):
    labels = pair.batch()["labels"]
    embeds = torch.randn(2, 19, pair.config["hidden_size"], requires_grad=True)
    distances = pair.distances(inputs_embeds=embeds, labels=labels)
    assert "inputs_embeds" in distances
    assert not failures(distances)


def test_given_position_ids_agree(pair, failures):
    positions = torch.arange(19) + torch.tensor([[5], [31]])
    assert not failures(pair.distances(**pair.batch(), position_ids=positions))


def test_position_ids_may_jump_where_a_mask_is_given(pair, failures):
    positions = (2 * torch.arange(19))[None].expand(2, 19)
    ones = torch.ones(2, 19, dtype=torch.long)
    assert not failures(pair.distances(**pair.batch(), position_ids=positions, attention_mask=ones))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_the_tokens(side, pair, failures):
    batch = pair.batch(rows=3)
    mask = torch.ones(3, 19, dtype=torch.bool)
    for row, padding in enumerate((0, 6, 11)):
        where = slice(0, padding) if side == "left" else slice(19 - padding, 19)
        mask[row, where] = False
        # The reference lets a padding token predict the first token after it. Ours does not, so that label
        # is taken out of the comparison.
        batch["labels"][row, padding if side == "left" else 0] = -100
    batch["labels"][~mask] = -100
    call = {**batch, "attention_mask": mask.long()}
    ours, reference = pair.run_ours(**call), pair.run_reference(**call)
    assert not failures(ours.distances(reference, positions=mask))
    assert ours.logits[~mask].count_nonzero() == 0


def test_a_padding_token_predicts_nothing(pair):
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[:, :4] = 0
    batch = pair.batch()
    unlabelled = batch["labels"].clone()
    unlabelled[:, 4] = -100
    batch["labels"][:, 4] = batch["input_ids"][:, 4]
    with_label = pair.ours(**batch, attention_mask=mask).loss
    without = pair.ours(batch["input_ids"], unlabelled, attention_mask=mask).loss
    assert with_label == without


@pytest.mark.parametrize("form", ["cu_seqlens", "position_ids"])
def test_packed_documents_agree_with_documents_run_alone(form, pair, failures):
    lengths = [7, 1, 11, 12, 7]  # two rows of 19; a document never spans two rows in the reference's form
    ids = torch.randint(0, pair.vocab_size, (2, 19))
    labels = ids.clone()
    labels[0, 2] = -100
    if form == "cu_seqlens":
        packing = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    else:
        positions = torch.cat([torch.arange(length) for length in lengths])
        packing = {"position_ids": positions.view(2, 19)}
    ours = pair.run_ours(input_ids=ids, labels=labels, **packing)
    assert not failures(ours.distances(pair.run_reference_by_document(ids, labels, lengths)))


def test_documents_may_span_rows_and_be_empty(pair, failures):
    lengths = [0, 25, 0, 13, 0]
    batch = pair.batch()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    ours = pair.run_ours(**batch, cu_seqlens=cu_seqlens)
    assert not failures(ours.distances(pair.run_reference_by_document(**batch, lengths=lengths)))
