"""Gradients of split channels match torch's split, and adjacent ones are not copied."""

import pytest
import torch

from liger_models.layers.recurrent.parts import split_channels

WIDTHS = [3, 1, 4]


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
    parts = split_channels(x, WIDTHS)
    assert all(torch.equal(a, b) for a, b in zip(parts, x.split(WIDTHS, 1), strict=True))
    return torch.autograd.grad(Given.apply(gradients, *parts), x)[0]


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


def test_a_part_that_is_not_used_has_a_gradient_of_zero():
    x = torch.randn(5, 8, requires_grad=True)
    first, _, last = split_channels(x, WIDTHS)
    (first.sum() + 2 * last.sum()).backward()
    assert x.grad.tolist() == [[1.0] * 3 + [0.0] + [2.0] * 4] * 5
