"""Clamping of hidden states (layers/conformer/clip.py)."""

import pytest
import torch

from liger_models.layers.conformer.clip import clip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bound", [2.1, 1e10])
def test_a_clip_and_its_gradient_are_torchs(bound, dtype):
    """At a bound, too, where elements still have a gradient, which they lost in torch 2.14."""
    largest = min(bound, torch.finfo(dtype).max)
    at = torch.tensor(largest, dtype=dtype)
    beyond = torch.tensor([2 * largest, torch.inf, torch.nan]).to(dtype)
    x = torch.cat([at[None], beyond, torch.randn(9, dtype=dtype)])
    x, dy = torch.cat([x, -x]), torch.randn(26, dtype=dtype)
    own = x.clone().requires_grad_()
    y = clip(own, bound)
    y.backward(dy)
    gradient = torch.where(x.abs() <= largest, dy, 0)
    assert not gradient[1:4].any()
    for found, expected in ((y.detach(), x.clamp(-largest, largest)), (own.grad, gradient)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
