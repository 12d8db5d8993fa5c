"""Attention of more elements than cuDNN's backward pass addresses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from liger_models.layers.attention import fused, fused_once


def test_pieces_that_cudnn_reaches_equal_the_whole(monkeypatch):
    def by_torch(q, k, v, mask, keep, dropout, causal, *rest, scale):
        sizes.append(q.numel())
        return (F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=True),)

    monkeypatch.setattr(torch, "_scaled_dot_product_cudnn_attention", by_torch)
    shapes = ((3, 4, 16, 8), (3, 2, 16, 8), (3, 2, 16, 8))
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found = []
    for reach in (fused_once.REACH, 512, 511):  # at once, by rows, by rows and key heads
        sizes: list[int] = []
        monkeypatch.setattr(fused, "REACH", reach)
        out = fused._by_cudnn(*operands, 0.3, True, 0.0, None)
        found.append((out, *torch.autograd.grad(out.square().sum(), operands)))
        assert max(sizes) <= max(reach, 256)
        assert len(sizes) == {511: 6, 512: 3}.get(reach, 1)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_a_gradient_that_cudnn_does_not_reach_is_copied():
    whole = torch.empty(600_000, 32, 128, dtype=torch.bfloat16, device="meta")
    view = whole[:, 4:8].unflatten(0, (1, -1)).transpose(1, 2)
    copied = fused_once.within_reach(view)
    assert copied.stride() == (600_000 * 512, 128, 512, 1)
    short = view[:, :, :500_000]
    assert fused_once.within_reach(short) is short
