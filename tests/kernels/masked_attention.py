"""Attention to chosen keys, compared with attention under a mask of these keys in float64."""

import torch
from operation_runs import in_float64, run_with_gradients

from liger_models.kernels import attention


def check_attention_to_mask(mask, value_width, **options):
    """Compare outputs and gradients of two heads with the same keys.

    Args:
        mask: [groups, T, T], the keys (columns) that each query attends to, of both heads or of each.
        value_width: channels of a value; queries and keys have 8.
        options: of `attention`.
    """
    tokens = mask.shape[-1]
    shapes = (tokens, 2, 8), (tokens, 1, 8), (tokens, 1, value_width)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found, grads, upstream = run_with_gradients(lambda *x: attention(*x, **options), inputs)

    def by_mask(q, k, v):
        scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * 8**-0.5
        return torch.einsum("hqk,kd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v[:, 0])

    expected, expected_grads, _ = run_with_gradients(
        by_mask, in_float64(inputs), [x.double() for x in upstream]
    )
    for a, b in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
