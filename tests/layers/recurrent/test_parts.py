"""Gradients of split heads match torch's split, and adjacent ones are not copied."""

import pytest
import torch

from liger_models.layers.recurrent.parts import split_heads

WIDTHS = [3, 1, 4]
HEADS = [(3, 1), (1, 1), (2, 2)]


def by_head(parts):
    return tuple(part.unflatten(1, shape) for part, shape in zip(parts, HEADS, strict=True))


class Given(torch.autograd.Function):
    """Gives its operands these gradients."""

    @staticmethod
    def forward(ctx, gradients, *parts):
        ctx.gradients = gradients
        return parts[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return None, *ctx.gradients


def gradient_of_whole(gradients):
    x = torch.randn(5, 8, requires_grad=True)
    parts = split_heads(x, HEADS)
    assert all(torch.equal(a, b) for a, b in zip(parts, by_head(x.split(WIDTHS, 1)), strict=True))
    return torch.autograd.grad(Given.apply(by_head(gradients), *parts), x)[0]


def test_adjacent_gradients_are_not_copied():
    gradients = torch.randn(5, 8).split(WIDTHS, 1)
    found = gradient_of_whole(gradients)
    assert found.data_ptr() == gradients[0].data_ptr()
    assert torch.equal(found, torch.cat(gradients, 1))


wider, narrow = torch.randn(5, 9), torch.randn(5, 8)
OTHERS = {
    "of three tensors": [torch.randn(5, width) for width in WIDTHS],
    "in another order": [narrow[:, 5:], narrow[:, 4:5], narrow[:, :4]],
    "of a wider tensor": list(wider[:, :8].split(WIDTHS, 1)),
    "the same one twice": [narrow[:, :3], narrow[:, 3:4], narrow[:, :4]],
    "one with steps": [narrow[:, :3], narrow[:, 3:4], wider[:, ::2][:, :4]],
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_gradients_are_concatenated(case):
    gradients = OTHERS[case]
    assert torch.equal(gradient_of_whole(tuple(gradients)), torch.cat(list(gradients), 1))


def test_gaps_between_heads_are_closed():
    gradients = torch.randn(5, 2, 8).bfloat16()[:, :, :4], torch.randn(5, 1, 4).bfloat16()
    x = torch.randn(5, 12).bfloat16().requires_grad_()
    loss = Given.apply(gradients, *split_heads(x, [(2, 4), (1, 4)]))
    expected = torch.cat([part.flatten(1) for part in gradients], 1)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_a_part_that_is_not_used_has_a_gradient_of_zero():
    x = torch.randn(5, 8, requires_grad=True)
    first, _, last = split_heads(x, HEADS)
    (first.sum() + 2 * last.sum()).backward()
    assert x.grad.tolist() == [[1.0] * 3 + [0.0] + [2.0] * 4] * 5
