"""Activation memory levels change only the tensors kept between the forward and the backward pass."""

from __future__ import annotations

import pytest
import torch
from level_runs import CHOICES, MIXED, assert_same_bits, run, wrap
from torch.utils.checkpoint import checkpoint

from liger_models.kernels._dispatch import interpret


@pytest.mark.parametrize("levels", CHOICES[1:], ids=str)
def test_every_level_gives_the_same_bits(levels, make_model, batch, at_all):
    model = make_model(window=4, activation_memory="all")
    expected = at_all(model, batch)
    model.set_activation_memory(levels)
    assert_same_bits(run(model, batch), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_every_level_gives_the_same_bits_through_the_kernels(make_model, batch):
    model = make_model(layers=2, activation_memory="all")
    batch = {name: value[:1, :6] for name, value in batch.items()}
    with interpret():
        expected = run(model, batch)
        for levels in (["lean", "checkpoint"], ["mlp", "tiled"], ["offload", "all"]):
            model.set_activation_memory(levels)
            assert_same_bits(run(model, batch), expected)


@pytest.mark.parametrize("levels", CHOICES[1:], ids=str)
@pytest.mark.parametrize("form", ["packed", "padded"])
def test_packing_and_padding_give_the_same_bits_at_every_level(form, levels, make_model, batch, at_all):
    if form == "packed":
        batch["cu_seqlens"] = torch.tensor([0, 5, 13, 22])
    else:
        batch["attention_mask"] = (torch.arange(11) < torch.tensor([[11], [6]])).long()
    model = make_model(activation_memory="all")
    expected = at_all(model, batch, form)
    model.set_activation_memory(levels)
    assert_same_bits(run(model, batch), expected)


@pytest.mark.parametrize("levels", CHOICES[1:], ids=str)
def test_autocast_gives_the_same_bits_at_every_level(levels, make_model, batch, at_all):
    """Backward runs outside autocast, and must rebuild what forward made inside it."""
    model = make_model(activation_memory="all")
    with torch.autocast("cpu", torch.bfloat16):
        expected = at_all(model, batch)
        model.set_activation_memory(levels)
        assert_same_bits(run(model, batch), expected)


@pytest.mark.parametrize("levels", CHOICES[1:], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_low_rank_adapters_train_the_same_at_every_level(dropout, levels, make_model, batch, at_all):
    model = wrap(make_model(activation_memory="all"), dropout)
    expected = at_all(model, batch, dropout)
    assert any(name.endswith("qkv_proj.a") for name in expected)
    assert not any("base" in name for name in expected)
    model.set_activation_memory(levels)
    assert_same_bits(run(model, batch), expected)


@pytest.mark.parametrize("levels", CHOICES, ids=str)
def test_a_low_rank_adapter_has_the_gradient_of_the_merged_weight(levels, make_model, batch):
    """d loss / d B = dW A^T and d loss / d A = B^T dW, where W = base + B A is trained in one piece."""
    model = wrap(make_model(activation_memory=levels)).double()
    found = run(model, batch)
    merged = make_model().double()
    names = [f"layers.{i}.{part}" for i in range(3) for part in ("self_attn.qkv_proj", "mlp.down_proj")]
    with torch.no_grad():
        for name in names:
            adapter = model.get_submodule(name)
            merged.get_submodule(name).weight += adapter.b @ adapter.a
    expected = run(merged, batch)
    torch.testing.assert_close(found["loss"], expected["loss"])
    for name in names:
        adapter, whole = model.get_submodule(name), expected[f"{name}.weight"]
        # float64 through the model; the loss and its gradients are float64 for float64 inputs
        torch.testing.assert_close(found[f"{name}.b"], whole @ adapter.a.T, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found[f"{name}.a"], adapter.b.T @ whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("levels", CHOICES[1:], ids=str)
@pytest.mark.parametrize("frozen", ["norm", "proj", "embed", "layers.0"])
def test_frozen_weights_keep_the_other_gradients(frozen, levels, make_model, batch, at_all):
    model = make_model(activation_memory="all")
    complete = at_all(model, batch)
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    model.set_activation_memory(levels)
    found = run(model, batch)
    assert_same_bits(found, {name: value for name, value in complete.items() if frozen not in name})


@pytest.mark.parametrize("levels", CHOICES[1:], ids=str)
def test_embeddings_can_be_trained_alone(levels, make_model, batch):
    """With every parameter frozen, gradients still reach the input (soft prompts)."""
    model = make_model(activation_memory="all").requires_grad_(False)
    gradients = []
    for choice in ("all", levels):
        model.set_activation_memory(choice)
        embeds = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        model(inputs_embeds=embeds, labels=batch["labels"]).loss.backward()
        gradients.append(embeds.grad)
    assert gradients[0].any()
    assert torch.equal(*gradients)


@pytest.mark.parametrize("levels", CHOICES, ids=str)
def test_backward_twice_gives_the_same_gradients(levels, make_model, batch):
    model = make_model(activation_memory=levels)
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    for once, again in zip(first, model.parameters(), strict=True):
        assert torch.equal(once, again.grad)


def test_torch_checkpoint_around_a_layer_with_dropout_reproduces(make_model, batch):
    """Whoever wraps our layers in torch's own checkpoint gets the same bits, the random ones too."""
    model = wrap(make_model(), dropout=0.5)
    expected = run(model, batch)
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    assert_same_bits(run(model, batch), expected)


def test_checkpointing_can_be_switched_on_and_off(make_model):
    model = make_model(activation_memory=MIXED)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert model.activation_memory == ("checkpoint",) * 3
    model.gradient_checkpointing_disable()
    assert model.activation_memory == tuple(MIXED)


@pytest.mark.parametrize("levels", ["tiled", "offload", MIXED], ids=str)
def test_disabling_and_enabling_again_restores_the_levels(levels, make_model):
    """As trainers do around the pass of a reference model, one within another too."""
    model = make_model(activation_memory=levels)
    chosen = model.activation_memory
    for _ in range(2):
        model.gradient_checkpointing_disable()
    for _ in range(2):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert model.activation_memory == chosen
    assert model.is_gradient_checkpointing


def test_disabled_levels_are_restored_unless_new_ones_are_set(make_model):
    model = make_model(activation_memory=MIXED)
    model.activation_checkpointing_enable(every_n_layers=2, offload=True)
    enabled = model.activation_memory
    assert enabled == ("offload", "lean@host", "offload")
    model.gradient_checkpointing_disable()
    assert model.activation_memory == tuple(MIXED)
    model.gradient_checkpointing_enable()
    assert model.activation_memory == enabled
    model.gradient_checkpointing_disable()
    model.set_activation_memory("lean")
    model.gradient_checkpointing_enable()
    assert model.activation_memory == ("checkpoint",) * 3


@pytest.mark.parametrize("level", ["tiled", "offload"])
def test_enabling_keeps_layers_that_are_recomputed_already(level, make_model):
    model = make_model(activation_memory=[level, "lean", level])
    model.gradient_checkpointing_enable()
    assert model.activation_memory == (level, "checkpoint", level)
    model.gradient_checkpointing_disable()
    assert model.activation_memory == (level, "lean", level)


def test_auto_survives_enabling_and_disabling(make_model):
    """It chooses for itself which layers are recomputed; options of a trainer take its place for a while."""
    model = make_model()
    model.set_activation_memory("auto", memory_budget="1KiB")
    chooses = model.fit_levels
    model.gradient_checkpointing_enable()
    assert model.fit_levels is chooses
    ids = torch.randint(0, 61, (16, 60))
    model(ids, labels=ids).loss.backward()
    chosen = model.activation_memory
    assert model.is_gradient_checkpointing  # nothing fits
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.fit_levels is chooses
    assert model.activation_memory == chosen
    model.activation_checkpointing_enable(every_n_layers=2)
    assert model.fit_levels is None
    model.activation_checkpointing_disable()
    assert model.fit_levels is chooses
    assert model.activation_memory == chosen


@pytest.mark.parametrize(
    ("levels", "message"), [("leen", "'leen'.*lean"), (["lean"] * 2, "got 2 .* for 3 layers")]
)
def test_wrong_levels_are_refused(levels, message, make_model):
    with pytest.raises(ValueError, match=message):
        make_model(activation_memory=levels)
