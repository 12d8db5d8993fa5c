"""torch.compile takes a whole model without a break, and changes no result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pairs import LENGTH, randomise, relative_distance, spec_of

from liger_models.layers.model import CausalLM


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small_model(family: str) -> CausalLM:
    """One layer of each kind that the family has."""
    spec = spec_of(family)
    model = CausalLM(replace(spec, blocks=tuple(dict.fromkeys(spec.blocks))))
    randomise(model, torch.Generator().manual_seed(1))
    return model


def results(model: CausalLM, run) -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % model.spec.vocab_size
    model.zero_grad()
    output = run(ids, labels=ids, return_logits=True)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": output.loss, "logits": output.logits, **gradients}


def compiled_distances(family: str, backend: str) -> dict[str, float]:
    model = small_model(family)
    expected = results(model, model)
    found = results(model, torch.compile(model, fullgraph=True, backend=backend))
    return {name: relative_distance(found[name], expected[name]) for name in expected}


@pytest.mark.slow
def test_a_model_is_captured_whole_with_its_backward_pass(family, failures):
    """Through everything but code generation, which takes a minute a model."""
    assert not failures(compiled_distances(family, "aot_eager"))


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_results(failures):
    assert not failures(compiled_distances("mistral", "inductor"))


@pytest.mark.slow
def test_a_captured_model_gives_the_same_logits(failures):
    model = small_model("llama")
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    with torch.no_grad():
        expected = model(ids).logits
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(ids).logits
    assert not failures({"logits": relative_distance(found, expected)})
