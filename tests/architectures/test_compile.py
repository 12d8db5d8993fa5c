"""torch.compile takes a whole model without a break, and changes no result."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_distances(pair, backend):
    batch = pair.batch()
    expected = pair.run_ours(**batch)
    expected.logits = None
    pair.ours.zero_grad()
    loss = torch.compile(pair.ours, fullgraph=True, backend=backend)(**batch).loss
    loss.backward()
    return type(expected)(loss, None, pair.gradients_of_ours()).distances(expected)


@pytest.mark.slow
def test_a_model_is_captured_whole_with_its_backward_pass(family, make_pair, failures):
    """Through everything but code generation, which takes a minute a model."""
    assert not failures(compiled_distances(make_pair(family, {"num_hidden_layers": 1}), "aot_eager"))


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_loss_and_gradients(make_pair, failures):
    assert not failures(compiled_distances(make_pair("mistral", {"num_hidden_layers": 1}), "inductor"))


@pytest.mark.slow
def test_a_captured_model_gives_the_same_logits(family, make_pair):
    pair = make_pair(family, {"num_hidden_layers": 1})
    ids = pair.batch()["input_ids"]
    with torch.no_grad():
        expected = pair.ours(ids).logits
        found = torch.compile(pair.ours, fullgraph=True, backend="aot_eager")(ids).logits
    assert (found - expected).norm() <= 1e-5 * expected.norm()
