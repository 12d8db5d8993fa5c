"""A batch of prompts with several answers each equals separate sequences in scores, losses and gradients."""

from __future__ import annotations

import pytest
import torch
from randomised import randomise

import liger_models
from liger_models.architectures import find_architecture
from liger_models.losses import (
    dpo_loss,
    group_advantages,
    reference_log_probs,
    sequence_log_probs,
    shared_prompts,
)

ITEMS = [([5, 9, 2], [[7, 8, 1, 3], [4, 1]]), ([6], [[3, 1], [2, 2, 1]]), ([8, 8, 3, 4], [[9, 1], [7, 1]])]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return randomise(liger_models.from_config(find_architecture("mistral").tiny))  # windows of 5


def padded(items, by_rank):
    """Return the sequences as padded rows for `score`."""
    apart = [(prompt, answer) for prompt, answers in items for answer in answers]
    if by_rank:
        ranks = len(items[0][1])
        apart = [pair for rank in range(ranks) for pair in apart[rank::ranks]]
    longest = max(len(prompt) + len(answer) for prompt, answer in apart)
    batch = {
        name: torch.zeros(len(apart), longest, dtype=torch.long) for name in ("input_ids", "attention_mask")
    }
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    for row, (prompt, answer) in enumerate(apart):
        length = len(prompt) + len(answer)
        batch["input_ids"][row, :length] = torch.tensor(prompt + answer)
        batch["labels"][row, len(prompt) : length] = torch.tensor(answer)
        batch["attention_mask"][row, :length] = 1
    return batch


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_near(found, expected):
    for name, value in expected.items():  # float32, through about a hundred roundings
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


def test_a_batch_has_the_documented_contents():
    batch = shared_prompts(ITEMS[:2])
    assert batch["input_ids"].tolist() == [[5, 9, 2, 7, 8, 1, 3, 2, 4, 1, 6, 3, 1, 6, 2, 2, 1]]
    assert batch["labels"][0, :8].tolist() == [-100, -100, -100, 7, 8, 1, 3, -100]
    assert batch["cu_seqlens"].tolist() == [0, 2, 7, 10, 10, 13, 17]
    assert batch["parents"].tolist() == [-1, 0, 0, -1, 3, 3]
    assert batch.counted.sum(1).tolist() == [4, 2, 2, 3]
    assert shared_prompts(ITEMS[:2], by_rank=True).counted.sum(1).tolist() == [4, 2, 2, 3]
    assert shared_prompts(ITEMS, by_rank=True).counted.sum(1).tolist() == [4, 2, 2, 2, 3, 2]
    places = torch.arange(16.0)[None]
    assert batch.rows(places).tolist() == [[2, 3, 4, 5], [7, 8, 0, 0], [10, 11, 0, 0], [13, 14, 15, 0]]
    assert torch.equal(batch.rows(torch.arange(17.0)[None]), batch.rows(places))
    again = batch.to("cpu")
    assert all(torch.equal(again[name], value) for name, value in batch.items())


def test_ids_may_be_tensors():
    tensors = [(torch.tensor(prompt), [torch.tensor(a) for a in answers]) for prompt, answers in ITEMS]
    found, expected = shared_prompts(tensors), shared_prompts(ITEMS)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_dpo_equals_dpo_on_separate_rows(model):
    batch, apart = shared_prompts(ITEMS, by_rank=True), padded(ITEMS, by_rank=True)
    reference = torch.randn(6, generator=torch.Generator().manual_seed(1)).chunk(2)

    def loss(rows):
        return dpo_loss(*sequence_log_probs(rows).chunk(2), *reference, beta=0.3).loss

    found = loss(batch.rows(model.score(**batch).log_probs))
    found_gradients = gradients(model, found)
    expected = loss(model.score(**apart).log_probs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert_near(found_gradients, gradients(model, expected))


def test_a_policy_gradient_with_known_coefficients_equals_the_one_on_rows(model):
    batch, apart = shared_prompts(ITEMS), padded(ITEMS, by_rank=False)
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.3, 0.9, 0.0, 2.0]), group_size=2)
    rows = advantages[:, None] * batch.counted / batch.counted.sum()
    scores = model.score(**batch, coefficients=batch.coefficients(rows), entropy=True)
    found = gradients(model, -scores.weighted_sum)
    counted = apart["labels"][:, 1:] != -100
    coefficients = advantages[:, None] * counted / counted.sum()
    expected = model.score(**apart, coefficients=coefficients, entropy=True)
    torch.testing.assert_close(scores.weighted_sum, expected.weighted_sum, rtol=1e-5, atol=1e-6)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(
            batch.rows(scores[name])[batch.counted], expected[name][counted], rtol=1e-5, atol=1e-5
        )
    assert_near(found, gradients(model, -expected.weighted_sum))


def test_the_loss_of_labels_equals_the_one_on_separate_rows(model):
    batch, apart = shared_prompts(ITEMS), padded(ITEMS, by_rank=False)
    found, expected = model(**batch).loss, model(**apart).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert_near(gradients(model, found), gradients(model, expected))


def test_reference_scores_of_answers_are_cached(model, tmp_path):
    batch, apart = shared_prompts(ITEMS, by_rank=True), padded(ITEMS, by_rank=True)
    expected = reference_log_probs(model, [apart])[0]
    cache = tmp_path / "reference.safetensors"
    for _ in range(2):
        (found,) = reference_log_probs(model, [batch], cache=cache)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "expected prompts of at least one token"),
        ([([], [[1]])], "expected prompts of at least one token"),
        ([([1], [])], "each with at least one answer"),
        ([(torch.ones(1, 3), [[1]])], r"found tokens \[1, 3\]"),
        ([([1], [[1], [2]]), ([1], [[1]])], "from 1 to 2 answers"),
    ],
)
def test_invalid_batches_are_refused(items, message):
    with pytest.raises(ValueError, match=message):
        shared_prompts(items, by_rank=True)


def test_scores_and_rows_of_another_batch_are_refused():
    batch = shared_prompts(ITEMS)
    with pytest.raises(ValueError, match=r"found scores \[1, 5\]"):
        batch.rows(torch.zeros(1, 5))
    with pytest.raises(ValueError, match=r"found rows \[2, 4\]"):
        batch.coefficients(torch.zeros(2, 4))
