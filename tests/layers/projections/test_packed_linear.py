"""Packed projections, and the same memory as layers of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from liger_models.convert.checkpoints.expressions import Ref, Rows
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.recompute.activation_memory import LEVELS, output_is_ours
from liger_models.layers.specs import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec, RopeSpec

NAMES = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
SEVEN = [*NAMES, "o_proj", "down_proj"]


@pytest.fixture
def model(randomised) -> CausalLM:
    attention = AttentionSpec(4, 2, 8, 8**-0.5, RopeSpec(8), qkv_bias=True)
    block = BlockSpec(attention, MLPSpec(40), NormSpec())
    return randomised(CausalLM(ModelSpec(61, 24, (block, block), NormSpec())))


def results(model):
    ids = torch.arange(22).view(2, 11) % 61
    model.zero_grad()
    output = model(ids, labels=ids, return_logits=True)
    output.loss.backward()
    return output.logits.detach(), by_name(model, lambda p: p.grad)


def by_name(model, get=lambda p: p.detach()):
    """Under the checkpoint's names."""
    own, found = model.saved_tensors(), {}
    for name, expression in model.weight_map().items():
        found |= expression.write(get(own[name]))
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_split_projections_give_the_same_logits_and_gradients_at_every_level(model, level):
    model.set_activation_memory(level)
    logits, gradients = results(model)
    model.split_projections()
    split_logits, split_gradients = results(model)
    # Products of other sizes may sum in another order: at most 40 terms, in float32.
    bound = 40 * torch.finfo(torch.float32).eps
    assert (split_logits - logits).norm() <= bound * logits.norm()
    assert split_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (split_gradients[name] - gradient).norm() <= bound * gradient.norm(), name


def test_split_projections_have_the_names_of_the_checkpoint(model):
    names = [name.removeprefix("model.") for name in checkpoint_shapes(model.weight_map())]
    shapes = checkpoint_shapes(model.weight_map())
    model.split_projections()
    assert sorted(name for name, _ in model.named_parameters()) == sorted(names)
    assert model.saved_tensors().keys() == model.weight_map().keys()
    assert checkpoint_shapes(model.weight_map()) == shapes
    for name in NAMES:
        owner = model.layers[0].self_attn if name[0] in "qkv" else model.layers[0].mlp
        assert type(getattr(owner, name)) is Linear


def test_splitting_and_fusing_copies_nothing_and_changes_nothing(model):
    results(model)
    before = {name: (p.data_ptr(), p.grad.data_ptr()) for name, p in model.named_parameters()}
    state, text = copy.deepcopy(model.state_dict()), repr(model)
    split_state = by_name(model)
    model.split_projections()
    packed = model.state_dict()
    for name, tensor in split_state.items():
        own = packed[name.removeprefix("model.")]
        assert own.data_ptr() == tensor.data_ptr(), name
        assert torch.equal(own, tensor)
    assert all(p.grad is not None for p in model.parameters())
    model.fuse_projections()
    assert {name: (p.data_ptr(), p.grad.data_ptr()) for name, p in model.named_parameters()} == before
    assert repr(model) == text
    again = model.state_dict()
    assert list(again) == list(state)
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_parts_that_were_moved_apart_are_fused_with_a_copy(model):
    logits, _ = results(model)
    model.split_projections()
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    model.fuse_projections()
    assert torch.equal(results(model)[0], logits)


def test_a_checkpoint_that_packs_as_we_do_is_found_in_split_projections_too(model):
    layout = Layout(whole=("*_proj.*",))
    fused = by_name_in(model, layout)
    assert "model.layers.0.self_attn.qkv_proj.weight" in fused
    model.split_projections()
    own, maps = model.saved_tensors(), model.weight_map(layout)
    assert checkpoint_shapes(maps) == {name: tuple(t.shape) for name, t in fused.items()}
    for name, expression in maps.items():
        assert torch.equal(expression.read(fused.__getitem__), own[name])
    assert maps["layers.0.self_attn.k_proj.bias"] == Rows(maps["layers.0.self_attn.v_proj.bias"].part, 32, 48)


def by_name_in(model, layout):
    own, found = model.saved_tensors(), {}
    for name, expression in model.weight_map(layout).items():
        found |= expression.write(own[name].detach())
    return found


