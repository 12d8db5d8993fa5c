"""Gated convolutions over grids of patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from liger_models.layers.grids.grid_conv import GridConvolution
from liger_models.layers.sequences.sequences import Grids, Sequences
from liger_models.layers.specs import GridConvSpec
from liger_models.layers.vision.patch_order import places_in_picture

SIZES, MERGE, WIDTH = ((4, 6), (8, 4), (4, 6)), 2, 12


def made(dtype: torch.dtype) -> tuple[GridConvolution, torch.Tensor, Sequences]:
    torch.manual_seed(0)
    module = GridConvolution(WIDTH, GridConvSpec(5)).to(dtype)
    for p in module.parameters():
        torch.nn.init.normal_(p)
    lengths = [h * w for h, w in SIZES]
    sequences = Sequences.of_lengths(lengths, torch.device("cpu"))
    sequences.grids = Grids(SIZES, MERGE)
    return module, torch.randn(sum(lengths), WIDTH, dtype=dtype, requires_grad=True), sequences


def by_the_formula(module: GridConvolution, x: torch.Tensor) -> torch.Tensor:
    """One picture after the other."""
    pieces = []
    for own, (h, w) in zip(x.split([h * w for h, w in SIZES]), SIZES, strict=True):
        row, column = places_in_picture(1, h, w, MERGE)
        before, after, u = module.in_proj(own).chunk(3, -1)
        raster = torch.zeros(h, w, WIDTH, dtype=x.dtype).index_put((row, column), before * u)
        weight = module.spatial_conv.weight
        conv = F.conv2d(raster.permute(2, 0, 1)[None], weight, padding="same", groups=WIDTH)[0]
        pieces.append(module.out_proj(after * conv[:, row, column].T))
    return torch.cat(pieces)


def test_outputs_and_gradients_are_those_of_the_formula():
    module, x, sequences = made(torch.float64)
    found, expected = module(x, sequences), by_the_formula(module, x)
    torch.testing.assert_close(found, expected)
    inputs, wanted = (x, *module.parameters()), torch.randn_like(x)
    gradients = (torch.autograd.grad(y, inputs, wanted) for y in (found, expected))
    for own, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(own, theirs)


def test_the_planned_bytes_are_those_that_autograd_saves():
    module, x, sequences = made(torch.float32)
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        y = module(x, sequences)
    own = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    assert y.requires_grad
    assert sum(size for place, size in saved.items() if place not in own) == len(x) * module.activation_bytes(
        "all", 4
    )
