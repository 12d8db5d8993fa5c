"""Canonical forms carry the sizes that modules name; layouts split and join tensors by these."""

import pytest
import torch
from torch import nn

from liger_models.convert.checkpoints.layout import Joined, Layout, canonical_forms
from liger_models.convert.checkpoints.weight_map import check_whole, checkpoint_shapes
from liger_models.layers.attention.self_attention import Attention
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.specs import AttentionSpec

GROUPS, HIDDEN = 3, 7
WIDTHS = {"q": 4, "k": 2, "v": 10, "z": 5}  # widths within a group


class Mixer(nn.Module):
    """One projection for pieces of unequal widths."""

    def __init__(self):
        super().__init__()
        self.axes = {"groups": GROUPS}
        self.proj = PackedLinear(HIDDEN, {part: GROUPS * width for part, width in WIDTHS.items()}, bias=True)


def named(module, path="layers.0"):
    """Nest a module, at a path of two steps."""
    outer, inner = path.split(".")
    return nn.ModuleDict({outer: nn.ModuleDict({inner: module})})


def written(model, layout):
    own, found = dict(model.named_parameters()), {}
    for name, expr in layout.weight_map(canonical_forms(model)).items():
        found |= expr.write(own[name].detach())
    return found


def test_canonical_forms_carry_the_axes_of_the_modules_around_them():
    model = named(Mixer())
    model.axes = {"groups": 5, "width": 6}
    model["layers"].norm = nn.LayerNorm(4)
    axes = {ref.name: dict(ref.axes) for form in canonical_forms(model).values() for ref in form.refs()}
    assert axes["layers.0.q.weight"] == {"groups": GROUPS, "width": 6}  # from the nearest module
    assert axes["layers.norm.bias"] == {"groups": 5, "width": 6}


def test_attention_names_its_heads():
    spec = AttentionSpec(num_attention_heads=6, num_key_value_heads=2, head_dim=4, scale=0.5, rope=None)
    forms = canonical_forms(Attention(24, spec))
    axes = {"heads": 6, "key_value_heads": 2, "head_dim": 4}
    assert all(ref.axes == axes for form in forms.values() for ref in form.refs())


def test_a_joined_tensor_holds_its_parts_group_by_group():
    model = named(Mixer())
    layout = Layout(joined=(Joined("qkvz", ("q", "k", "v", "z"), by="groups"),), rename=((".0.", ".zero."),))
    tensors = written(model, layout)
    assert tensors.keys() == {"model.layers.zero.qkvz.weight", "model.layers.zero.qkvz.bias"}
    for kind in ("weight", "bias"):
        own = model["layers"]["0"].proj.get_parameter(kind).detach()
        by_group = tensors[f"model.layers.zero.qkvz.{kind}"].unflatten(0, (GROUPS, -1))
        pieces = by_group.split(list(WIDTHS.values()), dim=1)
        assert torch.equal(torch.cat([piece.flatten(0, 1) for piece in pieces]), own)


def test_some_parts_are_joined_and_the_others_stay_separate():
    model = named(Mixer())
    layout = Layout(joined=(Joined("zk", ("z", "k"), by="groups"), Joined("qv", ("q", "v"))))
    weight_map = layout.weight_map(canonical_forms(model))
    check_whole(weight_map)
    shapes = checkpoint_shapes(weight_map)
    assert shapes["model.layers.0.zk.weight"] == (GROUPS * 7, HIDDEN)
    assert shapes["model.layers.0.qv.bias"] == (GROUPS * 14,)
    q, _, v, _ = model["layers"]["0"].proj.weight.detach().split([GROUPS * n for n in WIDTHS.values()])
    assert torch.equal(written(model, layout)["model.layers.0.qv.weight"], torch.cat([q, v]))


def test_an_order_may_use_the_axes_of_a_module():
    spec = AttentionSpec(num_attention_heads=3, num_key_value_heads=3, head_dim=4, scale=0.5, rope=None)
    model = named(Attention(12, spec), "layers.attn")
    whole = Layout(
        whole=("*.qkv_proj.*",),
        permuted=(("*.qkv_proj.weight", "(heads 3 head_dim) h -> (3 heads head_dim) h"),),
    )
    name = "model.layers.attn.qkv_proj.weight"
    parts = Layout(joined=(Joined("qkv_proj", ("q_proj", "k_proj", "v_proj"), by="heads"),))
    assert torch.equal(written(model, whole)[name], written(model, parts)[name])


@pytest.mark.parametrize(
    ("joined", "message"),
    [
        (Joined("qx", ("q", "x")), "layers.0.qx.weight should join q, x, but the model has no x"),
        (Joined("qk", ("q", "k"), by="heads"), "divided by 'heads', and its module names the axes groups"),
        (Joined("qk", ("q", "k"), by="halves"), r"rows cannot be divided into 5 groups"),
    ],
)
def test_a_layout_that_does_not_fit_is_an_error_that_says_how(joined, message):
    model = named(Mixer())
    if joined.by == "halves":
        model["layers"]["0"].axes = {"halves": 5}
    with pytest.raises(ValueError, match=message):
        Layout(joined=(joined,)).weight_map(canonical_forms(model))