def test_a_copy_of_a_split_model_uses_its_own_layers(model):
    model.split_projections()
    logits, _ = results(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(results(twin)[0], logits)


def test_only_plain_layers_are_split_and_fused(model):
    attention = model.layers[1].self_attn
    handle = attention.qkv_proj.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="has hooks; split before"):
        model.split_projections()
    handle.remove()
    model.split_projections()
    attention.k_proj = nn.Sequential(attention.k_proj)
    with pytest.raises(ValueError, match=r"a Sequential .* merge or unload adapters first"):
        model.fuse_projections()
    attention.k_proj = attention.k_proj[0].requires_grad_(False)
    with pytest.raises(ValueError, match="differ in dtype, device or requires_grad"):
        model.fuse_projections()


def test_memory_is_reused_in_both_forms(model):
    attention = model.layers[0].self_attn
    assert output_is_ours(attention.qkv_proj)
    model.split_projections()
    assert output_is_ours(attention.qkv_proj)
    attention.qkv_proj.register_forward_hook(lambda *args: None)
    assert not output_is_ours(attention.qkv_proj)


def test_part_names_are_not_in_the_state_dict_and_not_callable():
    packed = PackedLinear(6, {"a": 2, "b": 3}, bias=True)
    assert set(packed.state_dict()) == {"weight", "bias"}
    with pytest.raises(RuntimeError, match=r"split_projections\(\)"):
        packed.a(torch.zeros(1, 6))


# -- adapters


def lora(model, targets):
    peft = pytest.importorskip("peft")
    return peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=targets), model)


def test_adapting_parts_of_fused_projections_is_refused_with_a_remedy(model):
    for targets in (SEVEN, ["q_proj"], ["up_proj", "down_proj"]):
        with pytest.raises(ValueError, match=r"split_projections\(\)"):
            lora(copy.deepcopy(model), targets)


def test_peft_trains_the_usual_seven_layers_of_a_split_model(model):
    model.split_projections()
    lora(model, SEVEN)
    adapted = {name.split(".lora_")[0] for name, p in model.named_parameters() if "lora_" in name}
    assert len(adapted) == 2 * len(SEVEN)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    ids = torch.arange(22).view(2, 11) % 61
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.any() for name, p in model.named_parameters() if "lora_" in name)
    with pytest.raises(ValueError, match="merge or unload adapters first"):
        model.fuse_projections()


# -- checkpoints that hold a packed projection in another order of rows

BY_HEAD = {
    "joined": Layout(
        joined=(Joined("query_key_value", ("q_proj", "k_proj", "v_proj"), by="key_value_heads"),)
    ),
    "permuted": Layout(
        whole=("*.qkv_proj.*",),
        permuted=(
            ("*.qkv_proj.weight", "(key_value_heads 4 head_dim) h -> (4 key_value_heads head_dim) h"),
            ("*.qkv_proj.bias", "(key_value_heads 4 head_dim) -> (4 key_value_heads head_dim)"),
        ),
        rename=(("qkv_proj", "query_key_value"),),
    ),
}


@pytest.mark.parametrize("layout", BY_HEAD.values(), ids=BY_HEAD)
def test_a_split_layer_has_its_rows_in_the_order_of_the_checkpoint(model, layout):
    """One layer with the checkpoint's name, whose outputs are reordered."""
    model.layout = layout
    before, gradients = results(model)
    tensors = by_name_in(model, layout)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.split_projections()
    attention, name = model.layers[0].self_attn, "layers.0.self_attn.query_key_value.weight"
    assert torch.equal(attention.query_key_value.weight, tensors[f"model.{name}"])
    assert model.weight_map()[name] == Ref(f"model.{name}", tuple(attention.query_key_value.weight.shape))
    logits, split_gradients = results(model)
    bound = 40 * torch.finfo(torch.float32).eps  # as above
    assert (logits - before).norm() <= bound * before.norm()
    assert split_gradients.keys() == gradients.keys()
    for tensor, gradient in gradients.items():
        assert (split_gradients[tensor] - gradient).norm() <= bound * gradient.norm(), tensor
    assert by_name_in(model, layout).keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[n]) for n, tensor in by_name_in(model, layout).items())
    model.fuse_projections()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("layout", BY_HEAD.values(), ids=BY_HEAD)
def test_another_layout_is_written_from_layers_in_that_order(model, layout):
    usual = by_name_in(model, Layout())
    model.layout = layout
    model.split_projections()
    found = by_name_in(model, Layout())
    assert found.keys() == usual.keys()
    assert all(torch.equal(tensor, usual[name]) for name, tensor in found.items())


@pytest.mark.parametrize("layout", BY_HEAD.values(), ids=BY_HEAD)
def test_peft_trains_a_layer_in_that_order(model, layout):
    model.layout = layout
    model.split_projections()
    lora(model, ["query_key_value"])
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    ids = torch.arange(22).view(2, 11) % 61
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.any() for name, p in model.named_parameters() if "lora_" in name)
