"""Steps replayed as CUDA graphs have the bits of unrecorded steps, on a GPU."""

from __future__ import annotations

import pytest
import torch

import liger_models
from benchmarks.training.batches import IMAGES, make_batch
from liger_models.architectures import find_architecture

pytestmark = pytest.mark.gpu

TOKENS = 48
ROWS = (None,) * 6
PACKED = ((15, 48, 75), (48,), (7, 48), (48, 49), (), (30, 48, 90))


def make(family, level="lean", adapters=False, **changes):
    config = {key: value for key, value in find_architecture(family).tiny.items() if value is not ...}
    options = {"activation_memory": level, "projections": "split" if adapters else "fused"}
    torch.manual_seed(0)
    model = liger_models.from_config(config | changes, dtype=torch.bfloat16, device="cuda", **options)
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.train()


def train(model, documents):
    """Losses of steps of two micro-batches, the gradients of the last, and the weights."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = liger_models.optim.AdamW(trained.values(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(0), []
    torch.manual_seed(1)
    for number, bounds in enumerate(documents):
        ids = torch.randint(3, 60, (2, TOKENS), generator=generator)
        labels = ids.clone()
        labels[0, : 2 + number] = -100
        packed = {} if bounds is None else {"cu_seqlens": torch.tensor([0, *bounds, 2 * TOKENS])}
        loss = model(ids.cuda(), labels=labels.cuda(), num_items_in_batch=300, **packed).loss
        loss.backward()
        losses.append(loss.detach())
        if number % 2:
            gradients = {f"{name}.grad": p.grad.clone() for name, p in trained.items() if p.grad is not None}
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
    routers = {name: m.load for name, m in model.named_modules() if getattr(m, "load", None) is not None}
    return {"losses": torch.stack(losses), **gradients, **trained, **routers}


@pytest.mark.parametrize(
    ("family", "options", "documents"),
    [
        ("llama", {}, ROWS),
        ("llama", {}, PACKED),
        ("gemma2", {"level": "checkpoint"}, PACKED),
        ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.5}, PACKED),
        ("deepseek_v3", {"level": "mlp"}, PACKED),
        ("qwen3_next", {}, PACKED),
        ("granitemoehybrid", {"level": "tiled"}, PACKED),
        ("qwen3_moe", {"adapters": True, "level": "checkpoint"}, PACKED),
    ],
)
def test_replayed_steps_have_the_bits_of_unrecorded_ones(family, options, documents):
    expected = train(make(family, **options), documents)
    model = make(family, **options)
    own = model.get_base_model() if options.get("adapters") else model
    own.set_cuda_graphs()
    found = train(model, documents)
    assert any(own.recorded._recordings.values())
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs products in float8",
)
def test_replayed_steps_in_float8_have_the_bits_of_unrecorded_ones():
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}

    def steps(recorded):
        model = make("llama", num_attention_heads=2, num_key_value_heads=1, **sizes)
        assert "float8" in liger_models.set_float8(model, "rowwise", all_sizes=True).values()
        model.set_cuda_graphs(recorded)
        return train(model, PACKED)

    found, expected = steps(True), steps(False)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_replayed_steps_with_images_have_the_bits_of_unrecorded_ones():
    config = find_architecture("internvl").tiny
    call = make_batch(IMAGES, 2, 16, config, torch.device("cuda"))
    call = {name: x.bfloat16() if x.is_floating_point() else x for name, x in call.items()}

    def steps(recorded):
        model = make("internvl")
        model.set_cuda_graphs(recorded)
        for _ in range(4):
            model.zero_grad()
            loss = model(**call).loss
            loss.backward()
        if recorded:
            assert any(model.vision.encoder.recorded._recordings.values())
        return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}

    found, expected = steps(True), steps(False)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_dropout_draws_the_numbers_of_unrecorded_steps():
    def steps(recorded):
        model = make("starcoder2", residual_dropout=0.2, embedding_dropout=0.1, attention_dropout=0.0)
        model.set_cuda_graphs(recorded)
        return train(model, ROWS)

    found, expected = steps(True), steps(False)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_layer_that_reads_a_value_on_the_host_is_an_error():
    model = make("llama")
    forward = type(model.layers[0].mlp).forward

    class Reads(type(model.layers[0].mlp)):
        def forward(self, x, *more):
            x.sum().item()
            return forward(self, x, *more)

    model.layers[0].mlp.__class__ = Reads
    model.set_cuda_graphs()
    ids = torch.randint(3, 60, (1, TOKENS), device="cuda")
    model(ids, labels=ids).loss.backward()
    with pytest.raises(liger_models.ConfigError, match="reads a value on the host"):
        model(ids, labels=ids)
