"""A compiled model is the model: the same bits, the same errors, the same memory kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pairs import LENGTH, randomise, relative_distance, spec_of
from torch._dynamo.exc import Unsupported

from liger_models.convert.errors import DataError
from liger_models.layers.model.causal_lm import CausalLM


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


@pytest.fixture
def ids():
    return torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 61


def results(model: CausalLM, run, ids, **call) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)  # for randomly drawn experts
    output = run(ids, labels=ids, return_logits=True, **call)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": output.loss, "logits": output.logits, **gradients}


PACKED = torch.arange(LENGTH) % 8
MASK = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 4]])).long()


@pytest.mark.of_layers
def test_a_compiled_model_has_the_same_bits(family, ids):
    assert_same_bits_compiled(small_model(family), ids)


@pytest.mark.parametrize(
    "call",
    [{"position_ids": PACKED[None]}, {"attention_mask": MASK}],
    ids=["packed_by_positions", "padded"],
)
@pytest.mark.parametrize("mixer", ["llama", "gemma3_text", "deepseek_v3", "llama4_text", "gemma4_text"])
def test_packed_and_padded_rows_compiled_have_the_same_bits(mixer, call, ids):
    """One family per kind of token mixer: only mixers read document boundaries."""
    assert_same_bits_compiled(small_model(mixer), ids, **call)


def assert_same_bits_compiled(model, ids, **call):
    expected = results(model, model, ids, **call)
    found = results(model, torch.compile(model), ids, **call)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_model_within_a_compiled_step_has_the_same_bits(ids):
    model = small_model("llama")
    expected = 2 * model(ids, labels=ids).loss

    @torch.compile(backend="aot_eager")
    def step(ids):
        return 2 * model(ids + 0, labels=ids).loss

    assert torch.equal(step(ids), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"input_ids": torch.tensor([[1, 10**6]])}, "outside the vocabulary"),
        ({"labels": torch.full((2, LENGTH), -100)}, "no token of the batch has a label"),
        ({"position_ids": torch.arange(LENGTH) + 10**6}, "beyond the rotary tables"),
    ],
)
def test_a_compiled_model_raises_the_same_errors(call, message, ids):
    with pytest.raises(DataError, match=message):
        torch.compile(small_model("llama"))(**{"input_ids": ids, **call})


def test_a_compiled_model_keeps_no_more_for_the_backward_pass(ids):
    model, kept = small_model("llama"), []
    for run in (model, torch.compile(model)):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, shapes=shapes: (shapes.append(x.shape), x)[1], lambda x: x
        ):
            run(ids, labels=ids)
        kept.append(shapes)
    assert kept[0] == kept[1]


def test_fullgraph_says_that_models_run_uncompiled(ids):
    with pytest.raises(Unsupported, match="Compile without fullgraph=True"):
        torch.compile(small_model("llama"), fullgraph=True)(ids)


@pytest.mark.slow
def test_layers_compiled_one_by_one_give_the_same_results(ids, failures):
    """Inductor fuses the plain twins of the kernels."""
    model = small_model("mistral")
    packed = {"position_ids": PACKED[None]}
    expected = results(model, model, ids, **packed)
    for layer in model.layers:
        layer.compile()
    found = results(model, model, ids, **packed)
    assert not failures({name: relative_distance(found[name], expected[name]) for name in expected})
