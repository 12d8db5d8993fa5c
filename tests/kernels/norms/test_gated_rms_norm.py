"""gated_rms_norm: its options against formulas, and errors."""

import sys

import pytest
import torch

from liger_models.kernels import gated_rms_norm


def formula(x, gate, weight, group, gate_first, activation):
    """The formula in float64, group by group."""
    slope = torch.sigmoid(gate)
    activated = gate * slope if activation == "silu" else slope
    parts = []
    for first in range(0, x.shape[1], group):
        part, act = x[:, first : first + group], activated[:, first : first + group]
        hidden = part * act if gate_first else part
        normed = hidden / (hidden.square().mean(1, keepdim=True) + 1e-3).sqrt()
        scaled = normed * (weight if len(weight) == group else weight[first : first + group])
        parts.append(scaled if gate_first else scaled * act)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("cast", ["llama", "float32"])
def test_groups_of_any_width_follow_the_formula(
    shared, gate_first, activation, cast, implementation, assert_near
):
    for rows, groups, group in ((5, 3, 8), (33, 2, 20)):
        channels = groups * group
        shapes = (rows, channels), (rows, channels), (group if shared else channels,)
        inputs = [torch.randn(*shape).requires_grad_() for shape in shapes]
        options = {"group_size": group, "gate_first": gate_first, "activation": activation}
        y = gated_rms_norm(*inputs, 1e-3, cast=cast, **options)
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        truth = formula(*exact, group, gate_first, activation)
        upstream = torch.randn_like(y)
        grads = torch.autograd.grad(y, inputs, upstream)
        true_grads = torch.autograd.grad(truth, exact, upstream.double())
        # A chain of about a dozen operations with a sum over the group; gradients take twice that and sum
        # over rows.
        assert_near(y, truth, 12 + group)
        for grad, true in zip(grads, true_grads, strict=True):
            assert_near(grad, true, 24 + 2 * group + rows)


@pytest.mark.parametrize(("gate_first", "cast"), [(True, "llama"), (False, "float32")])
def test_gradients_in_parts_equal_those_of_whole_groups(
    gate_first, cast, interpreted, monkeypatch, assert_near
):
    inputs = [torch.randn(*shape).requires_grad_() for shape in ((5, 40), (5, 40), (40,))]
    y = gated_rms_norm(*inputs, 1e-3, group_size=20, gate_first=gate_first, cast=cast)
    whole = torch.autograd.grad(y, inputs, upstream := torch.randn_like(y), retain_graph=True)
    monkeypatch.setattr(sys.modules[gated_rms_norm.__module__], "_WIDE", 8)
    monkeypatch.setattr(sys.modules[gated_rms_norm.__module__], "_WIDE_TILE", (1, 8, 4))
    for grad, expected in zip(torch.autograd.grad(y, inputs, upstream), whole, strict=True):
        assert_near(grad, expected.double(), 20)  # sums over the group in another order


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("cast", ["llama", "float32"])
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.float16, torch.float32)], ids=str)
def test_kernel_and_plain_form_round_at_the_same_places(gate_first, cast, dtypes, request):
    x, gate = (torch.randn(6, 24).to(dtypes[0]) for _ in range(2))
    weight = torch.randn(8).to(dtypes[1])

    def run():
        return gated_rms_norm(x, gate, weight, group_size=8, gate_first=gate_first, cast=cast)

    plain = run()
    request.getfixturevalue("interpreted")
    kernel = run()
    assert kernel.dtype == plain.dtype
    # The sum over a group may run in a different order: a result is then the adjacent number at most.
    torch.testing.assert_close(kernel, plain, rtol=2**-10, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "gelu"}, "expected 'silu' or 'sigmoid'"),
        ({"cast": "gemma"}, "expected 'llama' or 'float32'"),
        ({"gate": torch.ones(2, 23)}, r"gate \(2, 23\); expected one shape"),
        ({"group_size": 7}, "expected a divisor of 24"),
        ({"group_size": 0}, "expected a divisor of 24"),
        ({"weight": torch.ones(6)}, r"weight is \(6,\); expected \(8,\) or \(24,\)"),
    ],
)
def test_incompatible_inputs_are_refused(change, message):
    call = {"gate": torch.ones(2, 24), "weight": torch.ones(8), "group_size": 8} | change
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(torch.ones(2, 24), **call)


# Heads of Qwen3-Next, groups of Nemotron-H, Granite 4's single group, and more groups than one row has.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("channels", "group", "shared"),
    [(4096, 128, True), (8192, 1024, False), (8192, 8192, False), (96, 24, True)],
)
@pytest.mark.parametrize("gate_first", [True, False])
def test_real_widths_follow_the_formula_on_a_gpu(channels, group, shared, gate_first):
    wide = torch.randn(700, 3 * channels, device="cuda", dtype=torch.bfloat16)
    x, gate = (wide[:, nth * channels : (nth + 1) * channels].detach().requires_grad_() for nth in (0, 2))
    weight = torch.randn(group if shared else channels, device="cuda").bfloat16().requires_grad_()
    y = gated_rms_norm(x, gate, weight, 1e-3, group_size=group, gate_first=gate_first, cast="float32")
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, gate, weight)]
    truth = formula(*exact, group, gate_first, "silu")
    upstream = torch.randn_like(y)
    found = y, *torch.autograd.grad(y, (x, gate, weight), upstream)
    expected = truth, *torch.autograd.grad(truth, exact, upstream.double())
    # Rounded once, after sums in float32.
    for ours, true in zip(found, expected, strict=True):
        assert (ours - true).norm() < (torch.finfo(torch.bfloat16).eps + 1e-5) * true.norm()
