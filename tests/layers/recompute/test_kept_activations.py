"""Every level keeps and frees what it promises, and notices tensors changed before the backward pass."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from level_runs import CHOICES, assert_same_bits, run
from live_bytes import LiveBytes, as_on_a_gpu
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from liger_models.layers.parts.norm import LigerRMSNorm
from liger_models.layers.recompute import tiles
from liger_models.layers.recompute.activation_memory import (
    _RECIPES,
    LEVELS,
    RERUN,
    carry_recipe,
    keep_recipes,
    recompute,
)


@pytest.mark.parametrize(
    ("level", "changed"),
    [
        ("all", "mlp.down_proj"),
        ("lean", "mlp.down_proj"),
        ("lean", "input_layernorm"),
        ("lean", "post_attention_layernorm"),
        ("mlp", "self_attn.o_proj"),
        ("mlp", "input_layernorm"),
    ],
)
def test_a_weight_changed_before_backward_raises(level, changed, make_model, batch):
    """Backward would compute with the new weight what forward computed with the old one. (Weights that are
    only read by what runs again as a whole are beyond this check, as under torch's own checkpoint.)
    """
    model = make_model(activation_memory=level)
    loss = model(**batch).loss
    with torch.no_grad():
        model.layers[1].get_submodule(changed).weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_a_recipe_detects_a_change_in_place():
    x = torch.randn(4, 3)
    weight = nn.Parameter(torch.randn(3))
    with keep_recipes():
        made = carry_recipe((x + 0) * weight, torch.mul, x, weight)
        out = (made * made).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"modified in place.*version 1, expected 0"):
        out.backward()


def edit(module, args):
    """A forward pre-hook that changes the module's input in place, by a constant factor."""
    args[0].mul_(1.5)


def edit_unseen(module, args):
    """The same, unseen by autograd: a change whose gradient is meant to be that of the identity."""
    with torch.no_grad():
        args[0].mul_(1.5)


def edit_twice(module, args):
    args[0][:, :4].mul_(1.5)  # through a view
    nn.functional.dropout(args[0], 0.5, inplace=True)


@pytest.mark.parametrize("levels", CHOICES[1:], ids=str)
@pytest.mark.parametrize("hook", [edit, edit_unseen, edit_twice])
@pytest.mark.parametrize("part", ["self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"])
def test_an_output_edited_in_place_before_its_use_has_the_same_gradients(
    part, hook, levels, make_model, batch, at_all
):
    """The norms' output and the gated product, whose recipes would make the unedited tensor again."""
    model = make_model(activation_memory="all")
    for layer in model.layers:
        layer.get_submodule(part).register_forward_pre_hook(hook)
    expected = at_all(model, batch, part, hook)
    model.set_activation_memory(levels)
    assert_same_bits(run(model, batch), expected)


class Halving(nn.Module):
    """An adapter that begins in place."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(base.out_features, base.in_features))

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        return out + x.mul_(0.5) @ self.a.T


@pytest.mark.parametrize("levels", ["all", "lean"])
def test_an_edit_after_a_use_is_handled_or_detected(levels, make_model, batch):
    """At `all` autograd notices it: the projection's gradient needs the unedited tensor. (Recomputation does
    not detect it, as torch's own checkpoint does not.)
    """
    torch.manual_seed(3)
    model = make_model(activation_memory=levels)
    for layer in model.layers:
        layer.mlp.down_proj = Halving(layer.mlp.down_proj)
    found = run_or_none(model, batch)
    for layer in model.layers:
        halving = layer.mlp.down_proj
        halving.forward = lambda x, h=halving: h.base(x) + (0.5 * x) @ h.a.T
    expected = run(model, batch)
    if found is not None:
        assert_same_bits(found, expected)


def run_or_none(model, batch):
    try:
        return run(model, batch)
    except RuntimeError as error:
        if "modified" not in str(error):
            raise
        return None


@pytest.mark.parametrize("levels", CHOICES, ids=str)
def test_an_edit_of_a_layers_input_is_handled_or_detected(levels, make_model, batch):
    """A layer that runs again would edit its input a second time."""
    model = make_model(activation_memory=levels)
    model.layers[1].register_forward_pre_hook(edit)
    found = run_or_none(model, batch)
    model.layers[1]._forward_pre_hooks.clear()
    model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
    if found is not None:
        assert_same_bits(found, run(model, batch))


@pytest.mark.parametrize("levels", CHOICES, ids=str)
def test_offloading_by_the_caller_changes_no_bit(levels, make_model, batch):
    model = make_model(activation_memory=levels)
    expected = run(model, batch)
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(run(model, batch), expected)


def test_a_callers_hooks_get_every_saved_tensor(make_model, batch):
    """Recipes do not apply: offloaded, their inputs would take as much room as their outputs."""
    model, seen = make_model(), {}
    for level in ("all", "lean"):
        model.set_activation_memory(level)
        shapes = seen[level] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, shapes=shapes: (shapes.append(tensor.shape), tensor)[1], lambda tensor: tensor
        ):
            model(**batch)
    assert seen["lean"] == seen["all"]


def test_a_saved_norm_output_is_a_tensor_alone(tmp_path):
    """Files written to disk belong to no model, and can be read without our code."""
    y = LigerRMSNorm(8)(torch.randn(3, 8))
    torch.save(y, tmp_path / "y.pt")
    assert (tmp_path / "y.pt").stat().st_size < 3000  # with its recipe it would include the inputs
    assert b"liger_models" not in (tmp_path / "y.pt").read_bytes()
    assert torch.equal(torch.load(tmp_path / "y.pt", weights_only=True), y)


@pytest.mark.parametrize("levels", CHOICES, ids=str)
def test_activations_are_freed_without_the_garbage_collector(levels, make_model, batch):
    model = make_model(activation_memory=levels)
    alive: list[Any] = []

    def note(module, args, output):
        tensors = [t for t in tree_leaves((args, output)) if isinstance(t, Tensor) and not t.is_leaf]
        alive.extend(weakref.ref(t) for t in tensors)
        alive.extend(StorageWeakRef(t.untyped_storage()) for t in tensors)

    for module in model.modules():
        module.register_forward_hook(note)
    gc.collect()
    gc.disable()
    try:
        output = model(**batch, return_logits=True)
        output.loss.backward(retain_graph=True)
        assert alive
        del output
        dead = [r.expired() if isinstance(r, StorageWeakRef) else r() is None for r in alive]
        assert all(dead), f"{dead.count(False)} of {len(dead)} are still alive"
    finally:
        gc.enable()


@pytest.mark.parametrize("levels", CHOICES, ids=str)
def test_recipes_are_forgotten_with_their_tensors(levels, make_model, batch):
    before = set(_RECIPES)
    loss = make_model(activation_memory=levels)(**batch).loss
    loss.backward()
    assert set(_RECIPES) <= before


# -- bytes


def bytes_a_layer(make_model, level, **options) -> float:
    """Bytes per token kept by one more layer: the difference between three layers and two."""
    living = []
    tokens = 24
    ids = torch.randint(0, 61, (1, tokens))
    for layers in (2, 3):
        model = make_model(layers, activation_memory=level, **options)
        model(ids[:, :1])  # creates data shared by all models, such as rotary frequencies
        with LiveBytes(model.parameters()) as live:
            loss = model(ids, labels=ids).loss
        living.append(live.now)
        del loss
    return (living[1] - living[0]) / tokens


def test_each_level_keeps_less_than_the_one_before(make_model):
    kept = [bytes_a_layer(make_model, level) for level in LEVELS]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(LEVELS) - 1
    of_level = dict(zip(LEVELS, kept, strict=True))
    assert of_level["tiled"] == of_level["checkpoint"]
    assert of_level["offload"] == 0


@pytest.mark.parametrize("level", RERUN)
def test_a_recomputed_layer_frees_its_first_norm_during_the_mlps_backward_pass(level, make_model):
    model = make_model(1, activation_memory=level)
    layer, made, gone = model.layers[0], [], []

    def note(norm, args, y):
        made.append(StorageWeakRef(y.untyped_storage()))

    layer.input_layernorm.register_forward_hook(note)
    layer.mlp.register_full_backward_hook(lambda *_: gone.append(made[-1].expired()))
    ids = torch.randint(0, 61, (1, 24))
    model(ids, labels=ids).loss.backward()
    assert len(made) == 2
    assert gone == [True]


def test_checkpoint_keeps_only_the_layer_input(make_model):
    assert bytes_a_layer(make_model, "checkpoint") == 4 * 32


@pytest.mark.parametrize(("level", "streams"), [("tiled", 1), ("offload", 0)])
def test_an_mlp_run_in_tiles_through_autograd_keeps_nothing_more(level, streams, make_model, monkeypatch):
    """As with adapters or hooks in it: each tile is recomputed within the layer, which is recomputed too."""
    monkeypatch.setattr(tiles, "TILE", 8)

    def hooked(*args, **options):
        model = make_model(*args, **options)
        for module in model.modules():
            module.register_forward_hook(lambda *_: None)
        return model

    assert bytes_a_layer(hooked, level) == streams * 4 * 32


def test_nested_recomputes_keep_nothing():
    x = torch.randn(100, requires_grad=True)

    def outer(x: Tensor) -> Tensor:
        return recompute(torch.sin, x * 2).sum()

    with LiveBytes([x]) as live:
        y = recompute(outer, x)
        assert live.now == y.nbytes
        y.backward()
        assert live.now == y.nbytes + x.nbytes
    torch.testing.assert_close(x.grad, 2 * torch.cos(2 * x.detach()))


@pytest.mark.parametrize("inside", [True, False])
def test_editing_an_input_of_a_nested_recompute_raises(inside):
    """The second run of the inner function would read the input as the edit left it."""
    x = torch.randn(5, requires_grad=True)

    def outer(x: Tensor) -> Tensor:
        made = x * 2
        y = recompute(lambda made: made.mul_(1.5).sin() if inside else made.sin(), made)
        if not inside:
            with torch.no_grad():
                made.mul_(3)
        return y.cos()

    y = recompute(outer, x)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.sum().backward()


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_function_runs_once(without):
    calls = []
    with without():
        y = recompute(lambda x: calls.append(x) or x * 2, torch.ones(3))
    assert len(calls) == 1
    assert y.tolist() == [2.0, 2.0, 2.0]


def test_all_keeps_as_many_bytes_as_a_layer_reports(make_model):
    """(Of the levels with recipes: test_blocks.py.)"""
    # As many key/value heads as heads: with fewer, attention repeats them on a CPU but not on a GPU.
    with as_on_a_gpu():
        kept = bytes_a_layer(make_model, "all", kv_heads=4)
    assert kept == make_model(kv_heads=4).layers[0].activation_bytes("all", 4)


def test_lean_keeps_the_documented_tensors(make_model):
    """With the kernels: two sums of the residual stream, q|k|v, attention's output, gate and up, in float32;
    and one statistic per token and norm, and one per token and head.
    """
    hidden, qkv, attended, inner, heads = 32, (4 + 2 * 4) * 16, 4 * 16, 40, 4
    with as_on_a_gpu():
        kept = bytes_a_layer(make_model, "lean", kv_heads=4, bias=False)
    assert kept == 4 * (2 * hidden + qkv + attended + 2 * inner + 2 + heads)
