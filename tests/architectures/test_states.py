"""Recurrent layers reset their state at every document: packed and separate documents agree for all lengths
and all levels of activation memory. The reference runs each document by itself; its own packing leaks state.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from pairs import spec_of

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.layers.specs import ConvolvedAttentionSpec
from liger_models.models.matching import exact_dtypes

of_layers = pytest.mark.of_layers("tokens")
RECURRENT = [family for family in list_architectures() if spec_of(family).is_recurrent]
CONVOLVED = [
    family
    for family in RECURRENT
    if any(hasattr(m, "conv") for b in spec_of(family).blocks for m in b.mixers)
]
BRANCHED = [
    family
    for family in RECURRENT
    if not any(b.ngrams or isinstance(b.mixer, ConvolvedAttentionSpec) for b in spec_of(family).blocks)
]

# Documents shorter than the convolution, of one token, longer than a chunk of 64, and empty.
LENGTHS = [1, 70, 2, 0, 1, 9, *[1, 2, 3, 1, 12] * 2]


def packed(pair, lengths):
    batch = pair.batch(rows=1, length=sum(lengths))
    return {**batch, "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)])}


@of_layers
@pytest.mark.parametrize("family", RECURRENT)
def test_packed_documents_equal_separate_ones_of_the_reference(family, shared_pair, failures):
    pair = shared_pair(family)
    call = pair.clear(lambda: packed(pair, LENGTHS))
    ours = pair.run_ours(**call)
    reference = pair.run_reference_by_document(call["input_ids"], call["labels"], LENGTHS)
    assert not failures(ours.distances(reference))


@of_layers
@pytest.mark.parametrize("family", RECURRENT)
def test_documents_by_position_ids_and_in_several_rows_give_the_same_bits(family, shared_pair):
    pair, lengths = shared_pair(family), [9, 1, 3, 13]
    call = pair.clear(lambda: packed(pair, lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    given = {key: call[key] for key in ("input_ids", "labels")}
    rows = {key: x.view(2, -1) for key, x in given.items()} | {"position_ids": positions.view(2, -1)}
    expected = pair.run_ours(**call)
    for other in ({**given, "position_ids": positions}, rows):
        found = pair.run_ours(**other)
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(found.logits.view(expected.logits.shape), expected.logits)
        for key, gradient in expected.gradients.items():
            assert torch.equal(found.gradients[key], gradient), key


@of_layers
@pytest.mark.parametrize("family", RECURRENT)
def test_packed_documents_agree_at_every_level_of_activation_memory(family, shared_pair, failures):
    pair = shared_pair(family)
    call = pair.clear(lambda: packed(pair, [1, 9, 5]))
    expected = pair.run_ours(**call)
    try:
        for level in ("all", "mlp", "checkpoint", "tiled", "offload"):
            pair.ours.set_activation_memory(level)
            assert not failures(pair.run_ours(**call).distances(expected)), level
    finally:
        pair.ours.set_activation_memory("lean")


@of_layers
@pytest.mark.parametrize("family", RECURRENT)
def test_a_change_in_one_document_changes_nothing_in_the_next(family, shared_pair):
    pair = shared_pair(family)
    call = packed(pair, [20, 15])
    other = {**call, "input_ids": call["input_ids"].clone()}
    other["input_ids"][0, :20] = (call["input_ids"][0, :20] + 1) % pair.vocab_size
    with torch.no_grad():
        first, second = (pair.ours(**one, return_logits=True).logits for one in (call, other))
    apart = (first - second)[0, 20:].norm()  # the matrix products of experts have other numbers of rows
    assert apart <= 1e-6 * first[0, 20:].norm()
    assert not torch.isclose(first[0, :20], second[0, :20]).all()


@of_layers
@pytest.mark.parametrize("family", BRANCHED)
def test_branches_of_a_prompt_equal_separate_sequences(family, shared_pair):
    """Branches start after none, some or all of the prompt's tokens."""
    pair = shared_pair(family)
    document, branches = 12, [(12, 4), (7, 5), (2, 3), (0, 6)]
    lengths = [document, *(length for _, length in branches)]
    parents = torch.tensor([[-1] + [0] * len(branches), [0] + [before for before, _ in branches]])
    call = packed(pair, lengths)
    pieces = call["input_ids"][0].split(lengths)
    with torch.no_grad():
        found = pair.ours(call["input_ids"], cu_seqlens=call["cu_seqlens"], parents=parents).logits[0]
        for i, (before, _) in enumerate(branches, 1):
            row = torch.cat([pieces[0][:before], pieces[i]])
            alone = pair.ours(row[None]).logits[0, before:]
            # float32 through three layers, with sums in other orders
            assert (found.split(lengths)[i] - alone).norm() <= 1e-5 * alone.norm()


@of_layers
@pytest.mark.parametrize("family", CONVOLVED)
def test_a_convolution_in_float32_does_not_double_the_model(family):
    """The same holds for A_log. (The correction bias of a router is always float32, hashes are integers.)"""
    model = liger_models.from_config(find_architecture(family).tiny, device="meta")
    wide = ("conv1d.weight", "_sconv.weight", "conv_1d.weight", ".conv.conv.weight", ".A_log")
    stored = {
        ref.name: torch.float32 if ref.name.endswith(wide) else torch.bfloat16
        for expr in model.weight_map().values()
        for ref in expr.refs()
    }
    found = {
        native: dtype
        for native, dtype in exact_dtypes(model, stored).items()
        if not native.endswith(".correction_bias") and dtype.is_floating_point
    }
    assert {native for native, dtype in found.items() if dtype == torch.float32} == {
        native for native in found if native.endswith(wide)
    }
    assert set(found.values()) == {torch.float32, torch.bfloat16}
