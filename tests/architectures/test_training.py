"""A native model and its reference agree after the same training steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

# Steps so small that the model stays nearly linear: with ten times as much, some families multiply a rounding
# of the first step by a thousand within ten steps, and the reference does not agree with itself.
STEPS, LEARNING_RATE = 10, 1e-3

# AdamW divides a gradient by its own size, so an entry that is zero except for rounding moves as far as any
# other, in a random direction. An eps above that rounding (entries are 1e-4 to 1e-1, accurate to 1e-5 of the
# norm) disables the division for such entries and keeps it for the rest.
EPS = 3e-4


@pytest.mark.of_layers("tokens")
def test_ten_steps_of_adamw_agree(family, make_pair):
    assert_ten_steps_agree(make_pair(family))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_ten_steps_with_a_tied_or_untied_head_agree(tied, make_pair):
    """One family suffices: all have the same head, whose gradient test_parity.py compares, tied and not."""
    assert_ten_steps_agree(make_pair("llama", {"tie_word_embeddings": tied}))


def assert_ten_steps_agree(pair):
    start = {name: p.detach().clone() for name, p in pair.reference.named_parameters()}
    options = {"lr": LEARNING_RATE, "weight_decay": 0.1, "eps": EPS}
    optimizers = [
        torch.optim.AdamW(pair.ours.parameters(), **options),
        torch.optim.AdamW(pair.reference.parameters(), **options),
    ]
    losses = []
    for _ in range(STEPS):
        batch = pair.batch()
        ours, reference = pair.run_ours(**batch), pair.run_reference(**batch)
        losses.append((ours.loss.item(), reference.loss.item()))
        for optimizer in optimizers:
            optimizer.step()

    # In one step an entry moves by g / (g + eps), so an error e of the gradient appears as e / (g + eps).
    # Gradients are accurate to 1e-5 of their norm and small entries are about eps: a relative error of about
    # 1e-4 in a step, and at most ten times that after all steps. A wrong update gives an error of order one.
    own = dict(pair.ours.named_parameters())
    moved = {name: p.detach() for name, p in pair.reference.named_parameters()}
    for name in own:
        for source, value in pair.weight_map[name].write(own[name].detach()).items():
            way = (moved[source] - start[source]).norm()
            assert (way > 0) == own[name].requires_grad, source
            assert (value - moved[source]).norm() <= 1e-3 * way, source
    # All steps together change a loss by at most about 0.1; 1e-3 of that is 1e-4.
    for found, expected in losses:
        assert found == pytest.approx(expected, abs=1e-4)


def test_tied_weights_train_as_one(make_pair):
    pair = make_pair("llama", {"tie_word_embeddings": True})
    batch = pair.batch()
    optimizer = torch.optim.AdamW(pair.ours.parameters(), lr=LEARNING_RATE)
    pair.ours(**batch).loss.backward()
    optimizer.step()
    model = pair.ours
    assert model.lm_head.weight is model.embed_tokens.weight
    assert sum(p is model.embed_tokens.weight for p in model.parameters()) == 1
    assert "lm_head.weight" not in model.state_dict()


def test_gradient_accumulation_by_item_count_is_exact(make_pair):
    """Two halves with unequal label counts, each divided by the count of both, add up to the whole batch."""
    pair = make_pair("llama")
    batch = pair.batch(rows=4)
    batch["labels"][0, 2:] = -100
    whole = pair.run_ours(**batch)
    items = (batch["labels"][:, 1:] != -100).sum()
    pair.ours.zero_grad()
    losses = [
        pair.ours(ids, labels=labels, num_items_in_batch=items)
        for ids, labels in zip(batch["input_ids"].split(2), batch["labels"].split(2), strict=True)
    ]
    for output in losses:
        output.loss.backward()
    parts = {name: p.grad for name, p in pair.ours.named_parameters()}
    assert sum(output.loss.item() for output in losses) == pytest.approx(whole.loss.item(), rel=1e-6)
    for name, expression in pair.weight_map.items():
        for source, gradient in expression.write(parts[name]).items():
            # float32 sums of the same terms in another order
            torch.testing.assert_close(gradient, whole.gradients[source], rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_over_labels(make_pair):
    pair = make_pair("llama")
    batch = pair.batch()
    output = pair.ours(**batch, return_logits=True)
    by_hand = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, by_hand, rtol=1e-6, atol=0)
