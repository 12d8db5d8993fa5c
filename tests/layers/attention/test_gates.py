"""Gates of attention's output."""

import pytest
import torch

from liger_models.layers.attention.gates import split_gate


@pytest.mark.parametrize(("heads", "width", "rest"), [(3, 5, 7), (4, 8, 8)], ids=["odd", "words"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_is_split_from_the_queries_next_to_it(heads, width, rest, dtype):
    size = heads * width
    projected = torch.randn(6, 2 * size + rest, dtype=dtype, requires_grad=True)
    pairs, others = projected.split([2 * size, rest], -1)
    q, gate = pairs.view(6, heads, 2, width).unbind(2)
    expected = torch.cat([q.flatten(1), others], -1), gate.flatten(1)
    found = split_gate(projected, heads, width)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, expected, strict=True))
    upstream = [torch.randn_like(part) for part in expected]
    of_found, of_expected = (torch.autograd.grad(parts, projected, upstream) for parts in (found, expected))
    assert torch.equal(*of_found, *of_expected)
