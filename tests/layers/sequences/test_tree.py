"""Documents that continue others: their description, the backends that compute them, and refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from liger_models.convert.errors import DataError
from liger_models.layers.attention import backends
from liger_models.layers.attention.backends import BACKENDS, attend
from liger_models.layers.recompute import tiles
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.tree import check_tree
from liger_models.layers.specs import AttentionSpec, BlockSpec

CPU = torch.device("cpu")
LENGTHS, PARENTS = (7, 4, 0, 5, 2, 6, 3), (-1, 0, 0, 0, -1, 4, 4)
BOUNDS = torch.tensor([0, *itertools.accumulate(LENGTHS)])
TOKENS = int(BOUNDS[-1])
TREE = {"cu_seqlens": BOUNDS, "parents": torch.tensor(PARENTS)}


@pytest.fixture
def batch():
    ids = torch.randint(0, 61, (1, TOKENS), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids, **TREE}


def results(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def test_positions_continue_in_each_document_that_continues_another():
    sequences = Sequences.from_call((1, TOKENS), CPU, **TREE)
    positions = [p.tolist() for p in sequences.positions.ids.split(LENGTHS)]
    prompt = list(range(7))
    assert positions == [prompt, [7, 8, 9, 10], [], [7, 8, 9, 10, 11], [0, 1], [2, 3, 4, 5, 6, 7], [2, 3, 4]]
    assert (sequences.positions.end, sequences.documents.max_seqlen) == (12, 12)
    labels = sequences.documents.next_labels(torch.arange(TOKENS))
    ends = BOUNDS[1:] - 1
    assert (labels[ends] == -100).all()
    assert (labels == -100).sum() == len(ends.unique())


@pytest.mark.parametrize("limits", [{}, {"window": 5}, {"chunk": 4}, {"softcap": 2.0}], ids=str)
def test_every_backend_matches_the_plain_twin_or_refuses(limits):
    spec = AttentionSpec(4, 2, 8, 8**-0.5, None, **limits)
    sequences = Sequences.from_call((1, TOKENS), CPU, **TREE)
    q, k, v = torch.randn(TOKENS, 4, 8), torch.randn(TOKENS, 2, 8), torch.randn(TOKENS, 2, 8)
    expected = attend(q, k, v, spec, sequences, "eager")
    for backend in BACKENDS:
        if backend in ("auto", "triton") or (backend == "masked" and "softcap" not in limits):
            torch.testing.assert_close(attend(q, k, v, spec, sequences, backend), expected)
        elif backend != "eager":
            with pytest.raises(ValueError, match=r"documents that continue others|neither soft cap"):
                attend(q, k, v, spec, sequences, backend)


def test_it_is_computed_once_for_equal_layers():
    tree = Sequences.from_call((1, TOKENS), CPU, **TREE).documents.tree
    assert tree is not None
    assert tree.key_ranges(None, None) is tree.key_ranges(12, 99)  # these limit nothing
    assert tree.key_ranges(5, None) is not tree.key_ranges(None, None)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_of_activation_memory_gives_the_same(level, make_model, batch, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 8)
    monkeypatch.setattr(backends, "LONG", 8)
    expected = results(make_model(window=5), batch)
    found = results(make_model(window=5, activation_memory=level), batch)
    for name, value in expected.items():
        # Tiles sum the gradients of weights in another order.
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_document_may_continue_only_the_first_tokens_of_another(make_model, batch):
    parts = torch.tensor([PARENTS, (0, 7, 7, 3, 0, 1, 0)])
    sequences = Sequences.from_call((1, TOKENS), CPU, cu_seqlens=BOUNDS, parents=parts)
    first = sequences.positions.ids[BOUNDS[:-1].clamp(max=TOKENS - 1)]
    assert first[[0, 1, 3, 4, 5, 6]].tolist() == [0, 7, 3, 0, 1, 0]
    assert (sequences.positions.end, sequences.documents.max_seqlen) == (11, 11)
    model, ids = make_model(window=5).eval(), batch["input_ids"]
    found = model(ids, cu_seqlens=BOUNDS, parents=parts).logits[0]
    for number, (parent, shared) in enumerate(parts.T.tolist()):
        own = slice(int(BOUNDS[number]), int(BOUNDS[number + 1]))
        before = ids[0, BOUNDS[parent] : BOUNDS[parent] + shared]
        if own.start < own.stop:
            alone = model(torch.cat([before, ids[0, own]])[None]).logits[0, shared:]
            torch.testing.assert_close(found[own], alone, rtol=1e-5, atol=1e-6)


def test_the_loss_equals_that_of_separate_sequences(make_model, batch):
    """Each answer after its prompt, whose own labels count once: with the first answer."""
    model, ids = make_model(window=5), batch["input_ids"][0]
    found = results(model, batch)
    parts, documents, labels, seen = ids.split(LENGTHS), [], [], set()
    for number, parent in enumerate(PARENTS):
        if parent < 0 or not LENGTHS[number]:
            continue
        documents.append(torch.cat([parts[parent], parts[number]]))
        own = documents[-1].clone()
        if parent in seen:
            own[: LENGTHS[parent]] = -100
        own[LENGTHS[parent]] = -100  # no token predicts the first token of another document
        seen.add(parent)
        labels.append(own)
    bounds = torch.tensor([0, *itertools.accumulate(map(len, documents))])
    expected = results(
        model,
        {"input_ids": torch.cat(documents)[None], "labels": torch.cat(labels)[None], "cu_seqlens": bounds},
    )
    for name, value in expected.items():  # about a hundred float32 roundings
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


def test_a_teacher_gets_the_same_tree(make_model, batch):
    student, teacher = make_model(), make_model(layers=2)
    output = student.distill(teacher, **batch, beta=0.5)
    logits = [model(**{**batch, "labels": None}).logits[0].log_softmax(-1) for model in (student, teacher)]
    documents = Sequences.from_call((1, TOKENS), CPU, **TREE).documents
    predicting = documents.next_labels(batch["labels"][0]) != -100
    p, q = (x[predicting].exp() for x in logits)
    middle = (p + q) / 2
    expected = ((p * (p / middle).log() + q * (q / middle).log()) / 2).sum(-1).mean()
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parents": [-1]}, "pass both"),
        ({"cu_seqlens": [0, 3, 6], "parents": [-1]}, "has 1 entries, and cu_seqlens bounds 2"),
        ({"cu_seqlens": [0, 3, 6], "parents": [1, -1]}, "document 0 continues document 1; expected -1"),
        ({"cu_seqlens": [0, 3, 6], "parents": [-1, 1]}, "expected -1, it continues none, or 0"),
        ({"cu_seqlens": [0, 2, 4, 6], "parents": [-1, 0, 1]}, "none continues them"),
        ({"cu_seqlens": [0, 2, 4, 6], "parents": [-1, -1, 0]}, "follow it directly"),
        ({"cu_seqlens": [0, 2, 6], "parents": [[-1, 0], [0, 3]]}, "document 1 continues 3 tokens.* 0 to 2"),
        ({"cu_seqlens": [0, 2, 4, 6], "parents": [[-1, 0, 0], [0, 1, 2]]}, "document 2 continues 2.* 0 to 1"),
        ({"cu_seqlens": [0, 2, 6], "parents": [[-1, -1], [0, 1]]}, "document 1 continues 1 tokens.* 0 to 0"),
    ],
)
def test_invalid_trees_are_refused(given, message):
    given = {name: torch.tensor(value) for name, value in given.items()}
    with pytest.raises(DataError, match=message):
        Sequences.from_call((1, 6), CPU, **given)


def test_models_that_cannot_share_a_prompt_raise_an_error(make_model):
    model = make_model(1)
    whole = replace(model.spec, vision=SimpleNamespace(spans="prefix"))
    with pytest.raises(DataError, match="all tokens of a prompt attend to one another"):
        check_tree(whole, SimpleNamespace(pictures=object(), kinds=None))
    check_tree(whole, SimpleNamespace(pictures=None, kinds=None))
    recurrent = SimpleNamespace(blocks=(replace(model.spec.blocks[0], mixer=object()),))
    assert isinstance(recurrent.blocks[0], BlockSpec)
    with pytest.raises(DataError, match="layer 0 mixes tokens by object, which does not support"):
        check_tree(recurrent, None)
    sequences = Sequences.from_call((1, TOKENS), CPU, **TREE)
    with pytest.raises(DataError, match="cannot be divided over ranks"):
        sequences.divided(object())
    with pytest.raises(ValueError, match="cannot be cut"):
        sequences.visibility.chunks(3)
    ahead = AttentionSpec(4, 2, 8, 1.0, None, causal=False)
    q = torch.randn(TOKENS, 4, 8)
    with pytest.raises(ValueError, match="attention is causal"):
        attend(q, q[:, :2], q[:, :2], ahead, sequences)
