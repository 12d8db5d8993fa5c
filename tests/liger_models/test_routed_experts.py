"""Router replay: a call that takes the experts of another one, and returns its own."""

from __future__ import annotations

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import DataError
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import MLPSpec, MoESpec

BATCH, SEQ = 2, 7


def make(family="glm4_moe", **options):
    """A model whose first layer is dense, with a correction bias and a shared expert, unless another."""
    torch.manual_seed(0)
    model = liger_models.from_config(find_architecture(family).tiny, dtype=torch.float64, **options)
    with torch.no_grad():
        for tensor in model.saved_tensors().values():
            tensor.normal_(0, 0.3)
    return model


def batch(model):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.spec.vocab_size, (BATCH, SEQ), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def random_experts(model, like):
    """Distinct experts for every token and layer."""
    num = max(m.spec.num_experts for m in model.modules() if isinstance(m, MixtureOfExperts))
    order = torch.rand(*like.shape[:3], num, generator=torch.Generator().manual_seed(2)).argsort(-1)
    return order[..., : like.shape[-1]]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss", "qwen3_moe"])
def test_a_call_that_replays_its_own_choice_has_the_same_bits(family):
    model = make(family)
    call = batch(model)
    scores = model.score(**call, output_routed_experts=True)
    experts = scores.routed_experts
    assert experts.shape[:3] == (BATCH, SEQ, len(model.layers))
    assert (experts[0, 5:] == -1).all()  # padding
    dense = [not any(isinstance(m, MixtureOfExperts) for m in layer.modules()) for layer in model.layers]
    assert ((experts[0, 0] == -1).all(-1)).tolist() == dense
    assert family != "glm4_moe" or any(dense)
    again = model.score(**call, routed_experts=experts, output_routed_experts=True)
    assert torch.equal(again.routed_experts, experts)
    assert torch.equal(again.log_probs, scores.log_probs)
    first, second = (gradients(model, found.log_probs.sum()) for found in (scores, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], gradient) for name, gradient in first.items())
    own = experts[:, :, [not one for one in dense]]  # of the layers with experts alone
    assert torch.equal(model.score(**call, routed_experts=own).log_probs, scores.log_probs)
    with torch.no_grad():
        assert torch.equal(model(**call, output_routed_experts=True).routed_experts, experts)


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_weights_of_given_experts_are_computed_afresh(renormalize):
    """Values and gradients of a layer against the formula in a loop."""
    spec = MoESpec(6, 2, MLPSpec(12).intermediate_size, renormalize=renormalize)
    layer = MixtureOfExperts(8, spec).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.5, generator=generator)
    x = torch.randn(5, 8, dtype=torch.double, generator=generator, requires_grad=True)
    given = torch.tensor([[0, 5], [3, 1], [2, 4], [-1, -1], [5, 0]], dtype=torch.int32)
    sequences = Sequences.of_lengths([5], x.device)
    sequences.notes.routing.given = {layer.router: given}
    found = layer(x, sequences)

    scores = (x @ layer.router.weight.T).softmax(-1)
    chosen = torch.where(given < 0, scores.topk(2).indices, given.long())
    rows = []
    for token, experts in enumerate(chosen.tolist()):
        weights = scores[token, experts]
        weights = weights / weights.sum() if renormalize else weights
        total = 0.0
        for weight, e in zip(weights, experts, strict=True):
            gate, up = (layer.experts.gate_up_proj[e] @ x[token]).chunk(2)
            total = total + weight * (layer.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    expected = torch.stack(rows)
    torch.testing.assert_close(found, expected)
    operands = [x, *layer.parameters()]
    upstream = torch.randn(5, 8, dtype=torch.double, generator=generator)
    ours, theirs = (torch.autograd.grad(y, operands, upstream) for y in (found, expected))
    assert layer.router.weight is operands[1]
    assert theirs[1].any()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_replayed_experts_survive_recomputation_packing_and_micro_batches():
    model = make()
    call = batch(model)
    own = model.score(**call, output_routed_experts=True).routed_experts
    experts = random_experts(model, own)
    experts[1, 2] = -1  # this token routes itself
    scores = model.score(**call, routed_experts=experts, output_routed_experts=True)
    assert not torch.equal(scores.log_probs, model.score(**call).log_probs)
    moe = [i for i, layer in enumerate(model.layers) if (own[1, 0, i] >= 0).all()]
    used = scores.routed_experts[1][:, moe]
    assert torch.equal(used[[0, 1, 3, 4, 5, 6]].long(), experts[1][:, moe][[0, 1, 3, 4, 5, 6]])
    expected = gradients(model, scores.log_probs.sum())

    def check(log_probs, place=slice(None)):
        torch.testing.assert_close(log_probs, scores.log_probs[place])

    for level in ("all", "mlp", "checkpoint"):
        again = make(activation_memory=level)
        found = again.score(**call, routed_experts=experts)
        check(found.log_probs)
        for name, gradient in gradients(again, found.log_probs.sum()).items():
            torch.testing.assert_close(gradient, expected[name], msg=name)
    for row in range(BATCH):
        part = {name: x[row : row + 1] for name, x in call.items()}
        check(model.score(**part, routed_experts=experts[row : row + 1]).log_probs, slice(row, row + 1))
    ids = torch.cat([call["input_ids"][0, :5], call["input_ids"][1]])[None]
    flat = torch.cat([experts[0, :5], experts[1]])[None]
    bounds = torch.tensor([0, 5, 12])
    packed = model.score(ids, ids, cu_seqlens=bounds, routed_experts=flat).log_probs[0]
    torch.testing.assert_close(packed[5:], scores.log_probs[1])
    torch.testing.assert_close(packed[:4], scores.log_probs[0, :4])


def test_experts_that_do_not_fit_are_refused():
    model = make()
    call = batch(model)
    good = random_experts(model, model.score(**call, output_routed_experts=True).routed_experts)
    wrong = {
        r"expected integers \[2, 7, ": good[:, :, :, :1],
        r"torch\.float32": good.float(),
        "must be from 0 to": good + 100,
        "different for one token": good * 0,
        r"-1 where the layer": good - 2,
    }
    for message, experts in wrong.items():
        with pytest.raises(DataError, match=message):
            model.score(**call, routed_experts=experts)
    dense = make("llama")
    with pytest.raises(DataError, match="no layer of this model has experts"):
        dense.score(**batch(dense), output_routed_experts=True)
    random = make("phimoe")
    with pytest.raises(DataError, match="draw experts at random"):
        random.score(**batch(random), routed_experts=torch.zeros(BATCH, SEQ, len(random.layers), 2).long())
