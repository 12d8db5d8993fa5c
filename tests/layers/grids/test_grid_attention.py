"""Attention within grids of patches is the softmax of the scores that the formula states."""

from __future__ import annotations

import copy

import pytest
import torch

from liger_models.layers.grids.grid_attention import GridAttention
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GridAttentionSpec
from liger_models.layers.vision.patch_order import places_in_picture


def by_the_formula(module: GridAttention, x: torch.Tensor) -> torch.Tensor:
    """One picture after the other and one window after the other, with every score."""
    spec, size = module.spec, module.spec.side**2
    row, column = places_in_picture(1, spec.side, spec.side, spec.merge)
    width, out = spec.width, torch.zeros_like(x)
    for first in range(0, len(x), size):
        for top in range(0, spec.side, width):
            for left in range(0, spec.side, width):
                within = (row // width == top // width) & (column // width == left // width)
                own = within.nonzero()[:, 0]
                at = (row[own] - top) * width + column[own] - left
                states = x.new_zeros(width**2, x.shape[1])  # zeros beyond the grid
                states[at] = x[first + own]
                q, k, v = module.qkv_proj(states).view(width**2, 3, -1, spec.head_dim).unbind(1)
                i, j = (
                    torch.arange(width**2).div(width, rounding_mode="floor"),
                    torch.arange(width**2) % width,
                )
                rows = module.rel_pos_h[i[:, None] - i + width - 1]  # [L, L, dim]
                columns = module.rel_pos_w[j[:, None] - j + width - 1]
                scores = spec.scale * torch.einsum("qhd,khd->hqk", q, k)
                scores = scores + torch.einsum("qhd,qkd->hqk", q, rows + columns)
                made = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
                out[first + own] = module.o_proj(made)[at]
    return out


@pytest.mark.parametrize("window", [None, 3, 4], ids=["whole", "windows beyond the grid", "windows"])
def test_outputs_and_gradients_are_those_of_the_formula(window):
    torch.manual_seed(0)
    spec = GridAttentionSpec(2, 4, 0.3, side=8, merge=2, window=window)
    module = GridAttention(12, spec).double()
    for p in module.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2 * 64, 12, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn_like(x)
    found, expected = module(x, Sequences.of_lengths([64, 64], x.device)), by_the_formula(module, x)
    torch.testing.assert_close(found, expected)
    inputs = (x, *module.parameters())
    gradients = (torch.autograd.grad(y, inputs, wanted) for y in (found, expected))
    for own, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(own, theirs)


def test_places_beyond_the_grid_are_summed_as_precisely_as_others():
    """All of them have the bias alone as keys and values: in bfloat16, a sum one by one would lose most."""
    torch.manual_seed(0)
    exact = GridAttention(16, GridAttentionSpec(2, 8, 0.3, side=18, merge=1, window=16)).double()
    with torch.no_grad():
        for p in exact.parameters():
            p.normal_(std=0.2).copy_(p.bfloat16())
    module = copy.deepcopy(exact).bfloat16()
    x, wanted = torch.randn(2, 2 * 18**2, 16, dtype=torch.bfloat16)
    sequences = Sequences.of_lengths([18**2] * 2, x.device)

    def gradient(made):
        (made * wanted).sum().backward()

    gradient(module(x, sequences))
    gradient(exact(x.double(), sequences))
    own, theirs = (m.qkv_proj.bias.grad.double().chunk(3)[2] for m in (module, exact))
    assert (own - theirs).norm() < 2**-6 * theirs.norm()
